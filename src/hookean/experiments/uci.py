"""Regression on the UCI sets with their standard splits: a Bayesian network with 50 hidden units, 100 for protein.

The model is that of Springenberg, Klein, Falkner and Hutter 2016 (NIPS): y = f(x) + N(0, sigma^2), sigma a parameter.
Inputs and targets are scaled by each training split's mean and standard deviation; scores are in the target's units.
All splits of a set run side by side. Steps and springs are tuned by log-likelihood on a tenth of each training split,
one setting for a set.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtr

import hookean as hk
from hookean.datasets import UCI, Split, load
from hookean.experiments.classification import SEED, SWEEP_SEED, Clock, Say
from hookean.experiments.follow import Followed, Follower
from hookean.experiments.keep import keep_store
from hookean.experiments.networks import dense, dense_init
from hookean.experiments.published import REGRESSION, SCALE_ADAPTED
from hookean.experiments.report import COLOURS, Report, Row, plot_style, said, standard_error, table, with_error
from hookean.job import Job
from hookean.preparation import prepare
from hookean.scores import coverage
from hookean.types import Params

TITLE = "Regression on the UCI sets"
WARMUP = 0.4
"""Share of the steps."""
DRAWS = 100
PRIOR_LOG_SD = (-1.5, 1.0)
"""Mean and standard deviation of the normal prior of log sigma, in standardised units."""
STEPS = (0.005, 0.01, 0.02)
RATES = (0.0001, 0.0003, 0.001)
STIFFNESS = (1.0, 10.0)
"""alpha / K, to be compared with the precision of the prior."""
Setting = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Method:
    """A name, and the settings of its sweep."""

    name: str
    grid: tuple[Setting, ...]

    def parts(self, setting: dict[str, Any], num_examples: int, warmup: int, chains: int) -> tuple[Any, Any]:
        """Dynamics and coupling; numbers may be traced."""
        if self.name == "SGHMC":
            step = (setting["step"] / num_examples) ** 0.5
            return hk.SGHMC(step, 0.1 / step), hk.Independent()
        dynamics = hk.ScaleAdaptedSGHMC(setting["step"], adapt_steps=warmup)
        if self.name == "scale-adapted SGHMC":
            return dynamics, hk.Independent()
        return dynamics, hk.Elastic(setting["stiffness"] * chains, 8, schedule=hk.release())


METHODS = (
    Method("SGHMC", tuple({"step": rate} for rate in RATES)),
    Method("scale-adapted SGHMC", tuple({"step": step} for step in STEPS)),
    Method(
        "elastic scale-adapted SGHMC, released",
        tuple({"step": step, "stiffness": k} for step, k in itertools.product(STEPS[1:], STIFFNESS)),
    ),
)


class Scaled(NamedTuple):
    """All splits of a set, standardised: arrays [split, example, ...], and mean and sd of the targets [split]."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    mean: np.ndarray
    sd: np.ndarray


def scaled(splits: Sequence[Split]) -> Scaled:
    """By the mean and standard deviation of each training part; tests stay in their units."""
    found = []
    for x, y, x_test, y_test in splits:
        middle, width = x.mean(0), x.std(0)
        width = np.where(width > 0, width, 1.0)
        mean, sd = y.mean(), y.std()
        found.append(((x - middle) / width, (y - mean) / sd, (x_test - middle) / width, y_test, mean, sd))
    return Scaled(*(np.stack(parts).astype(np.float32) for parts in zip(*found, strict=True)))


