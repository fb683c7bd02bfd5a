"""The page of an experiment on pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hookean.experiments import clocks, speed
from hookean.experiments.report import Report, Row, said, table


def draw_classification(report: Report, title: str, introduction: str, y_limits: tuple[float, float]) -> None:
    """What figures and pages of the experiments on pictures have in common."""
    groups = speed.grouped(report.rows("curves"))
    times, final = speed.times_table(groups), speed.final_table(groups)
    every = [s for _, s in map(speed.kind_and_every, (method for method, _ in groups)) if s is not None]
    middle = 8 if 8 in every else int(np.median(sorted(set(every)))) if every else 8
    seeds = int(report.settings["seeds"])
    caption = f"Mean over {seeds} seeds and 95 % intervals of the mean."
    speed.draw_curves(report, groups, middle, caption, y_limits)
    speed.draw_times(report, times)
    parts = [
        report.shown("curves"),
        report.shown("staleness"),
        said("What it says", [*speed.findings(groups, times, final), *clocks.findings(report)]),
        report.shown("times"),
        *clocks.draw(report, y_limits),
        table("Time to NLL x", _times_shown(times), "Parallel steps until the test NLL of one state is x. " + caption),
        table("After the last step", final, caption + " lr = eps^2 N/M; spring = eps^2 alpha/K."),
        table("What the sweep chose", report.rows("tuned"), SWEEP),
    ]
    report.page(title, introduction, parts)


SWEEP = (
    "Two rounds, coarse and then fine, on examples held out of the training set. SGHMC by its last NLL; the others by "
    "their time to that NLL. All that was tried is in sweep.csv; SGHMC is run and judged with all its steps."
)


def _times_shown(times: Sequence[Row]) -> list[Row]:
    return [
        {
            "NLL": f"{row['NLL']:.4g}" + (" (SGHMC's last)" if row["is SGHMC's at the end"] else ""),
            "method": row["method"] + ("" if row["role"] == "tuned" else f" ({row['role']})"),
            "steps": row["steps"],
            "± (95 %)": row["± (95 %)"],
            "ratio to SGHMC": row["ratio to SGHMC"],
            "± ratio": row["± (95 %) of ratio"],
            "seeds there": f"{row['seeds there']} of {row['seeds']}",
        }
        for row in times
    ]
