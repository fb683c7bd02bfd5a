"""The page of an experiment on pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hookean.experiments import clocks, speed
from hookean.experiments.report import Report, Row, said, table, with_error


def draw_classification(report: Report, title: str, introduction: str) -> None:
    """What figures and pages of the experiments on pictures have in common."""
    groups = speed.grouped(report.rows("curves"))
    times, final = speed.times_table(groups), speed.final_table(groups)
    every = [s for _, s in map(speed.kind_and_every, (method for method, _ in groups)) if s is not None]
    middle = 8 if 8 in every else int(np.median(sorted(set(every)))) if every else 8
    seeds = int(report.settings["seeds"])
    caption = f"Mean over {seeds} seeds and 95 % intervals of the mean."
    speed.draw_curves(report, groups, middle, caption)
    speed.draw_times(report, times)
    report.write("times", times)
    report.write("final", final)
    parts = [
        report.shown("curves"),
        report.shown("staleness"),
        said("What it says", [*speed.findings(groups, times, final), *clocks.findings(report)]),
        report.shown("times"),
        *clocks.draw(report),
        table("Time to NLL x", _times_shown(times), TIMES + caption),
        table("After the last step", final, caption + " lr = eps^2 N/M; spring = eps^2 alpha/K."),
        table("What the sweep chose", report.rows("tuned"), SWEEP),
    ]
    report.page(title, introduction, parts)


SWEEP = (
    "Two rounds, coarse and then fine, on examples held out of the training set. SGHMC by its last NLL; the others by "
    "their time to that NLL. All that was tried is in sweep.csv; SGHMC is run and judged with all its steps."
)


TIMES = (
    "Parallel steps until the test NLL of one state is x, and in brackets as a ratio to the SGHMC that is fastest to "
    "x; a dash where it is not reached, and no interval where it is not with every seed. "
)


def _times_shown(times: Sequence[Row]) -> list[Row]:
    """A line for each method, a column for each x."""
    lines: dict[str, Row] = {}
    for row in times:
        method = row["method"] + ("" if row["role"] == "tuned" else f" ({row['role']})")
        column = f"x = {row['NLL']:.3g}" + (" (SGHMC's last)" if row["is SGHMC's at the end"] else "")
        ratio = f" ({row['ratio to SGHMC']:.2f})" if np.isfinite(row["ratio to SGHMC"]) else ""
        cell = with_error(row["steps"], row["± (95 %)"], 0) + ratio
        lines.setdefault(method, {"method": method})[column] = cell
    return list(lines.values())
