"""What `hookean demo` runs: a Bayesian neural network on handwritten digits, with springs and without.

The network has one hidden layer and the prior N(0, 1) on all weights and biases. All chains start at draws from the
prior, read batches of their own and take the same number of steps of the same size:

    one chain          plain SGHMC
    six independent    the same six times; the first of them is the one chain above, with the same random numbers
    six elastic        tied to a common centre, then let go: `schedule=hk.release()`

States are kept from the start, so that curves show the way there, but the averages of predictions take only draws from
the second half of the run, when no spring acts any longer: all three then have the law exp(-U), the posterior.
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hookean as hk

LEARNING_RATE, MOMENTUM = 0.1, 0.9
"""In units of SGD on the mean loss. Steps until a weight that only the prior holds is forgotten: 0.1 N / 0.1 = N."""
PULL = 0.01
"""Strength of a spring in one step, eps^2 alpha / K; gentle, yet far above the pull of the prior, eps^2."""
EVERY = 8
BINS = 10
WIDTH = 92
"""Of the table, where the output is no terminal as well."""
FEWEST = 5
"""Bins with fewer digits are left out of the picture, not of the calibration error."""

COLOURS = {"one chain": "#000000", "independent": "#E69F00", "elastic": "#0072B2"}
"""From the palette of Okabe and Ito, which the colour-blind can tell apart; markers and widths differ as well."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Log-probabilities [chain, draw, example, class] of the test digits, and the temperature of the averaged draws."""

    name: str
    log_probabilities: np.ndarray
    temperature: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All that is shown.

    Attributes:
        schemes: by the keys of COLOURS.
        steps: those after which states were kept.
        pull: share of the springs' force at these steps, from the schedule that was run.
        averaged_from: averages take the draws after this step.
        digits: the labels of the test set.
        train_size: digits that were learnt from.
        seed: that of all runs.
    """

    schemes: dict[str, Scheme]
    steps: np.ndarray
    pull: np.ndarray
    averaged_from: int
    digits: np.ndarray
    train_size: int
    seed: int

    @property
    def kept(self) -> np.ndarray:
        """Indices of the draws that the averages take."""
        return np.flatnonzero(self.steps > self.averaged_from)


# -- the network -------------------------------------------------------------------------------------------------------


def _start(width: int, key: jax.Array) -> dict[str, jax.Array]:
    """A draw from the prior."""
    shapes = {"hidden": (64, width), "hidden_bias": (width,), "output": (width, 10), "output_bias": (10,)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def _log_probabilities(weights: Any, pixels: Any) -> jax.Array:
    hidden = jax.nn.relu(pixels @ weights["hidden"] + weights["hidden_bias"])
    return jax.nn.log_softmax(hidden @ weights["output"] + weights["output_bias"])


def _log_likelihood(weights: Any, batch: Any) -> jax.Array:
    pixels, digits = batch
    return jnp.take_along_axis(_log_probabilities(weights, pixels), digits[:, None], axis=1)[:, 0]


def _log_prior(weights: Any) -> jax.Array:
    return -jax.tree.reduce(jnp.add, jax.tree.map(lambda leaf: jnp.sum(leaf**2), weights)) / 2


# -- sampling ----------------------------------------------------------------------------------------------------------


def digits_target() -> tuple[hk.Target, tuple[np.ndarray, np.ndarray]]:
    """The posterior given one half of the digits, and the other half: pixels and labels."""
    pixels, digits = load_digits(return_X_y=True)
    train, test, train_digits, test_digits = train_test_split(pixels / 16, digits, test_size=0.5, random_state=0)
    return hk.Target(_log_likelihood, _log_prior, data=(train, train_digits), batch_size=100), (test, test_digits)


def sample(target: hk.Target, coupling: hk.Coupling, *, width: int, **settings: Any) -> hk.Run:
    """What all schemes share. States are kept from the first step."""
    with warnings.catch_warnings():  # coupled states and those of the warm-up are kept for the curves alone
        warnings.simplefilter("ignore", hk.HookeanWarning)
        dynamics = hk.SGHMC.from_learning_rate(LEARNING_RATE, MOMENTUM, target=target)
        start, engine = partial(_start, width), hk.Vectorised()
        return hk.sample(target, start, dynamics=dynamics, coupling=coupling, engine=engine, **settings)


def compare(
    seed: int = 0,
    *,
    chains: int = 6,
    num_steps: int = 6_000,
    thin: int = 25,
    width: int = 32,
    progress: bool = True,
) -> Comparison:
    """Sample with all schemes and predict the test digits. Progress goes to stderr."""
    target, (test, test_digits) = digits_target()
    train_size = target.num_examples
    assert train_size is not None
    averaged_from = num_steps // 2
    springs = hk.Elastic(
        alpha=PULL * chains * train_size / LEARNING_RATE,  # eps^2 = lr / N
        every=EVERY,
        schedule=hk.release(over=averaged_from),  # let go between a quarter and three eighths of the whole run
    )

    run = partial(
        sample, target, width=width, chains=chains, num_steps=num_steps, thin=thin, seed=seed, progress=progress
    )
    predict = jax.jit(jax.vmap(jax.vmap(lambda weights: _log_probabilities(weights, test))))
    alone, tied = run(hk.Independent()), run(springs)
    steps = tied.kept_steps
    averaged = steps > averaged_from

    def scheme(name: str, run: hk.Run, count: int) -> Scheme:
        temperatures = np.asarray(run.stats["configurational_temperature"])[:count, averaged]
        predictions = predict(jax.tree.map(lambda leaf: leaf[:count], run.draws))
        return Scheme(name, np.asarray(predictions, float), float(temperatures.mean()))

    return Comparison(
        schemes={
            "one chain": scheme("one chain", alone, 1),
            "independent": scheme(f"{chains} independent", alone, chains),
            "elastic": scheme(f"{chains} elastic", tied, chains),
        },
        steps=steps,
        pull=np.array([float(springs.schedule.bind(0).factor(step)) for step in steps]),
        averaged_from=averaged_from,
        digits=test_digits,
        train_size=train_size,
        seed=seed,
    )


# -- scores ------------------------------------------------------------------------------------------------------------


def mean_prediction(log_probabilities: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """Logarithm of the mean of probabilities over an axis."""
    count = np.prod([log_probabilities.shape[a] for a in np.atleast_1d(axis)])
    largest = log_probabilities.max(axis=axis, keepdims=True)
    total = np.log(np.exp(log_probabilities - largest).sum(axis=axis))
    return total + largest.squeeze(axis) - np.log(count)


def log_likelihoods(log_probabilities: np.ndarray, digits: np.ndarray) -> np.ndarray:
    """[..., example] from [..., example, class]."""
    return log_probabilities[..., np.arange(len(digits)), digits]


def accuracy(log_probabilities: np.ndarray, digits: np.ndarray) -> float:
    """Share of examples whose most probable class is theirs."""
    return float(np.mean(log_probabilities.argmax(-1) == digits))


def reliability(log_probabilities: np.ndarray, digits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In bins of equal width: mean confidence, share that is right, and number of examples; empty bins left out.

    Confidence is the probability of the most probable class. `log_probabilities` is [..., example, class].
    """
    confidence = np.exp(log_probabilities.max(-1)).ravel()
    right = (log_probabilities.argmax(-1) == digits).ravel()
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    count = np.bincount(bins, minlength=BINS)
    full = count > 0
    mean = [np.bincount(bins, values, BINS)[full] / count[full] for values in (confidence, right)]
    return mean[0], mean[1], count[full]


