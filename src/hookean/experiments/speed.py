"""What learning curves say: times to a level, tables, words, figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hookean.experiments.report import COLOURS, Report, Row, interval, plot_style

LEVELS = (2.0, 1.5, 1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.12, 0.1)
FEWEST_SEEDS = 3
"""Fewer have intervals too wide to be of use."""
SCORES = ("single", "ensemble", "average", "accuracy")


def time_to(curve: Any, steps: Any, level: float) -> float:
    """The first moment at which `curve` is at most `level`, by straight lines in log NLL; inf if never."""
    curve = np.asarray(curve, float)
    below = np.flatnonzero(curve <= level)
    if len(below) == 0:
        return float("inf")
    now = int(below[0])
    if now == 0:
        return float(steps[0])
    before, after = np.log(curve[now - 1]), np.log(curve[now])
    share = (before - np.log(level)) / (before - after) if np.isfinite(before) and before > after else 1.0
    return float(steps[now - 1] + share * (steps[now] - steps[now - 1]))


class Times(NamedTuple):
    """Mean time to a level and its interval; where a seed never gets there, the time of the mean curve alone."""

    mean: float
    half: float
    there: int
    seeds: int

    @classmethod
    def of(cls, times: np.ndarray, curves: np.ndarray, level: float) -> Times:
        """Of curves [seed, look]."""
        each = np.array([time_to(curve, times, level) for curve in curves])
        there = int(np.isfinite(each).sum())
        if there == len(each):
            mean, half = map(float, interval(each))
        else:
            mean, half = time_to(curves.mean(0), times, level), float("nan")
        return cls(mean, half, there, len(each))


Group = dict[tuple[str, str], dict[int, list[Row]]]
"""(method, role) -> seed -> rows in the order of steps."""


def grouped(rows: Sequence[Row]) -> Group:
    """Curves by method, role and seed."""
    found: Group = {}
    for row in rows:
        found.setdefault((row["method"], row["role"]), {}).setdefault(int(row["seed"]), []).append(row)
    return found


def matrix(runs: dict[int, list[Row]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and values [seed, look]."""
    steps = np.array([row["step"] for row in next(iter(runs.values()))])
    return steps, np.array([[float(row[name]) for row in rows] for rows in runs.values()])


def sghmc_level(groups: Group) -> float:
    """NLL of a single state of the best SGHMC at the last step: mean over seeds, the best of all its steps."""
    last = [matrix(runs, "single")[1][:, -1].mean() for (method, _), runs in groups.items() if method == "SGHMC"]
    return float(np.nanmin(last))


def times_table(groups: Group, name: str = "single") -> list[Row]:
    """`time to NLL x`: parallel steps, and as a ratio to the SGHMC that is fastest to x."""
    best_level = sghmc_level(groups)
    levels = sorted({*(x for x in LEVELS if best_level / 2 < x < 2.5 * best_level), best_level}, reverse=True)
    rows = []
    for level in levels:
        of_all = {key: Times.of(*matrix(runs, name), level) for key, runs in groups.items()}
        baseline = min(times.mean for (method, _), times in of_all.items() if method == "SGHMC")
        for (method, role), times in of_all.items():
            if role.startswith("also") or not any(np.isfinite(each.mean) for each in of_all.values()):
                continue
            known = np.isfinite(baseline) and np.isfinite(times.mean)
            rows.append(
                {
                    "NLL": level,
                    "is SGHMC's at the end": int(level == best_level),
                    "method": method,
                    "role": role,
                    "seeds there": times.there,
                    "seeds": times.seeds,
                    "steps": times.mean,
                    "± (95 %)": times.half,
                    "ratio to SGHMC": times.mean / baseline if known else float("nan"),
                    "± (95 %) of ratio": times.half / baseline if known else float("nan"),
                }
            )
    return rows


def final_table(groups: Group) -> list[Row]:
    """Where all stand after the last step."""
    rows = []
    for (method, role), runs in groups.items():
        last = {name: matrix(runs, name)[1][:, -1] for name in SCORES}
        row: Row = {"method": method, "role": role, "seeds": len(runs)}
        first = next(iter(runs.values()))[0]
        row |= {name: first[name] for name in ("lr", "spring", "rate")}
        row["diverged"] = int(np.sum(~np.isfinite(last["single"])))
        for name in ("single", "ensemble", "average"):
            mean, half = interval(last[name])
            row |= {f"NLL, {name}": float(mean), f"± {name}": float(half)}
        row["accuracy"] = float(np.mean(last["accuracy"]))
        rows.append(row)
    return rows


