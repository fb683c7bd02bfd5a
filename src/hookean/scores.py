"""How good predictions are, how well they know it, and whether enough was sampled for them.

Scores are averages over N test examples. R-hat and effective sample sizes are those of Vehtari, Gelman, Simpson,
Carpenter and Bürkner 2021, judged where it matters for a network: on its predictions, not on its parameters, which may
be exchanged for each other without any change in what it says.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from hookean.api import Run
from hookean.predict import Predictions
from hookean.types import ArgumentError, HookeanWarning, check_count

LEVELS = (0.5, 0.9, 0.95)
"""Central intervals whose coverage is reported."""
FEWEST_DRAWS = 8
"""Draws of each chain below which halves have no autocorrelation to speak of."""

# -- classification ----------------------------------------------------------------------------------------------------


class Reliability(NamedTuple):
    """The reliability curve, by bins of the largest probability: its mean, how often it was right, how many examples.

    NaN where a bin is empty.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    examples: np.ndarray


def classification(predictions: Predictions, labels: Any) -> dict[str, float]:
    """`nll`, `accuracy`, `brier` and `ece` of predicted classes; `labels` as given to `predict`."""
    _check_kind(predictions, "classification")
    p = predictions.mean
    nll_of_draws = predictions.log_score
    return {
        "nll": nll(p, labels) if nll_of_draws is None else float(-nll_of_draws.mean()),
        "accuracy": accuracy(p, labels),
        "brier": brier(p, labels),
        "ece": calibration_error(p, labels),
    }


def nll(probabilities: Any, labels: Any) -> float:
    """Minus the mean log-probability of the labels, in nats; a probability of 0 counts as rounding's smallest step."""
    from sklearn.metrics import log_loss

    p, labels = _checked(probabilities, labels)
    return float(log_loss(labels, p, labels=np.arange(p.shape[1])))


def accuracy(probabilities: Any, labels: Any) -> float:
    """How often the most probable class is the label."""
    from sklearn.metrics import accuracy_score

    p, labels = _checked(probabilities, labels)
    return float(accuracy_score(labels, p.argmax(1)))


def brier(probabilities: Any, labels: Any) -> float:
    """Mean over examples of sum over classes of (p - [class is the label])^2, from 0 to 2."""
    from sklearn.metrics import brier_score_loss

    p, labels = _checked(probabilities, labels)
    return float(brier_score_loss(labels, p, labels=np.arange(p.shape[1]), scale_by_half=False))


def reliability(probabilities: Any, labels: Any, bins: int = 15) -> Reliability:
    """Confidence against accuracy, in `bins` equal bins of (0, 1]."""
    p, labels = _checked(probabilities, labels)
    bins = check_count("bins", bins)
    largest, right = p.max(1), p.argmax(1) == labels
    which = np.clip(np.ceil(largest * bins).astype(int) - 1, 0, bins - 1)
    count = np.bincount(which, minlength=bins)
    with np.errstate(invalid="ignore"):
        confidence, correct = (np.bincount(which, values, bins) / count for values in (largest, right))
    return Reliability(confidence, correct, count)


def calibration_error(probabilities: Any, labels: Any, bins: int = 15) -> float:
    """Expected calibration error: the mean over examples of |confidence - accuracy| of their bins (Guo et al. 2017)."""
    curve = reliability(probabilities, labels, bins)
    some = curve.examples > 0
    return float(np.average(np.abs(curve.confidence - curve.accuracy)[some], weights=curve.examples[some]))


def out_of_distribution(inside: Predictions, outside: Predictions) -> dict[str, float]:
    """AUROC of telling foreign examples from those of the data's own kind: 1 if all are told, 0.5 by guessing.

    By `entropy` (all uncertainty), `mutual_information` (the epistemic part) and `max_probability`.
    """
    for one in (inside, outside):
        _check_kind(one, "classification")
    return {
        "entropy": auroc(inside.total, outside.total),
        "mutual_information": auroc(inside.epistemic, outside.epistemic),
        "max_probability": auroc(-inside.mean.max(1), -outside.mean.max(1)),
    }