def for_tuning(splits: Sequence[Split]) -> Scaled:
    """The last tenth of each training part instead of the test part; rows come in random order."""
    held = [max(1, len(split.y_train) // 10) for split in splits]
    return scaled(
        [
            Split(s.x_train[:-n], s.y_train[:-n], s.x_train[-n:], s.y_train[-n:])
            for s, n in zip(splits, held, strict=True)
        ]
    )


# -- model -------------------------------------------------------------------------------------------------------------


def init_of(features: int, hidden: int) -> Any:
    """Start from the prior's scale."""
    layers = dense_init((features, hidden, 1), gain=1.0)

    def init(key: jax.Array) -> Params:
        return {"layers": layers(key), "log_sd": jnp.zeros(())}

    return init


def log_likelihood(params: Params, batch: Any) -> jax.Array:
    """Of each example."""
    x, y = batch
    error = (y - dense(params["layers"], x)[:, 0]) * jnp.exp(-params["log_sd"])
    return -(error**2) / 2 - params["log_sd"] - jnp.log(2 * jnp.pi) / 2


def log_prior(params: Params) -> jax.Array:
    """Weights N(0, 2 / fan_in), of which functions are of order 1; biases N(0, 1); log sigma as above."""
    mean, sd = PRIOR_LOG_SD
    total = -(((params["log_sd"] - mean) / sd) ** 2) / 2
    for layer in params["layers"]:
        total -= jnp.sum(layer["w"] ** 2) * layer["w"].shape[0] / 4 + jnp.sum(layer["b"] ** 2) / 2
    return total


def look(params: Params, given: Any) -> Row:
    """Predicted mean and standard deviation in the target's units."""
    x, mean, sd = given
    return {"mean": mean + sd * dense(params["layers"], x)[:, 0], "sd": sd * jnp.exp(params["log_sd"])}


# -- runs --------------------------------------------------------------------------------------------------------------


def measure(report: Report, clock: Clock, say: Say) -> None:
    """Tables sweep, tuned and scores."""
    settings = report.settings
    names = settings["methods"] or list(UCI)
    left_out = []
    for name in names:
        table_of = load(name, settings["data_dir"])
        count = min(table_of.num_splits, int(settings["seeds"]))
        splits = [table_of.split(number) for number in range(count)]
        hidden = 100 if name.startswith("protein") else 50
        for method in METHODS:
            if any(r["set"] == name and r["method"] == method.name for r in report.rows("scores")):
                continue
            if clock.is_over:
                left_out.append(f"{method.name} on {name}")
                continue
            began = time.monotonic()
            _one(report, name, method, splits, hidden)
            say(f"{name}, {method.name}: {time.monotonic() - began:.0f} s")
    if left_out:
        report.note(f"Left out, for the time was up: {'; '.join(left_out)}.")
    if not clock.is_over:
        _store(report, load(names[0], settings["data_dir"]).split(0))


def _one(report: Report, name: str, method: Method, splits: Sequence[Split], hidden: int) -> None:
    """Tune, then run on all training examples."""
    tuning, chosen = for_tuning(splits), list(method.grid)
    if len(method.grid) > 1:
        share = float(report.settings["sweep_share"])
        found = _follow(report, method, tuning, hidden, list(method.grid), share, SWEEP_SEED)
        rows = [
            {"set": name, "method": method.name, **_numbers(setting), **row}
            for setting, each in zip(method.grid, found, strict=True)
            for row in each
        ]
        report.append("sweep", rows)

        chosen = [method.grid[_best(found)]]
    report.append("tuned", [{"set": name, "method": method.name, **_numbers(chosen[0])}])
    (final,) = _follow(report, method, scaled(splits), hidden, chosen, 1.0, SEED)
    report.append("scores", [{"set": name, "method": method.name, **row} for row in final])


def _best(found: Sequence[Sequence[Row]]) -> int:
    """The best log-likelihood, among the settings that have at most 1.2 times the least RMSE.

    The likelihood of a mixture hardly notices a chain that is lost; the mean of its predictions does.
    """
    rmse, log_likelihood = (
        np.array([np.mean([row[name] for row in each]) for each in found]) for name in ("rmse", "log_likelihood")
    )
    good = np.nan_to_num(rmse, nan=np.inf) <= 1.2 * np.nanmin(rmse) if np.any(np.isfinite(rmse)) else np.ones(len(rmse))
    return int(np.argmax(np.where(good, np.nan_to_num(log_likelihood, nan=-np.inf), -np.inf)))


def _numbers(setting: Setting) -> Row:
    return {name: setting.get(name, "") for name in ("step", "stiffness")}


def _follow(
    report: Report,
    method: Method,
    data: Scaled,
    hidden: int,
    settings: list[Setting],
    share: float,
    seed: int,
) -> list[list[Row]]:
    """Scores of every split, for each setting; `share` of the steps."""
    chains, splits = int(report.settings["chains"]), len(data.x)
    num_steps = max(int(share * int(report.settings["steps"])) // 40 * 40, 40)
    warmup = int(WARMUP * num_steps) // 8 * 8
    thin = max(8, (num_steps - warmup) // DRAWS // 8 * 8)
    init = init_of(data.x.shape[2], hidden)
    batch_size = min(int(report.settings["batch_size"]), data.x.shape[1])
    target = hk.Target(log_likelihood, log_prior, (data.x[0], data.y[0]), batch_size)
    dynamics, coupling = method.parts(settings[0], target.num_examples, warmup, chains)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hk.HookeanWarning)
        job = prepare(target, init, dynamics, coupling, chains, num_steps, warmup, thin, hk.Vectorised(), 0)

    def vary(job: Job, setting: Any) -> Job:
        dynamics, coupling = method.parts(setting, target.num_examples, warmup, chains)
        return dataclasses.replace(job, dynamics=dynamics, coupling=coupling.bind(warmup))

    steps = [int(step) for step in job.kept_steps]
    follower = Follower(job, init, look, steps, vary, each_has_data=True)
    pairs = [(setting, split) for setting in settings for split in range(splits)]
    order = np.array([split for _, split in pairs])
    numbers = {key: np.array([setting[key] for setting, _ in pairs], np.float32) for key in settings[0]}
    given = (data.x_test[order], data.mean[order], data.sd[order])
    examples = jax.device_put((data.x[order], data.y[order]))
    found = follower([seed + split for split in order], numbers, examples, given)
    scores = [_scores(found, index, data.y_test[split], int(split)) for index, (_, split) in enumerate(pairs)]
    return [scores[begin : begin + splits] for begin in range(0, len(scores), splits)]


def _scores(found: Followed, run: int, y: np.ndarray, split: int) -> Row:
    """RMSE, log-likelihood of the mixture of all draws, and how often the 90 % interval holds y."""
    row: Row = {"split": split, "diverged": int(found.broken[run] >= 0)}
    if row["diverged"]:
        return {**row, "rmse": float("nan"), "log_likelihood": float("nan"), "coverage_90": float("nan")}
    mean = found.seen["mean"][:, run].astype(float).reshape(-1, len(y))
    sd = found.seen["sd"][:, run].astype(float).reshape(-1, 1)
    z = (y - mean) / sd
    each = -(z**2) / 2 - np.log(sd) - np.log(2 * np.pi) / 2
    return {
        **row,
        "rmse": float(np.sqrt(np.mean((y - mean.mean(0)) ** 2))),
        "log_likelihood": float(np.mean(np.logaddexp.reduce(each, 0) - np.log(len(each)))),
        "coverage_90": coverage(ndtr(z).mean(0), 0.9),
    }


def _store(report: Report, split: Split) -> None:
    """One run on the first split of the first set."""
    data = scaled([split])
    chains, num_steps = int(report.settings["chains"]), int(report.settings["steps"])
    warmup = int(WARMUP * num_steps)
    target = hk.Target(log_likelihood, log_prior, (data.x[0], data.y[0]), min(100, data.x.shape[1]))
    keep_store(
        report,
        target,
        init_of(data.x.shape[2], 50),
        dynamics=hk.ScaleAdaptedSGHMC(STEPS[1]),
        chains=chains,
        num_steps=num_steps,
        warmup=warmup,
        thin=max(1, (num_steps - warmup) // DRAWS),
    )


# -- figures and words -------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> list[Row]:
    """Mean and standard error over the splits, ours and others'."""
    found = []
    for name in dict.fromkeys(row["set"] for row in rows):
        for method in METHODS:
            own = [row for row in rows if row["set"] == name and row["method"] == method.name]
            if own:
                rmse, log_likelihood = (standard_error([float(r[k]) for r in own]) for k in ("rmse", "log_likelihood"))
                found.append(
                    {
                        "set": name,
                        "method": method.name,
                        "splits": len(own),
                        "rmse": float(rmse[0]),
                        "rmse se": float(rmse[1]),
                        "log_likelihood": float(log_likelihood[0]),
                        "log_likelihood se": float(log_likelihood[1]),
                        "coverage_90": float(np.mean([float(r["coverage_90"]) for r in own])),
                        "source": "this run",
                    }
                )
        for other in REGRESSION:
            if name in other.log_likelihood:
                rmse_of = other.rmse.get(name, (float("nan"), float("nan")))
                found.append(
                    {
                        "set": name,
                        "method": other.method,
                        "splits": UCI[name].splits,
                        "rmse": rmse_of[0],
                        "rmse se": rmse_of[1],
                        "log_likelihood": other.log_likelihood[name][0],
                        "log_likelihood se": other.log_likelihood[name][1],
                        "coverage_90": float("nan"),
                        "source": other.paper,
                    }
                )
    return found


def findings(rows: Sequence[Row]) -> list[str]:
    """Ours beside the published scale-adapted SGHMC, and elastic beside our own baseline."""
    said_so = []
    own = {(row["set"], row["method"]): row for row in rows if row["source"] == "this run"}
    for (name, method), row in own.items():
        if method == "scale-adapted SGHMC" and name in SCALE_ADAPTED.log_likelihood:
            theirs, error = SCALE_ADAPTED.log_likelihood[name]
            gap = row["log_likelihood"] - theirs
            verdict = "better, or within one standard error of it" if gap >= -error else "worse by more than that"
            said_so.append(
                f"{name}: scale-adapted SGHMC has a test log-likelihood of "
                f"{with_error(row['log_likelihood'], row['log_likelihood se'])}; published {theirs:.2f} ± {error:.2f}: "
                f"{verdict}."
            )
        if method.startswith("elastic") and (name, "scale-adapted SGHMC") in own:
            base = own[name, "scale-adapted SGHMC"]
            gap = row["log_likelihood"] - base["log_likelihood"]
            scale = np.hypot(row["log_likelihood se"], base["log_likelihood se"])
            verdict = "no difference to speak of" if not abs(gap) > 2 * scale else "ahead" if gap > 0 else "behind"
            said_so.append(
                f"{name}: elastic chains, let go before draws are kept, have "
                f"{with_error(row['log_likelihood'], row['log_likelihood se'], 3)}, independent ones "
                f"{with_error(base['log_likelihood'], base['log_likelihood se'], 3)}: {verdict}."
            )
    missing = [name for name in dict.fromkeys(r["set"] for r in rows) if name not in SCALE_ADAPTED.log_likelihood]
    if missing:
        said_so.append(f"No figure of scale-adapted SGHMC was published for {', '.join(missing)}.")
    return said_so


def draw(report: Report) -> None:
    """A figure of all scores, and the page."""
    rows = summary(report.rows("scores"))
    plt = plot_style()
    names = list(dict.fromkeys(row["set"] for row in rows))
    kinds = list(dict.fromkeys((row["method"], row["source"] == "this run") for row in rows))
    kinds.sort(key=lambda kind: not kind[1])
    figure, panels = plt.subplots(2, len(names), figsize=(2.6 * len(names) + 2.4, 5.6), squeeze=False, sharey=True)
    figure.set_layout_engine("constrained")
    colours = [COLOURS[c] for c in ("black", "blue", "orange", "green", "pink", "yellow", "grey", "sky")]
    for score, line in zip(("log_likelihood", "rmse"), panels, strict=True):
        for panel, name in zip(line, names, strict=True):
            for height, (method, ours) in enumerate(kinds):
                for row in rows:
                    if row["set"] == name and (row["method"], row["source"] == "this run") == (method, ours):
                        error = row[f"{score} se"]
                        panel.errorbar(
                            row[score],
                            -height,
                            xerr=error if np.isfinite(error) else None,
                            fmt="o" if ours else "s",
                            markerfacecolor=None if ours else "white",
                            color=colours[height],
                            capsize=2,
                        )
            panel.set_title(name.replace("protein-tertiary-structure", "protein"), fontsize=10)
            panel.set_xlabel("test log-likelihood" if score == "log_likelihood" else "test RMSE", fontsize=9)
            panel.grid(axis="x", alpha=0.25)
        line[0].set_yticks(
            [-height for height in range(len(kinds))],
            [method + ("" if ours else " (published)") for method, ours in kinds],
            fontsize=8,
        )
    report.figure("scores", figure, "Means and standard errors over the splits; open squares are published figures.")
    plt.close(figure)
    shown = [
        {
            "set": row["set"],
            "method": row["method"],
            "RMSE": with_error(row["rmse"], row["rmse se"]),
            "log-likelihood": with_error(row["log_likelihood"], row["log_likelihood se"]),
            "90 % interval holds": row["coverage_90"],
            "splits": row["splits"],
            "source": row["source"],
        }
        for row in rows
    ]
    report.page(
        TITLE,
        "One hidden layer of 50 units (100 for protein), the standard splits, beside published figures.",
        [
            report.shown("scores"),
            said("What it says", findings(rows)),
            table("Scores", shown, "Mean ± standard error over the splits, in the units of the target."),
            table(
                "What the sweep chose",
                report.rows("tuned"),
                "By log-likelihood on a tenth of the training parts, of those with an RMSE near the least.",
            ),
        ],
    )