def findings(groups: Group, times: Sequence[Row], final: Sequence[Row]) -> list[str]:
    """In words, from the numbers: what holds and what does not."""
    level, said_so = sghmc_level(groups), []
    at_level = {r["method"]: r for r in times if r["is SGHMC's at the end"] and r["role"] == "tuned"}
    by_key = {(row["method"], row["role"]): row for row in final}
    elastic = {m: r for m, r in at_level.items() if m.startswith("elastic, s")}
    said_so.append(
        f"The best SGHMC of the sweep has a test NLL of {level:.4f} (single states) after the last step; that is the "
        "level that times are taken to. Ratios are to the SGHMC that is fastest to it."
    )
    for method, row in elastic.items():
        if not np.isfinite(row["steps"]):
            there = f"{row['seeds there']} of {row['seeds']}"
            said_so.append(f"{method} does not reach that level with every seed ({there}).")
            continue
        verdict = "at most a third" if row["ratio to SGHMC"] <= 1 / 3 else "more than a third"
        said_so.append(
            f"{method} reaches it after {row['steps']:.0f} ± {row['± (95 %)']:.0f} steps, {row['ratio to SGHMC']:.2f} "
            f"of SGHMC's: {verdict}."
        )
    for method, row in at_level.items():
        if method.startswith("EA") and np.isfinite(row["steps"]):
            said_so.append(
                f"{method}, an optimiser at temperature 0, gets there after {row['steps']:.0f} ± {row['± (95 %)']:.0f} "
                f"steps, {row['ratio to SGHMC']:.2f} of SGHMC's: part of what springs do needs no sampling."
            )
    fresh, old = elastic.get("elastic, s = 1"), elastic.get("elastic, s = 16")
    if fresh and old and np.isfinite(fresh["ratio to SGHMC"]) and np.isfinite(old["ratio to SGHMC"]):
        gain, left = 1 / fresh["ratio to SGHMC"], 1 / old["ratio to SGHMC"]
        loss = 1 - left / gain
        verdict = "less than 10 %" if loss < 0.1 else "10 % or more"
        said_so.append(
            f"Elastic with s = 16 is {left:.2f} times as fast as SGHMC, with s = 1 {gain:.2f} times: it loses "
            f"{100 * loss:.0f} % of its speed-up ({verdict})."
        )
    own = by_key.get(("stale gradient, s = 1", "tuned"))
    for (method, role), row in by_key.items():
        if role == "the best step of s = 1" and own is not None:
            if row["diverged"]:
                found = f"{row['diverged']} of {row['seeds']} runs diverge"
            else:
                found = f"NLL {row['NLL, single']:.3f} ± {row['± single']:.3f} at the end"
            said_so.append(
                f"{method} at the step that is best for s = 1: {found}; s = 1 has "
                f"{own['NLL, single']:.3f} ± {own['± single']:.3f}."
            )
    said_so += _where_it_does_not_hold(by_key)
    return said_so


def _where_it_does_not_hold(by_key: dict[tuple[str, str], Row]) -> list[str]:
    said_so = []
    alone = [row for (method, _), row in by_key.items() if method == "independent" and not row["diverged"]]
    if alone:
        best = min(alone, key=lambda row: row["NLL, ensemble"])
        for (method, role), row in by_key.items():
            if role != "tuned" or not method.startswith("elastic") or row["diverged"]:
                continue
            gap = row["NLL, ensemble"] - best["NLL, ensemble"]
            who = "springs are" if gap < 0 else "no coupling is"
            sure = "" if abs(gap) > np.hypot(row["± ensemble"], best["± ensemble"]) else " (less than the intervals)"
            said_so.append(
                f"By the ensemble of current states, {method} ends at an NLL of {_plus_minus(row, 'ensemble')} and "
                f"independent chains (lr {best['lr']:.3g}) at {_plus_minus(best, 'ensemble')}: {who} ahead by "
                f"{abs(gap):.4f}{sure}."
            )
    held = [row for (m, role), row in by_key.items() if m.startswith("elastic, s") and role == "tuned"]
    for (method, role), row in by_key.items():
        if method.startswith("elastic, released") and role == "tuned" and held:
            said_so.append(
                f"Let go between 40 % and 60 % of the run, elastic chains end at {_plus_minus(row, 'single')} (single "
                f"states), where those that are held end at {_plus_minus(held[0], 'single')}. The difference is due to "
                "the narrower law of coupled chains, which acts like a lower temperature; it is no speed."
            )
    return said_so


def _plus_minus(row: Row, name: str) -> str:
    return f"{row[f'NLL, {name}']:.4f} ± {row[f'± {name}']:.4f}"


# -- figures -----------------------------------------------------------------------------------------------------------

KINDS = {
    "SGHMC": COLOURS["black"],
    "independent": COLOURS["grey"],
    "stale gradient": COLOURS["orange"],
    "elastic": COLOURS["blue"],
    "elastic, released": COLOURS["sky"],
    "elastic, all wait": COLOURS["green"],
    "EASGD": COLOURS["green"],
    "EAMSGD": COLOURS["pink"],
}


def kind_and_every(method: str) -> tuple[str, int | None]:
    """A label taken apart again."""
    name, _, every = method.rpartition(", s = ")
    return (name, int(every)) if name else (method, None)


