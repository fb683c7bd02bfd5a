"""Learning curves against time: on a simulated clock, and in seconds with threads.

The scenario: workers that take one unit for a step, give or take, with messages that travel two units each way, and one
worker that is four times slower than the others. Asynchronous elastic chains and stale gradients are sampled event by
event. Chains that exchange nothing, and elastic ones that all wait for each other, take the same steps whatever the
time: their states come from the compiled program, and only the times from the scenario.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import hookean as hk
from hookean.exchange import Event, timeline
from hookean.experiments import speed
from hookean.experiments.classification import (
    SEED,
    Clock,
    Runs,
    Say,
    Task,
    look_steps,
    nll_of_ensemble,
    nll_of_states,
)
from hookean.experiments.keep import keep_store
from hookean.experiments.methods import Method, Setting
from hookean.experiments.report import Report, Row, plot_style, table

LATENCY, JITTER, SLOWER = 2.0, 0.2, 4.0
TIMES = 60
"""Moments at which the states of all workers are compared."""
EXCHANGING = ("elastic", "stale gradient")
KINDS = {"simulated": "simulated", "seconds": "threads"}


def scenario(workers: int) -> hk.Scenario:
    """The last of several workers is slow."""
    slow = [hk.Straggler(workers - 1, SLOWER)] if workers > 1 else []
    return hk.Scenario(step_time=1.0, latency=LATENCY, jitter=JITTER, stragglers=slow)


def measure(
    report: Report, task: Task, methods: Sequence[Method], compiled: dict[str, Runs], clock: Clock, say: Say
) -> None:
    """Tables simulated and seconds, for the methods that have been tuned; and the store of one run.

    `compiled` are programs that are there already, by the methods' labels.
    """
    target = task.target()
    chosen = _chosen(report, methods)
    seeds = [SEED + seed for seed in range(int(report.settings["clock_seeds"]))]
    for method, setting in chosen:
        if method.label in {row["method"] for row in report.rows("simulated")}:
            continue
        if clock.is_over:
            report.note(f"{method.label} on the simulated clock is left out, for the time was up.")
            continue
        if method.name in EXCHANGING:
            for seed in seeds:
                run = _sample(report, task, target, method, setting, hk.Simulated(scenario(method.chains)), seed)
                report.append("simulated", _rows(method.label, seed, *_seen(report, task, run)))
        if method.name != "stale gradient":
            runs = compiled.get(method.label) or Runs(report, task, target, method)
            report.append("simulated", _from_steps(runs, setting, seeds))
        say(f"{method.label}: simulated")
    _threads(report, task, target, chosen, seeds, clock, say)
    for method, setting in chosen:
        if method.name == "elastic" and not clock.is_over:
            keep_store(report, target, task.init, **_arguments(report, target, method, setting, SEED, looks=1))


def _chosen(report: Report, methods: Sequence[Method]) -> list[tuple[Method, Setting]]:
    """SGHMC, independent chains, and elastic ones and stale gradients of one s, with their tuned numbers."""
    every = next((method.every for method in methods if method.name == "elastic"), 1)
    found = []
    for method in methods:
        wanted = method.name in ("SGHMC", "independent") or (method.name in EXCHANGING and method.every == every)
        rows = [r for r in report.rows("tuned") if r["method"] == method.label and r["role"].startswith("tuned")]
        if wanted and rows:
            row = rows[-1]  # of independent chains, the step that suits their ensemble
            found.append((method, {key: float(row[key]) for key in ("lr", "spring", "rate") if row[key] != ""}))
    return found


# -- runs --------------------------------------------------------------------------------------------------------------


def _arguments(
    report: Report, target: hk.Target, method: Method, setting: Setting, seed: int, looks: int | None = None
) -> dict[str, Any]:
    num_steps = int(report.settings["steps"])
    dynamics, coupling = method.parts(setting, target.num_examples, num_steps)
    between = look_steps(report.settings)[0] if looks is None else num_steps // looks
    return {
        "dynamics": dynamics,
        "coupling": coupling,
        "chains": method.chains,
        "num_steps": num_steps,
        "thin": between,
        "seed": seed,
    }


def _sample(
    report: Report, task: Task, target: hk.Target, method: Method, setting: Setting, engine: hk.Engine, seed: int
) -> hk.Run | None:
    """A run; what it had until it diverged, if it did; None if that was nothing."""
    arguments = _arguments(report, target, method, setting, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hk.HookeanWarning)
        try:
            return hk.sample(target, task.init, engine=engine, progress=False, **arguments)
        except hk.DivergenceError as error:
            run = error.run
            return run if isinstance(run, hk.Run) and run.stats["potential"].shape[1] > 0 else None


def _seen(report: Report, task: Task, run: hk.Run | None) -> tuple[np.ndarray, np.ndarray]:
    """Times [chain, draw], and log-probabilities of the test labels [chain, draw, example]."""
    if run is None:
        return np.full((1, 1), np.inf), np.full((1, 1, 1), np.nan)
    given = jax.device_put(task.test)
    look = jax.jit(jax.vmap(lambda params: task.look(params, given)["log_p"]))
    chains, draws = run.stats["potential"].shape
    log_p = np.stack([np.asarray(look(jax.tree.map(lambda x, d=d: x[:, d], run.draws))) for d in range(draws)], 1)
    return times_of_draws(run.info["log"], chains, draws), log_p


def times_of_draws(log: Sequence[Event], chains: int, draws: int) -> np.ndarray:
    """When each draw was taken: [chain, draw], inf for those that never were. The server's chain is number 0."""
    times = np.full((chains, draws), np.inf)
    for event in log:
        if 0 <= event.draw < draws:
            times[max(event.worker, 0) if chains > 1 else 0, event.draw] = event.time
    return times