def auroc(inside: Any, outside: Any) -> float:
    """Probability that an uncertainty of `outside` is larger than one of `inside`; ties count half."""
    from sklearn.metrics import roc_auc_score

    inside, outside = np.ravel(inside), np.ravel(outside)
    foreign = np.repeat([0, 1], [len(inside), len(outside)])
    return float(roc_auc_score(foreign, np.concatenate([inside, outside])))


# -- regression --------------------------------------------------------------------------------------------------------


def regression(predictions: Predictions, y: Any) -> dict[str, float]:
    """`rmse`, `log_likelihood` (mean over examples, of the mixture of all draws' Gaussians) and `coverage_50`, ...

    `predictions` must have been made with the same `y`.
    """
    _check_kind(predictions, "regression")
    if predictions.log_score is None or predictions.distribution_at_y is None:
        raise ArgumentError("predictions", "were made without y", "Give y to predict, too")
    found = {"rmse": rmse(predictions.mean, y), "log_likelihood": float(predictions.log_score.mean())}
    return found | {f"coverage_{100 * level:g}": coverage(predictions.distribution_at_y, level) for level in LEVELS}


def rmse(mean: Any, y: Any) -> float:
    """Root of the mean squared error."""
    from sklearn.metrics import root_mean_squared_error

    return float(root_mean_squared_error(np.asarray(y), np.asarray(mean)))


def coverage(distribution_at_y: Any, level: float) -> float:
    """How often y lies in the central interval that should hold it with probability `level`.

    From P(Y <= y): y lies in the interval if that is between (1 - level)/2 and (1 + level)/2.
    """
    if not 0 < level < 1:
        raise ArgumentError("level", f"is {level}", "Give a probability between 0 and 1")
    return float(np.mean(np.abs(np.asarray(distribution_at_y, float) - 0.5) <= level / 2))


# -- convergence -------------------------------------------------------------------------------------------------------


class Convergence(NamedTuple):
    """Of each example's log-probability: R-hat (near 1 if the chains agree; above 1.01 run longer), and bulk ESS."""

    rhat: np.ndarray
    ess: np.ndarray


def convergence(run: Run, predictions: Predictions) -> Convergence:
    """Whether the chains of `run` agree in what they predict, and how many independent draws they are worth.

    Chains without any draw are left out, and so are draws that another chain lacks.

    Args:
        run: where the predictions come from.
        predictions: made with y; with `per_example=True` each example is judged, else their mean.
    """
    series = predictions.log_probabilities
    if series is None:
        raise ArgumentError("predictions", "were made without y", "Give y to predict, and per_example=True")
    if run.couples_draws:
        warnings.warn(
            "convergence: the kept draws are coupled, and R-hat between coupled chains is meaningless: springs make "
            "chains alike, whether or not they have found the posterior. Compare runs from other starts, or let the "
            "chains go: schedule=hk.release().",
            HookeanWarning,
            stacklevel=2,
        )
    there = ~np.isnan(series).reshape(*series.shape[:2], -1).any(2)
    series = series[there.any(1)]
    series = series[:, there[there.any(1)].all(0)]
    return Convergence(rhat(series), ess(series))