def curve(panel: Any, x: np.ndarray, values: np.ndarray, method: str, **style: Any) -> None:
    """Geometric mean over seeds and its interval."""
    kind, _ = kind_and_every(method)
    mean, half = interval(np.log(values))  # of the logarithm, for the axis is logarithmic
    style = {"color": KINDS[kind], "linewidth": 1.6, "label": method, **style}
    panel.plot(x, np.exp(mean), **style)
    if len(values) >= FEWEST_SEEDS:
        low, high = np.exp(mean - half), np.exp(np.minimum(mean + half, 10))
        panel.fill_between(x, low, high, color=style["color"], alpha=0.13, linewidth=0)


def limits(groups: Group) -> tuple[float, float]:
    """Of the axis of NLL: down to the least of all means, up to three times SGHMC's last."""
    level = sghmc_level(groups)
    least = min(float(np.nanmin(matrix(runs, name)[1].mean(0))) for runs in groups.values() for name in SCORES[:3])
    return 0.9 * min(least, level), 3 * level


def draw_curves(report: Report, groups: Group, middle: int, caption: str) -> None:
    """NLL against parallel steps: three ways of predicting, and elastic against stale gradients for every s."""
    plt, y_limits = plot_style(), limits(groups)
    figure, panels = plt.subplots(1, 3, figsize=(14, 5.1), sharey=True, layout="constrained")
    shown = ["SGHMC", "independent", f"stale gradient, s = {middle}", f"elastic, s = {middle}"]
    shown += [f"{name}, s = {middle}" for name in ("elastic, released", "EASGD", "EAMSGD")]
    titles = {"single": "one state", "ensemble": "ensemble of the K states", "average": "running average of states"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for method in shown:
            role = "tuned for its ensemble" if method == "independent" and name != "single" else "tuned"
            runs = groups.get((method, role)) or groups.get((method, "tuned"))
            if runs:
                curve(panel, *matrix(runs, name), method)
        finish(panel, title, y_limits)
    panels[0].set_ylabel("test NLL")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=9)
    report.figure("curves", figure, caption)
    plt.close(figure)
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.8), sharey=True, layout="constrained")
    colours = plt.get_cmap("viridis")
    for panel, name in zip(panels, ("elastic", "stale gradient"), strict=True):
        every = sorted(s for kind, s in map(kind_and_every, (m for m, _ in groups)) if kind == name and s is not None)
        every = sorted(set(every))
        baseline = groups.get(("SGHMC", "tuned"))
        if baseline:
            curve(panel, *matrix(baseline, "single"), "SGHMC")
        for index, s in enumerate(every):
            colour = colours(0.9 * index / max(len(every) - 1, 1))
            label = f"{name}, s = {s}"
            if (label, "tuned") in groups:
                curve(panel, *matrix(groups[label, "tuned"], "single"), label, color=colour)
            same = groups.get((label, "the best step of s = 1"))
            if same:
                more = f"{label}, with the step of s = 1"
                style = {"color": colour, "linestyle": ":", "label": more}
                curve(panel, *matrix(same, "single"), label, **style)
        finish(panel, name, y_limits)
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    panels[0].set_ylabel("test NLL of one state")
    report.figure("staleness", figure, "The same for every s, each at its own tuned step. " + caption)
    plt.close(figure)


def finish(panel: Any, title: str, y_limits: tuple[float, float]) -> None:
    """Axes of a panel of learning curves."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    panel.set(title=title, xlabel="parallel steps", yscale="log", ylim=y_limits)
    panel.yaxis.set_major_formatter(ScalarFormatter())
    panel.yaxis.set_minor_formatter(NullFormatter())
    ticks = [x for x in LEVELS if y_limits[0] <= x <= y_limits[1]]
    panel.set_yticks(ticks)
    panel.grid(axis="y", alpha=0.25)


def draw_times(report: Report, times: Sequence[Row]) -> None:
    """Times to the NLL that SGHMC has at the end, as ratios."""
    plt = plot_style()
    rows = [row for row in times if row["is SGHMC's at the end"] and row["role"] == "tuned"]
    rows = [row for row in rows if np.isfinite(row["ratio to SGHMC"])]
    rows.sort(key=lambda row: -row["ratio to SGHMC"])
    figure, panel = plt.subplots(figsize=(8, 0.5 + 0.34 * max(len(rows), 1) + 0.6), layout="constrained")
    for height, row in enumerate(rows):
        kind, _ = kind_and_every(row["method"])
        error = row["± (95 %) of ratio"]
        panel.errorbar(
            row["ratio to SGHMC"], height, xerr=error if np.isfinite(error) else None, fmt="o", color=KINDS[kind]
        )
    panel.set_yticks(range(len(rows)), [row["method"] for row in rows])
    panel.axvline(1, color=COLOURS["black"], linewidth=1)
    panel.axvline(1 / 3, color=COLOURS["grey"], linewidth=1, linestyle="--")
    panel.set(xlabel="steps to the NLL that SGHMC has at the end, over SGHMC's (dashed: a third)")
    panel.set_xlim(left=0)
    panel.grid(axis="x", alpha=0.25)
    report.figure("times", figure, "Time to SGHMC's last NLL, as a ratio; methods that never get there are left out.")
    plt.close(figure)