def calibration_error(log_probabilities: np.ndarray, digits: np.ndarray) -> float:
    """Expected calibration error: mean distance between confidence and share that is right, over bins."""
    confidence, right, count = reliability(log_probabilities, digits)
    return float(np.sum(count * np.abs(confidence - right)) / np.sum(count))


def predictions(scheme: Scheme, comparison: Comparison, at: int) -> dict[str, np.ndarray]:
    """Three ways to predict from what is known at draw number `at`, each [member, example, class].

    `state`: each chain's current state by itself. `states`: the mean over the chains' current states. `average`: the
    mean over all chains and over their draws so far; left out while there are none.
    """
    now = scheme.log_probabilities[:, at]
    found = {"state": now, "states": mean_prediction(now, 0)[None]}
    so_far = comparison.kept[comparison.kept <= at]
    if len(so_far):
        found["average"] = mean_prediction(scheme.log_probabilities[:, so_far], (0, 1))[None]
    return found


def scores(members: np.ndarray, digits: np.ndarray) -> tuple[float, float, float]:
    """Log-likelihood of a test digit, accuracy and calibration error, each a mean over members."""
    return (
        float(log_likelihoods(members, digits).mean()),
        float(np.mean([accuracy(member, digits) for member in members])),
        float(np.mean([calibration_error(member, digits) for member in members])),
    )