def rhat(values: Any) -> np.ndarray:
    """Rank-normalised split R-hat of [chain, draw, ...], over the first two axes; the larger of bulk and tails.

    NaN where all values are equal, or one is NaN.
    """
    values = _halves(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        bulk = _split_rhat(_normal_scores(values))
        tails = _split_rhat(_normal_scores(np.abs(values - np.median(values, (0, 1)))))
    return np.maximum(bulk, tails)


def ess(values: Any) -> np.ndarray:
    """Bulk effective sample size of [chain, draw, ...], over the first two axes, from the ranks of split chains.

    Autocorrelations are summed as far as their pairs are positive, and made to fall (Geyer 1992).
    NaN where all values are equal, or one is NaN.
    """
    scores = _normal_scores(_halves(values))
    chains, draws = scores.shape[:2]
    with np.errstate(invalid="ignore", divide="ignore"):
        covariance = _autocovariance(scores).mean(0)
        within = covariance[0] * draws / (draws - 1)
        total = covariance[0] + scores.mean(1).var(0, ddof=1)
        correlation = 1 - (within - covariance) / total
    correlation[0] = 1
    last = (draws - 3) // 2  # pairs beyond have too few terms
    pairs = correlation[0 : 2 * last + 2].reshape(last + 1, 2, *scores.shape[2:]).sum(1)
    negative = pairs < 0
    negative[last] = True
    cut = np.argmax(negative, 0)  # the first pair that is not summed
    kept = np.arange(last + 1).reshape(-1, *(1,) * cut.ndim) < cut
    summed = np.sum(np.where(kept, np.minimum.accumulate(pairs, 0), 0), 0)
    beyond = np.maximum(np.take_along_axis(correlation, 2 * cut[None], 0)[0], 0)
    size = chains * draws
    time = np.maximum(-1 + 2 * summed + beyond, 1 / np.log10(size))
    return size / np.where(np.isfinite(total) & (total > 0), time, np.nan)


def _halves(values: Any) -> np.ndarray:
    """Each chain split in two; of an odd number of draws the middle one is left out."""
    values = np.asarray(values, float)
    if values.ndim < 2 or values.shape[0] < 1 or values.shape[1] < FEWEST_DRAWS:
        raise ArgumentError(
            "values", f"have shape {values.shape}", f"Give [chain, draw, ...] with {FEWEST_DRAWS} draws or more"
        )
    half = values.shape[1] // 2
    return np.concatenate([values[:, :half], values[:, -half:]])


def _normal_scores(values: np.ndarray) -> np.ndarray:
    """Normal quantiles of the ranks over the first two axes (Blom 1958); NaN if one value is."""
    from scipy.special import ndtri
    from scipy.stats import rankdata

    flat = values.reshape(-1, *values.shape[2:])
    return ndtri((rankdata(flat, axis=0) - 0.375) / (len(flat) + 0.25)).reshape(values.shape)


def _split_rhat(scores: np.ndarray) -> np.ndarray:
    within = scores.var(1, ddof=1).mean(0)
    between = scores.mean(1).var(0, ddof=1)
    draws = scores.shape[1]
    return np.sqrt((draws - 1) / draws + between / np.where(within > 0, within, np.nan))


def _autocovariance(scores: np.ndarray) -> np.ndarray:
    """Along the second axis, divided by the number of draws."""
    from scipy.fft import irfft, next_fast_len, rfft

    draws = scores.shape[1]
    length = next_fast_len(2 * draws, real=True)
    spectrum = rfft(scores - scores.mean(1, keepdims=True), length, axis=1)
    return irfft(np.abs(spectrum) ** 2, length, axis=1)[:, :draws] / draws


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_kind(predictions: Predictions, kind: str) -> None:
    if predictions.kind != kind:
        raise ArgumentError("predictions", f"are of a {predictions.kind}", f"Give those of a {kind}")


def _checked(probabilities: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    p, labels = np.asarray(probabilities, float), np.asarray(labels)
    if p.ndim != 2 or p.shape[0] < 1 or p.shape[1] < 2:
        raise ArgumentError("probabilities", f"have shape {p.shape}", "Give [N, classes], of two classes or more")
    if labels.shape != p.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
        raise ArgumentError("labels", f"have shape {labels.shape} and type {labels.dtype}", f"Give {len(p)} integers")
    if labels.min() < 0 or labels.max() >= p.shape[1]:
        raise ArgumentError("labels", "are not classes", f"Give integers from 0 to {p.shape[1] - 1}")
    return p, labels