def _from_steps(runs: Runs, setting: Setting, seeds: Sequence[int]) -> list[Row]:
    """Chains that take the same steps whatever the time; with exchanges only if all wait for each other."""
    method, steps = runs.method, runs.follower.steps
    num_steps, rhythm = runs.follower.job.num_steps, runs.follower.job.coupling.rhythm
    log_p = runs.test(setting, seeds)
    rows: list[Row] = []
    for index, seed in enumerate(seeds):
        if method.name in EXCHANGING:
            waiting = dataclasses.replace(scenario(method.chains), barrier=True)
            log = timeline(waiting, method.chains, num_steps, np.asarray(steps), rhythm, seed=seed)
            times = times_of_draws(log, method.chains, len(steps))
            label = f"{method.name}, all wait, s = {method.every}"
        else:
            times, label = free_times(method.chains, steps, seed), method.label
        rows += _rows(label, seed, times, log_p[:, index].swapaxes(0, 1))
    return rows


def free_times(workers: int, steps: Sequence[int], seed: int) -> np.ndarray:
    """When workers that wait for nothing have taken so many steps, in the same scenario: [worker, look]."""
    spread = np.exp(JITTER * np.random.default_rng(seed).standard_normal((workers, max(steps))))
    slower = np.ones((workers, 1))
    for straggler in scenario(workers).stragglers:
        slower[straggler.worker] *= straggler.factor
    return np.cumsum(slower * spread, 1)[:, np.asarray(steps) - 1]


def _rows(label: str, seed: int, times: np.ndarray, log_p: np.ndarray) -> list[Row]:
    """At each of TIMES moments the newest state of every chain, if all have one."""
    finite = times[np.isfinite(times)]
    if finite.size == 0:
        return [{"method": label, "seed": seed, "time": 0.0, "single": float("nan"), "ensemble": float("nan")}]
    last = float(np.where(np.isfinite(times), times, -np.inf).max(1).min())  # until the first chain is done
    rows = []
    for moment in np.linspace(0, last, TIMES + 1)[1:]:
        newest = np.sum(times <= moment, 1) - 1
        if np.any(newest < 0):
            continue
        states = np.stack([log_p[chain, draw] for chain, draw in enumerate(newest)])
        rows.append(
            {
                "method": label,
                "seed": seed,
                "time": float(moment),
                "single": float(nll_of_states(states)),
                "ensemble": float(nll_of_ensemble(states)),
            }
        )
    return rows


def _threads(
    report: Report,
    task: Task,
    target: hk.Target,
    chosen: Sequence[tuple[Method, Setting]],
    seeds: Sequence[int],
    clock: Clock,
    say: Say,
) -> None:
    """The same in seconds, each worker a thread; the first seed is run twice, for compilation is not to be timed."""
    for method, setting in chosen:
        if method.label in {row["method"] for row in report.rows("seconds")} or clock.is_over:
            continue
        for seed in seeds:
            run = _sample(report, task, target, method, setting, hk.Threads(), seed)
            report.append("seconds", _rows(method.label, seed, *_seen(report, task, run)))
        say(f"{method.label}: threads")


