"""The folder that an experiment leaves: config.json, tables as CSV, figures as PNG and SVG, and one page, index.html.

Tables are written first, and line by line where a run is long, so that what was measured survives a run that is
killed; figures and the page are made of the tables alone, and can be made again (`hookean reproduce draw FOLDER`).
"""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hookean.types import ArgumentError

Row = dict[str, Any]

COLOURS = {
    "blue": "#0072B2",
    "orange": "#D55E00",
    "green": "#009E73",
    "pink": "#CC79A7",
    "yellow": "#E69F00",
    "sky": "#56B4E9",
    "grey": "#777777",
    "black": "#222222",
}
"""Okabe and Ito's, which stay apart for colour-blind eyes."""
PACKAGES = ("hookean", "jax", "jaxlib", "numpy", "matplotlib")
CONFIG = "config.json"
STORE = "run.zarr"
WRITTEN = ("csv", "png", "svg", "gif", "mp4", "html")


class Report:
    """One folder of results."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Use `make` for a new folder and `open` for one that is there."""
        self.folder, self.config = folder, config
        self._figures: dict[str, tuple[str, bytes]] = {}

    @classmethod
    def make(cls, folder: Path, experiment: str, settings: Mapping[str, Any], resume: bool = False) -> Report:
        """A new folder, or with `resume` the one that is there; refuses one that holds something else."""
        if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file())):
            raise ArgumentError("--out", f"{folder} exists and holds no results", "Name a new or an empty folder")
        for kind in WRITTEN if folder.is_dir() and not resume else ():
            for path in folder.glob(f"*.{kind}"):  # what an earlier run left must not pass for this one's
                path.unlink()
        shutil.rmtree(folder / STORE, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"experiment": experiment, "settings": dict(settings), **provenance()}
        (folder / CONFIG).write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
        return cls(folder, config)

    @classmethod
    def open(cls, folder: Path) -> Report:
        """A folder that an earlier run left."""
        if not (folder / CONFIG).is_file():
            raise ArgumentError("FOLDER", f"{folder} has no {CONFIG}", "Name a folder that hookean reproduce wrote")
        return cls(folder, json.loads((folder / CONFIG).read_text(encoding="utf-8")))

    @property
    def settings(self) -> dict[str, Any]:
        """What the experiment was asked for."""
        return self.config["settings"]

    # -- tables -------------------------------------------------------------------------------------------------------

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Add lines to NAME.csv. All rows of a table have the same columns."""
        path, rows = self.folder / f"{name}.csv", list(rows)
        if not rows:
            return
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows({key: _written(value) for key, value in row.items()} for row in rows)

    def write(self, name: str, rows: Iterable[Row]) -> None:
        """NAME.csv anew."""
        (self.folder / f"{name}.csv").unlink(missing_ok=True)
        self.append(name, rows)

    def has(self, name: str) -> bool:
        """Whether there is such a table."""
        return (self.folder / f"{name}.csv").is_file()

    def rows(self, name: str) -> list[Row]:
        """The lines of NAME.csv, numbers as numbers; none where there is no such table."""
        if not self.has(name):
            return []
        with (self.folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            return [{key: _read(value) for key, value in row.items()} for row in csv.DictReader(file)]

    def note(self, text: str) -> None:
        """Something that a reader must know: what was left out, and why. Shown on the page."""
        self.append("notes", [{"note": text}])

    # -- figures and the page -----------------------------------------------------------------------------------------

    def figure(self, name: str, figure: Any, caption: str) -> None:
        """Write NAME.png and NAME.svg."""
        figure.savefig(self.folder / f"{name}.svg", metadata={"Date": None})
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=110)
        (self.folder / f"{name}.png").write_bytes(picture.getvalue())
        self._figures[name] = (caption, picture.getvalue())

    def page(self, title: str, introduction: str, parts: Sequence[str]) -> Path:
        """Write index.html, which needs no other file. `parts` are HTML, for instance of `shown`, `table`, `said`."""
        notes = [str(row["note"]) for row in self.rows("notes")]
        left_out = said("What to know", notes) if notes else ""
        body = "\n".join([*parts, left_out, self._origin()])
        text = PAGE.format(title=html.escape(title), introduction=paragraph(introduction), body=body)
        path = self.folder / "index.html"
        path.write_text(text, encoding="utf-8")
        return path

    def shown(self, name: str) -> str:
        """A figure of this report, as HTML with the picture inside."""
        caption, picture = self._figures[name]
        data = base64.b64encode(picture).decode()
        return (
            f'<figure><img alt="{html.escape(caption, quote=True)}" src="data:image/png;base64,{data}">'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )

    def _origin(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.config["versions"].items())
        lines = [
            ("Command", self.config["command"]),
            ("Begun", self.config["begun"]),
            ("Hardware", self.config["hardware"]),
            ("Versions", versions),
            ("Random numbers", self.config["random_numbers"]),
            ("Settings", json.dumps(self.settings, default=str)),
        ]
        tables = ", ".join(sorted(path.name for path in self.folder.glob("*.csv")))
        rows = "".join(
            f"<tr><th>{name}</th><td><code>{html.escape(str(value))}</code></td></tr>"
            for name, value in [*lines, ("Tables beside this page", tables)]
        )
        return f'<h2>Where this comes from</h2><table class="origin">{rows}</table>'

    def archive(self) -> Path:
        """The folder as one FOLDER.tar.gz beside it."""
        return Path(shutil.make_archive(str(self.folder), "gztar", self.folder.parent, self.folder.name))


def provenance() -> dict[str, Any]:
    """Command, versions and hardware of this process."""
    return {
        "command": shlex.join(["hookean", *sys.argv[1:]]),
        "begun": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "hardware": hardware(),
        "random_numbers": str(jax.random.key_impl(jax.random.key(0))),
    }


def hardware() -> str:
    """Devices that JAX uses, and the processor."""
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    return f"{len(devices)} x {', '.join(kinds)} ({jax.default_backend()}); {_processor()}, {os.cpu_count()} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a source tree
        return str(getattr(sys.modules.get(package), "__version__", "not installed"))


def _written(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return f"{float(value):.7g}"
    return value


def _read(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- HTML --------------------------------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
figure {{ margin: 1.5rem 0; }} img {{ max-width: 100%; height: auto; }} figcaption {{ color: #555; font-size: .9rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-size: .9rem; display: block; overflow-x: auto; }}
th, td {{ padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }}
th:first-child, td:first-child {{ text-align: left; }} thead th {{ border-bottom: 2px solid #888; }}
.origin td, .origin th {{ text-align: left; font-weight: normal; }} code {{ overflow-wrap: anywhere; }}
caption {{ caption-side: bottom; text-align: left; color: #555; padding-top: .4rem; }}
</style></head><body>
<h1>{title}</h1>
{introduction}
{body}
</body></html>
"""


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{html.escape(text)}</p>"