def checkpoints(comparison: Comparison) -> list[int]:
    """Numbers of the draws that the table shows: eight times as far at the last as at the first."""
    last = len(comparison.steps) - 1
    wanted = comparison.steps[-1] * np.array([1, 2, 3, 4, 6, 8]) / 8
    return sorted({min(int(np.searchsorted(comparison.steps, step)), last) for step in wanted})


# -- words -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean difference of log-likelihoods of the same test digits, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, ours: np.ndarray, theirs: np.ndarray, *others: float) -> Difference:
        """From one number per test digit each. `others` are standard errors from other sources than these digits."""
        each = np.asarray(ours, float) - theirs
        return cls(float(each.mean()), float(np.hypot.reduce([each.std(ddof=1) / np.sqrt(len(each)), *others])))

    @property
    def sign(self) -> int:
        """1 or -1 where the mean is more than two standard errors from 0, else 0."""
        return int(np.sign(self.mean)) if abs(self.mean) > 2 * self.error else 0

    def __str__(self) -> str:
        word = {1: "better", 0: "no differently", -1: "worse"}[self.sign]
        return f"{word} ({self.mean:+.3f} +- {self.error:.3f})"


def findings(comparison: Comparison) -> list[str]:
    """What the numbers say, in words that follow from them."""
    lone, independent, elastic = (comparison.schemes[name] for name in COLOURS)
    tied = np.flatnonzero(comparison.pull == 1)
    tied = tied[len(tied) // 2 :]  # without the way there
    acting = comparison.pull[comparison.kept] > 0
    found = [_while_tied(comparison, tied)] if len(tied) else []
    if acting.any():
        found.append(f"Careful: springs acted on {acting.mean():.0%} of the averaged elastic draws; these are coupled.")
    else:
        found.append(_let_go(comparison))
    digits, last = comparison.digits, len(comparison.steps) - 1
    final = {s.name: predictions(s, comparison, last)["average"][0] for s in (lone, independent, elastic)}
    each = {name: log_likelihoods(prediction, digits) for name, prediction in final.items()}
    luck = {s.name: jackknife(_members(s, comparison), digits) for s in (lone, independent, elastic)}
    against = {
        name: Difference.of(each[elastic.name], each[name], luck[elastic.name], luck[name])
        for name in (lone.name, independent.name)
    }
    found.append(
        f"At the end, averages over draws. {elastic.name} chains predict, "
        + "; ".join(f"against {name}, {difference}" for name, difference in against.items())
        + ". "
        + _conclusion(against[independent.name], acting.any())
    )
    errors = {name: calibration_error(prediction, digits) for name, prediction in final.items()}
    found.append(
        f"Calibration errors at the end: {', '.join(f'{name} {error:.1%}' for name, error in errors.items())}. With "
        f"{len(digits):,} test digits a perfectly calibrated predictor would read about "
        f"{_calibration_noise(final[independent.name]):.1%}. {_leaning(final[independent.name], digits)}"
    )
    count = len(elastic.log_probabilities)
    found.append(
        "The numbers after +- are standard errors: over the test digits, and for the averages at the end over chains "
        "too (over stretches of time for one chain). This is one seed, "
        f"{comparison.seed}: try others with --seed. Steps are those of each chain: {count} chains do {count} times "
        "the work of one."
    )
    return found


def _while_tied(comparison: Comparison, tied: np.ndarray) -> str:
    """Current states while the springs hold at full force."""
    independent, elastic = comparison.schemes["independent"], comparison.schemes["elastic"]
    state = Difference.of(_one_state(elastic, comparison, tied), _one_state(independent, comparison, tied))
    states = Difference.of(_all_states(elastic, comparison, tied), _all_states(independent, comparison, tied))
    return (
        f"While the springs hold (steps {comparison.steps[tied[0]]:,} to {comparison.steps[tied[-1]]:,}), one elastic "
        f"state predicts a test digit, against one independent state, {state}; all {len(elastic.log_probabilities)} "
        f"states together, {states}. These elastic states are coupled: their law is narrower than the posterior, so "
        "that a better state is no sign of having got anywhere sooner."
    )


def _let_go(comparison: Comparison) -> str:
    """The same after the release, and how wide the chains are."""
    independent, elastic = comparison.schemes["independent"], comparison.schemes["elastic"]
    gone = comparison.steps[np.argmax(comparison.pull == 0)]
    state = Difference.of(
        _one_state(elastic, comparison, comparison.kept), _one_state(independent, comparison, comparison.kept)
    )
    return (
        f"The springs were gone by step {gone:,}, and averages take draws after step {comparison.averaged_from:,} "
        f"only: none of these is coupled. One elastic state then predicts, against one independent state, {state}. "
        "The configurational temperature of these draws, 1 if they are as wide as the posterior, is "
        f"{elastic.temperature:.2f} for elastic chains and {independent.temperature:.2f} for independent ones."
    )


def _conclusion(difference: Difference, coupled: bool) -> str:
    if coupled:
        return "Coupled and uncoupled draws have different laws; this says nothing about which chains sample better."
    return {
        1: "Springs gave more here than as many chains without them.",
        0: "Of a gain from springs, beyond what as many independent chains give, there is no sign here.",
        -1: "As many chains without springs did better here: springs cost something.",
    }[difference.sign]


def _members(scheme: Scheme, comparison: Comparison) -> np.ndarray:
    """Parts that the final average is made of [part, example, class]: its chains, or ten stretches of a lone one."""
    kept = scheme.log_probabilities[:, comparison.kept]
    if len(kept) > 1:
        return mean_prediction(kept, 1)
    stretches = np.array_split(kept[0], min(10, kept.shape[1]))
    return np.stack([mean_prediction(stretch, 0) for stretch in stretches])


def jackknife(members: np.ndarray, digits: np.ndarray) -> float:
    """Standard error of the log-likelihood of the members' mean prediction, from leaving out each in turn."""
    count = len(members)
    without = [
        log_likelihoods(mean_prediction(np.delete(members, left_out, 0), 0), digits).mean() for left_out in range(count)
    ]
    return float(np.sqrt((count - 1) * np.var(without)))


def _leaning(log_probabilities: np.ndarray, digits: np.ndarray) -> str:
    """Whether confidence is above or below the share that is right."""
    confidence = np.exp(log_probabilities.max(-1))
    gap = Difference.of(log_probabilities.argmax(-1) == digits, confidence)
    words = {1: "less sure than it is right", 0: "as sure as it is right, on the whole", -1: "surer than it is right"}
    return f"The posterior, as the independent chains see it, is {words[gap.sign]}."


def _one_state(scheme: Scheme, comparison: Comparison, draws: np.ndarray) -> np.ndarray:
    """Log-likelihood of each test digit by one state, a mean over chains and draws."""
    return log_likelihoods(scheme.log_probabilities[:, draws], comparison.digits).mean((0, 1))


def _all_states(scheme: Scheme, comparison: Comparison, draws: np.ndarray) -> np.ndarray:
    """The same by the current states of all chains together, a mean over draws."""
    return log_likelihoods(mean_prediction(scheme.log_probabilities[:, draws], 0), comparison.digits).mean(0)


def _calibration_noise(log_probabilities: np.ndarray, repeats: int = 200) -> float:
    """Mean calibration error on digits drawn from the predictions themselves, which are calibrated by construction."""
    random = np.random.default_rng(0)
    ladder = np.cumsum(np.exp(log_probabilities), axis=-1)
    drawn = (random.random((repeats, len(ladder), 1)) * ladder[:, -1:] > ladder).sum(-1)
    return float(np.mean([calibration_error(log_probabilities, digits) for digits in drawn]))


# -- what is shown -----------------------------------------------------------------------------------------------------


def show(result: Comparison, out_path: str | Path) -> None:
    """Print the table and what it says on stdout, and write the picture as PNG to `out_path`."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    chains = len(result.schemes["elastic"].log_probabilities)
    examples = f"{result.train_size:,} digits to learn from, {len(result.digits):,} to test"
    console.print(f"A Bayesian neural network on handwritten digits: {examples}; SGHMC, learning rate {LEARNING_RATE}")
    console.print("Each cell: log-likelihood of a test digit (higher is better), accuracy, calibration error (ECE).")
    console.print(f"One state: the mean over chains. All states: the {chains} current states predict together.")
    console.print("The one chain is the first of the independent ones.")
    console.print(f"Average: all chains and all their draws after step {result.averaged_from:,} predict together.\n")
    console.print(table(result))
    for paragraph in findings(result):
        console.print(f"{textwrap.fill(paragraph, 96, break_on_hyphens=False)}\n", markup=False)
    draw(result, out_path)
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"The picture is in {out_path}", markup=False)


def table(result: Comparison) -> Table:
    """A row for each checkpoint and way to predict, a column for each scheme."""
    made = Table(box=None, padding=(0, 2, 0, 0), width=WIDTH)
    made.add_column("step", justify="right")
    made.add_column("prediction by")
    for scheme in result.schemes.values():
        made.add_column(scheme.name, justify="right", no_wrap=True)
    labels = {"state": "one state", "states": "all states", "average": "average"}
    for at in checkpoints(result):
        found = [predictions(scheme, result, at) for scheme in result.schemes.values()]
        for way, label in labels.items():
            if way in found[0]:
                cells = [_cell(scores(each[way], result.digits)) for each in found]
                if way == "states":
                    cells[0] = Text("")  # one state is all that one chain has
                step = f"{result.steps[at]:,}" if way == "state" else ""
                made.add_row(step, label, *cells)
        made.add_row()
    return made


def _cell(numbers: tuple[float, float, float]) -> Text:
    log_likelihood, right, error = numbers
    return Text(f"{log_likelihood:.3f} {right:.1%} {error:5.1%}")


def draw(result: Comparison, out_path: str | Path) -> None:
    """Curves of test log-likelihood against steps, and how far confidence can be relied upon."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.8), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    states, averages, reliable = figure.subplots(1, 3)
    _draw_states(states, result)
    _draw_averages(averages, result)
    _draw_reliability(reliable, result)
    for axes in (states, averages, reliable):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(out_path, format="png")


def _draw_states(axes: Any, result: Comparison) -> None:
    """The way there: current states."""
    lowest = []
    for key, scheme in result.schemes.items():
        each = log_likelihoods(scheme.log_probabilities, result.digits).mean((0, 2))
        axes.plot(
            result.steps,
            each,
            color=COLOURS[key],
            linewidth=1,
            alpha=0.8,
            linestyle="--",
            label=f"{scheme.name}: one state",
        )
        lowest.append(each[len(each) // 10 :].min())
        if len(scheme.log_probabilities) > 1:
            together = log_likelihoods(mean_prediction(scheme.log_probabilities, 0), result.digits).mean(1)
            axes.plot(result.steps, together, color=COLOURS[key], linewidth=2.2, label=f"{scheme.name}: all states")
    _shade_springs(axes, result)
    axes.set_ylim(1.4 * min(lowest), 0)  # the start would flatten all the rest; room for the legend
    axes.set(
        title="Predicting from current states", xlabel="steps of each chain", ylabel="test log-likelihood per digit"
    )
    axes.legend(fontsize=8, loc="lower right")


def _draw_averages(axes: Any, result: Comparison) -> None:
    """Averages over draws."""
    for key, scheme in result.schemes.items():
        curve = [
            log_likelihoods(predictions(scheme, result, at)["average"], result.digits).mean() for at in result.kept
        ]
        axes.plot(result.steps[result.kept], curve, color=COLOURS[key], linewidth=2.2, label=scheme.name)
    axes.set(
        title=f"Averaging all draws after step {result.averaged_from:,}",
        xlabel="steps of each chain",
        ylabel="test log-likelihood per digit",
    )
    axes.legend(loc="lower right")


def _shade_springs(axes: Any, result: Comparison) -> None:
    on = result.steps[result.pull > 0]
    if len(on):
        axes.axvspan(0, on[-1], color="0.9", zorder=0)
        axes.text(
            on[-1] / 2,
            0.98,
            "springs act on\nthe elastic chains",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
        )


def _draw_reliability(axes: Any, result: Comparison) -> None:
    """Confidence against the share that is right, for the final averages."""
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, linestyle=":", label="as sure as it is right")
    last = len(result.steps) - 1
    for (key, scheme), marker in zip(result.schemes.items(), "os^", strict=True):
        found = predictions(scheme, result, last)
        confidence, right, count = reliability(found["average"], result.digits)
        shown = count >= FEWEST
        axes.plot(
            confidence[shown],
            right[shown],
            color=COLOURS[key],
            marker=marker,
            markersize=6,
            linewidth=1.5,
            label=f"{scheme.name}: average",
        )
    axes.set(
        title="Calibration of the averages at the end",
        xlabel="confidence",
        ylabel="share that is right",
        xlim=(0, 1.02),
        ylim=(0, 1.02),
    )
    axes.legend(fontsize=8, loc="upper left")