# -- figures and words -------------------------------------------------------------------------------------------------


def _common(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Curves of all seeds on common times: [seed, time]."""
    by_seed: dict[int, list[Row]] = {}
    for row in rows:
        by_seed.setdefault(int(row["seed"]), []).append(row)
    first = max(each[0]["time"] for each in by_seed.values())
    last = min(each[-1]["time"] for each in by_seed.values())
    times = np.linspace(first, max(last, first), TIMES)
    curves = [np.interp(times, [r["time"] for r in each], [float(r[name]) for r in each]) for each in by_seed.values()]
    return times, np.array(curves)


def _by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def times_table(report: Report, name: str) -> list[Row]:
    """Time to the NLL that SGHMC has at its end, of one state, and as a ratio."""
    by_method = _by_method(report.rows(name))
    if "SGHMC" not in by_method:
        return []
    level = float(np.mean(_common(by_method["SGHMC"], "single")[1][:, -1]))
    found = {method: speed.Times.of(*_common(rows, "single"), level) for method, rows in by_method.items()}
    baseline = found["SGHMC"].mean
    return [
        {
            "NLL": level,
            "method": method,
            "time": times.mean,
            "± (95 %)": times.half,
            "ratio to SGHMC": times.mean / baseline if np.isfinite(times.mean) else float("nan"),
            "seeds there": f"{times.there} of {times.seeds}",
        }
        for method, times in found.items()
    ]


def _limits(by_method: dict[str, list[Row]]) -> tuple[float, float]:
    values = [float(row[name]) for rows in by_method.values() for row in rows for name in ("single", "ensemble")]
    level = np.nanmax(values)
    if "SGHMC" in by_method:
        level = np.mean(_common(by_method["SGHMC"], "single")[1][:, -1])
    return 0.9 * min(float(np.nanmin(values)), level), 3 * level


def draw(report: Report) -> list[str]:
    """A figure for each clock there is, and its table."""
    parts = []
    for name, axis, caption in (
        ("simulated", "simulated time (steps of a normal worker)", SIMULATED),
        ("seconds", "seconds", SECONDS.format(hardware=report.config["hardware"])),
    ):
        by_method = _by_method(report.rows(name))
        if not by_method:
            continue
        plt, y_limits = plot_style(), _limits(by_method)
        figure, panels = plt.subplots(1, 2, figsize=(11, 4.9), sharey=True, layout="constrained")
        for panel, score, title in zip(
            panels, ("single", "ensemble"), ("one state", "ensemble of the K states"), strict=True
        ):
            for method, rows in by_method.items():
                speed.curve(panel, *_common(rows, score), method)
            speed.finish(panel, title, y_limits)
            panel.set(xlabel=axis)
        longest = max(_common(rows, "single")[0][-1] for method, rows in by_method.items() if "all wait" not in method)
        panels[0].set(ylabel="test NLL", xlim=(0, longest))
        panels[1].set(xlim=(0, longest))
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
        report.figure(name, figure, caption)
        plt.close(figure)
        parts += [report.shown(name), table(f"Time to SGHMC's last NLL ({axis})", times_table(report, name))]
    return parts


SIMULATED = (
    f"Workers that take one unit for a step (spread {JITTER:g}), one that is {SLOWER:g} times slower, messages that "
    f"travel {LATENCY:g} units each way. The newest state of each chain counts; SGHMC is one normal worker. "
    "95 % intervals."
)
SECONDS = "Real seconds with a thread for each worker, on {hardware}; compilation included. 95 % intervals."


def findings(report: Report) -> list[str]:
    """In words, from the numbers."""
    said_so = []
    for name, kind in KINDS.items():
        for row in times_table(report, name):
            if row["method"] == "SGHMC" or not np.isfinite(row["ratio to SGHMC"]):
                continue
            said_so.append(
                f"On the clock ({kind}), {row['method']} takes {row['ratio to SGHMC']:.2f} of SGHMC's time to the NLL "
                f"that SGHMC has at its end ({row['NLL']:.3f}), with {row['seeds there']} seeds."
            )
    return said_so
