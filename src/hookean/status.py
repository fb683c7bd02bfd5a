"""How a run on disk stands, also one that another process is sampling: plain facts, and the same for a person."""

from __future__ import annotations

import datetime
import math
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hookean.diagnostics import human_bytes
from hookean.store import Stored
from hookean.telemetry import Telemetry, histogram

STYLES = {"running": "bold green", "finished": "green", "stopped": "yellow"}
"""Others are red."""
COUNTS = {
    "exchanges": "reports that the centre took",
    "duplicates": "reports that came twice",
    "fenced": "messages of a worker's earlier life",
    "refused": "reports with NaN or Inf",
    "lost": "messages lost",
    "resyncs": "workers told to join again",
    "rolled_back": "versions of the centre forgotten",
    "rebuilds": "times the centre was rebuilt",
    "restarts": "workers started again",
    "evictions": "silent workers left out of the mean",
    "redone": "steps taken again",
}
SECONDS = {
    "stepping": "in compiled windows",
    "exchanging": "on exchanges, waiting for the centre included",
    "waiting": "until what was kept was taken",
}


def facts(stored: Stored) -> dict[str, Any]:
    """What is known of a run, as plain values that JSON has; None for what is not known (yet)."""
    progress, told = stored.progress, stored.progress["facts"]
    settings = dict(stored.description["settings"])
    settings.pop("schedule", None)
    seen = told.get("chains", {})
    nothing = {"step": None, "potential": None, "temperature": None}
    found = {
        "path": str(stored.path),
        "state": stored.state,
        "pid": progress.get("pid"),
        "host": progress.get("host"),
        "time": progress.get("time"),
        "settings": settings,
        "step": told.get("step", told.get("steps")),
        "steps_per_second": told.get("steps_per_second"),
        "potential": told.get("potential"),
        "temperature": told.get("temperature"),
        "chains": [
            {"chain": chain, **nothing, **seen.get(str(chain), {}), "draws": count}
            for chain, count in enumerate(progress["draws"])
        ],
        "events": progress["log_length"],
        "telemetry": Telemetry.of(told.get("telemetry", {})).facts(),
    }
    return _finite(found)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shown(known: dict[str, Any]) -> RenderableType:
    """The facts as a person reads them."""
    settings, state = known["settings"], known["state"]
    head = Text.assemble((state, STYLES.get(state, "bold red")), f"  {known['path']}", style="bold")
    if known["time"] is not None:
        when = datetime.datetime.fromtimestamp(known["time"]).isoformat(" ", "seconds")
        head.append(f"  (process {known['pid']} on {known['host']}, {when})", "dim")
    about = _pairs()
    for name in ("dynamics", "coupling", "engine"):
        about.add_row(name, str(settings[name]))
    numbers = ("chains", "num_steps", "warmup", "thin", "seed")
    about.add_row("settings", ", ".join(f"{name} {settings[name]:,}" for name in numbers))
    pace = known["steps_per_second"]
    step = f"{_number(known['step'])} of {settings['num_steps']:,}"
    about.add_row("step", step + (f", {pace:,.4g} steps/s a chain" if pace else ""))
    about.add_row("potential", f"{_number(known['potential'])}, temperature {_number(known['temperature'])}")

    chains = Table(box=None, padding=(0, 2, 0, 2), header_style="dim")
    for name in ("chain", "step", "draws", "potential", "temperature"):
        chains.add_column(name, justify="right")
    for chain in known["chains"]:
        chains.add_row(*(_number(chain[column.header]) for column in chains.columns))

    counts, machinery = known["telemetry"], _pairs()
    machinery.add_row("goodput", f"{counts['goodput']:.2%} of the steps that were taken count")
    for name, meaning in COUNTS.items():
        if counts[name]:
            machinery.add_row(name.replace("_", " "), f"{counts[name]:,}  {meaning}")
    machinery.add_row("messages", human_bytes(counts["bytes"]))
    for name, meaning in SECONDS.items():
        machinery.add_row(name, f"{counts[name]:,.1f} s  {meaning}")
    bins = histogram(counts["staleness"])
    staleness = [Text("\nstaleness of the copy of the centre, in steps", "bold"), Text("\n".join(bins))] if bins else []
    title = Text("\nall chains together", "bold")
    return Group(head, about, Text(), chains, title, machinery, *staleness)


def _pairs() -> Table:
    table = Table.grid(padding=(0, 2, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    return table


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
