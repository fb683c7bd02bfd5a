"""The store of one run: what `hk.sample` writes while it samples, left beside the tables for those who want draws."""

from __future__ import annotations

from typing import Any

import hookean as hk
from hookean.experiments.report import STORE, Report


def keep_store(report: Report, target: hk.Target, init: Any, **settings: Any) -> None:
    """Sample once more, into FOLDER/run.zarr; a note says why, where that cannot be."""
    if not report.settings.get("store", True):
        return
    try:
        hk.sample(target, init, store=report.folder / STORE, progress=False, **settings)
    except hk.ArgumentError as error:  # where the package zarr is missing
        report.note(f"The store of one run is left out: {error}.")