def said(title: str, sentences: Sequence[str]) -> str:
    """A heading and a list of sentences."""
    return f"<h2>{html.escape(title)}</h2><ul>" + "".join(f"<li>{html.escape(s)}</li>" for s in sentences) + "</ul>"


def table(title: str, rows: Sequence[Row], caption: str = "") -> str:
    """Rows as a table; numbers with four digits, and a dash for what is not there."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(shown_number(value))}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    foot = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<h2>{html.escape(title)}</h2><table>{foot}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def shown_number(value: Any, digits: int = 4) -> str:
    """A number as a person would write it."""
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def with_error(mean: float, error: float, digits: int = 2) -> str:
    """`mean ± error`."""
    if not math.isfinite(mean):
        return "–"
    return f"{mean:.{digits}f} ± {error:.{digits}f}" if math.isfinite(error) else f"{mean:.{digits}f}"


# -- intervals ---------------------------------------------------------------------------------------------------------


def interval(values: Any, axis: int = 0, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Mean and half-width of Student's interval of the mean, over `axis`; the width of a single value is NaN."""
    from scipy.stats import t

    values = np.asarray(values, float)
    count = values.shape[axis]
    mean = values.mean(axis)
    if count < 2:
        return mean, np.full_like(mean, np.nan)
    return mean, t.ppf((1 + level) / 2, count - 1) * values.std(axis, ddof=1) / np.sqrt(count)


def standard_error(values: Any, axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error of the mean; that of a single value is NaN."""
    values = np.asarray(values, float)
    count = values.shape[axis]
    spread = values.std(axis, ddof=1) if count > 1 else np.full_like(values.mean(axis), np.nan)
    return values.mean(axis), spread / np.sqrt(count)


def plot_style() -> Any:
    """Matplotlib without a display, set up alike for all figures; returns pyplot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.hashsalt": "hookean",
            "svg.fonttype": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "font.size": 10,
        }
    )
    return plt
