"""The store of one run: what `hk.sample` writes while it samples, left beside the tables for those who want draws."""

from __future__ import annotations

import inspect
from typing import Any

import hookean as hk
from hookean.experiments.report import STORE, Report


def keep_store(report: Report, target: hk.Target, init: Any, **settings: Any) -> None:
    """Sample once more, into FOLDER/run.zarr; a note says why, where that cannot be."""
    if not report.settings.get("store", True):
        return
    if "store" not in inspect.signature(hk.sample).parameters:
        report.note("The store of one run is left out: this version of hookean writes none.")
        return
    try:
        hk.sample(target, init, store=report.folder / STORE, progress=False, **settings)
    except ImportError as error:
        report.note(f"The store of one run is left out: {error}.")
