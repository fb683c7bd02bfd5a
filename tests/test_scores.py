"""Scores against scikit-learn and closed forms; R-hat and effective sample sizes against a slow twin, ArviZ and AR(1).

False alarms: each statistical check fails by chance once in 10^6; there are four.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import log_loss, roc_auc_score

import hookean as hk
from hookean import scores
from hookean.predict import Predictions, predict

FALSE_ALARM = 1e-6
RANDOM = np.random.default_rng(0)


def predictions_of(probabilities: Any, **more: Any) -> Predictions:
    p = np.asarray(probabilities, float)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), -1)
    return Predictions("classification", p, p[None], 0.5 * entropy, 0.5 * entropy, np.ones(1, int), 0, **more)


# -- classification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_as_defined(classes: int) -> None:
    p = RANDOM.dirichlet(np.ones(classes), 400)
    labels = RANDOM.integers(0, classes, 400)
    hot = np.eye(classes)[labels]
    assert scores.nll(p, labels) == pytest.approx(-np.mean(np.log(p[np.arange(400), labels])))
    assert scores.brier(p, labels) == pytest.approx(np.mean(np.sum((p - hot) ** 2, 1)))
    assert scores.accuracy(p, labels) == np.mean(p.argmax(1) == labels)
    found = scores.classification(predictions_of(p), labels)
    assert found["nll"] == pytest.approx(log_loss(labels, p))
    assert found["ece"] == scores.calibration_error(p, labels)
    with_score = predictions_of(p, log_score=np.linspace(-3, -1, 400))
    assert scores.classification(with_score, labels)["nll"] == pytest.approx(2)


def test_labels_that_do_not_all_occur() -> None:
    p = np.array([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]])
    assert scores.nll(p, [0, 0]) == pytest.approx(-np.log([0.5, 0.1]).mean())
    assert scores.brier(p, [0, 0]) == pytest.approx((0.25 + 0.04 + 0.09 + 0.81 + 0.01 + 0.64) / 2)


def test_the_reliability_of_a_known_case() -> None:
    """Ten bins: (0.5, 0.6] holds two examples, one right; (0.9, 1] three, all right; 0.7 belongs to (0.6, 0.7]."""
    largest = np.array([0.55, 0.57, 0.95, 0.99, 1.0, 0.7])
    p = np.column_stack([largest, 1 - largest])
    labels = np.array([0, 1, 0, 0, 0, 1])
    curve = scores.reliability(p, labels, bins=10)
    assert curve.examples.tolist() == [0, 0, 0, 0, 0, 2, 1, 0, 0, 3]
    np.testing.assert_allclose(curve.confidence[[5, 6, 9]], [0.56, 0.7, 2.94 / 3])
    np.testing.assert_allclose(curve.accuracy[[5, 6, 9]], [0.5, 0, 1])
    assert np.isnan(curve.accuracy[0])
    ece = (2 * 0.06 + 1 * 0.7 + 3 * (1 - 2.94 / 3)) / 6
    assert scores.calibration_error(p, labels, bins=10) == pytest.approx(ece)


def test_labels_drawn_from_the_probabilities_are_calibrated() -> None:
    """Each bin's accuracy is binomial about its confidence; of 15 bins none is further off than its quantile."""
    p = RANDOM.dirichlet(np.ones(3), 20_000)
    labels = (RANDOM.random(20_000)[:, None] > p.cumsum(1)[:, :-1]).sum(1)
    curve = scores.reliability(p, labels)
    some = curve.examples > 0
    off = np.abs(curve.accuracy - curve.confidence)[some]
    # Hoeffding, which holds though the examples of a bin differ: P(off > t) <= 2 exp(-2 n t^2).
    limit = np.sqrt(np.log(2 * some.sum() / FALSE_ALARM) / (2 * curve.examples[some]))
    assert np.all(off < limit)
    assert scores.calibration_error(p, labels) < 0.05 < scores.calibration_error(p, (labels + 1) % 3)


def test_foreign_examples_are_told_by_their_uncertainty() -> None:
    sure, unsure = predictions_of([[0.99, 0.01], [0.9, 0.1], [0.5, 0.5]]), predictions_of([[0.6, 0.4], [0.9, 0.1]])
    found = scores.out_of_distribution(sure, unsure)
    wanted = (2 + 1.5) / 6  # pairs that are told apart, ties half
    assert found == pytest.approx(dict.fromkeys(("entropy", "mutual_information", "max_probability"), wanted))
    inside, outside = RANDOM.normal(size=50), RANDOM.normal(size=70) + 1
    truth = np.repeat([0, 1], [50, 70])
    assert scores.auroc(inside, outside) == roc_auc_score(truth, np.concatenate([inside, outside]))
    assert scores.auroc(inside, outside) > 0.5 > scores.auroc(outside, inside)


# -- regression --------------------------------------------------------------------------------------------------------


def test_a_regression_whose_law_is_known() -> None:
    """y ~ N(0, sqrt(5)), predicted by draws N(theta, 2), theta ~ N(0, 1): covered as often as said."""
    theta = stats.norm.ppf((np.arange(400) + 0.5) / 400).reshape(2, 200)
    y = np.sqrt(5) * RANDOM.normal(size=4000)
    made = predict(lambda theta, x: (theta + x, 2.0), theta, np.zeros(4000), y, kind="regression")
    found = scores.regression(made, y)
    assert list(found) == ["rmse", "log_likelihood", "coverage_50", "coverage_90", "coverage_95"]
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean(y**2)), rel=1e-5)
    # The rule over 400 quantiles is off by 1/800 in P(Y <= y) at most, and by 1/400 of the density's largest value.
    exact = stats.norm.logpdf(y, 0, np.sqrt(5))
    assert found["log_likelihood"] == pytest.approx(exact.mean(), abs=0.01)
    for level in scores.LEVELS:
        low, high = (stats.binom.ppf(q, 4000, level) / 4000 for q in (FALSE_ALARM / 6, 1 - FALSE_ALARM / 6))
        assert low - 1 / 400 < found[f"coverage_{100 * level:g}"] < high + 1 / 400


def test_coverage_of_a_known_case() -> None:
    assert scores.coverage([0.01, 0.3, 0.5, 0.8, 0.97], 0.5) == 2 / 5
    assert scores.coverage([0.01, 0.3, 0.5, 0.8, 0.97], 0.95) == 4 / 5
    with pytest.raises(hk.ArgumentError, match="level: is 95"):
        scores.coverage([0.5], 95)


# -- convergence -------------------------------------------------------------------------------------------------------


def autoregression(phi: float, chains: int, draws: int, series: int) -> np.ndarray:
    """Stationary AR(1) series [chain, draw, series] of variance 1."""
    noise = RANDOM.normal(size=(chains, draws, series))
    noise[:, 1:] *= np.sqrt(1 - phi**2)
    for t in range(1, draws):
        noise[:, t] += phi * noise[:, t - 1]
    return noise


def slow_scores(values: np.ndarray) -> np.ndarray:
    """Of [chain, draw], by counting."""
    flat = values.ravel()
    ranks = np.array([np.sum(flat < v) + (np.sum(flat == v) + 1) / 2 for v in flat])
    return stats.norm.ppf((ranks - 3 / 8) / (flat.size + 1 / 4)).reshape(values.shape)


def slow_split(values: np.ndarray) -> np.ndarray:
    half = values.shape[1] // 2
    return np.array([part for chain in values for part in (chain[:half], chain[-half:])])


def slow_rhat(values: np.ndarray) -> float:
    """Vehtari et al. 2021, Eqs. 1-4, 14 and 15, and the folded draws of section 4.2."""
    found = []
    split = slow_split(values)
    for kind in (split, np.abs(split - np.median(split))):
        z = slow_scores(kind)
        n = z.shape[1]
        between, within = n * np.var(z.mean(1), ddof=1), np.mean([np.var(chain, ddof=1) for chain in z])
        found.append(np.sqrt(((n - 1) / n * within + between / n) / within))
    return max(found)


def slow_ess(values: np.ndarray) -> float:
    """Vehtari et al. 2021, Eqs. 10-13, with sums of autocorrelations as long as pairs are positive, and monotone."""
    z = slow_scores(slow_split(values))
    m, n = z.shape
    centred = z - z.mean(1, keepdims=True)
    covariance = [np.mean([chain[: n - t] @ chain[t:] / n for chain in centred]) for t in range(n)]
    within = covariance[0] * n / (n - 1)
    total = (n - 1) / n * within + np.var(z.mean(1), ddof=1)
    rho = [1.0] + [1 - (within - c) / total for c in covariance[1:]]
    time, least, pair = -1.0, np.inf, 0
    while pair < (n - 3) // 2 and rho[2 * pair] + rho[2 * pair + 1] >= 0:
        least = min(least, rho[2 * pair] + rho[2 * pair + 1])
        time += 2 * least
        pair += 1
    time += max(rho[2 * pair], 0)
    return m * n / max(time, 1 / np.log10(m * n))


@pytest.mark.parametrize("draws", [8, 9, 30, 101])
@pytest.mark.parametrize("phi", [0.0, 0.9, -0.6])
def test_diagnostics_as_written_in_the_paper(draws: int, phi: float) -> None:
    values = autoregression(phi, 3, draws, 4)
    values[..., 1] = np.round(values[..., 1])  # ties
    values[0, :, 2] += 2  # a chain elsewhere
    values[0, :, 3] *= 5  # a chain that is wider
    np.testing.assert_allclose(scores.rhat(values), [slow_rhat(v) for v in np.moveaxis(values, 2, 0)], rtol=1e-12)
    np.testing.assert_allclose(scores.ess(values), [slow_ess(v) for v in np.moveaxis(values, 2, 0)], rtol=1e-9)
    assert scores.rhat(values[..., 0]).shape == () and scores.ess(values[:, :, None, :2]).shape == (1, 2)


def test_diagnostics_of_arviz() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arviz = pytest.importorskip("arviz", reason="ArviZ is an extra, and is not installed")
    for draws, phi in ((21, 0.5), (200, 0.9), (1001, -0.7)):
        values = autoregression(phi, 4, draws, 3)
        values[0, :, 2] += 1
        each = np.moveaxis(values, 2, 0)
        np.testing.assert_allclose(scores.rhat(values), [float(arviz.rhat(v)) for v in each], rtol=1e-9)
        np.testing.assert_allclose(scores.ess(values), [float(arviz.ess(v, method="bulk")) for v in each], rtol=1e-9)


def test_the_effective_sample_size_of_an_autoregression() -> None:
    """S (1 - phi) / (1 + phi). Over 400 series the mean of S / ESS, the correlation time, has an error of sd / 20.

    Its bias: half chains of n = 1000 draws lose about time / n of theirs by their mean, made good by the variance
    between halves; the sum is cut where pairs first turn negative, at a noise of about sqrt(time / 8n), which leaves or
    adds a few terms of that size: together 2 % here.
    """
    for phi in (0.0, 0.6):
        values = autoregression(phi, 4, 2000, 400)
        times = 8000 / scores.ess(values)
        error = times.std(ddof=1) / 20
        wanted = (1 + phi) / (1 - phi)
        assert abs(times.mean() - wanted) < stats.norm.isf(FALSE_ALARM / 2) * error + 0.02 * wanted


def test_rhat_of_chains_that_never_meet() -> None:
    """Ranks are then known: a lower and an upper half of the normal scores, of mean -+m and variance 1 - m^2.

    m = sqrt(2 / pi); of four halves the means have the variance 4 m^2 / 3. Halves of 1000 draws are known to 1 / 30.
    """
    values = RANDOM.normal(size=(2, 2000))
    values[1] += 100
    m2 = 2 / np.pi
    assert scores.rhat(values) == pytest.approx(np.sqrt(1 + 4 / 3 * m2 / (1 - m2)), rel=0.01)


def test_rhat_sees_a_chain_that_is_wider() -> None:
    same = RANDOM.normal(size=(4, 1000))
    assert scores.rhat(same) < 1.01
    wide = same * np.array([[1.0], [1.0], [1.0], [4.0]])
    assert scores.rhat(wide) > 1.1


def test_values_that_say_nothing() -> None:
    values = RANDOM.normal(size=(2, 50, 3))
    values[0, 3, 1] = np.nan
    values[..., 2] = 1
    for diagnostic in (scores.rhat, scores.ess):
        assert np.isnan(diagnostic(values)).tolist() == [False, True, True]
        with pytest.raises(hk.ArgumentError, match="8 draws or more"):
            diagnostic(values[:, :7])


# -- of runs -----------------------------------------------------------------------------------------------------------

X = RANDOM.normal(size=(30, 2)).astype(np.float32)
Y = (X @ np.array([2.0, -1.0]) + RANDOM.logistic(size=30) > 0).astype(int)


def logits(params: Any, x: jax.Array) -> jax.Array:
    return jnp.stack([jnp.zeros(len(x)), x @ params], 1)


def run_of(coupling: Any, steps: int = 4000) -> hk.Run:
    target = hk.Target(
        lambda w, batch: -jax.nn.softplus((1 - 2 * batch[1]) * (batch[0] @ w)), lambda w: -0.5 * jnp.sum(w**2), (X, Y)
    )
    return hk.sample(
        target,
        lambda key: jax.random.normal(key, (2,)),
        dynamics=hk.SGHMC(0.1),
        coupling=coupling,
        num_steps=steps,
        warmup=steps // 4,
        thin=10,
        progress=False,
    )


@pytest.fixture(scope="module")
def run() -> hk.Run:
    return run_of(hk.Independent())


def test_a_run_that_has_converged(run: hk.Run) -> None:
    """ESS is that of each example; of 1200 draws at every tenth step more than 100 count, and R-hat is near 1."""
    found = scores.convergence(run, run.predict(logits, X, Y, per_example=True))
    assert found.rhat.shape == found.ess.shape == (30,)
    assert found.ess.min() > 100 and found.rhat.max() < 1.05
    single = scores.convergence(run, run.predict(logits, X, Y))
    assert single.rhat.shape == () and single.rhat < 1.05


def test_missing_draws_are_left_out(run: hk.Run) -> None:
    draws = np.array(run.draws)
    whole = scores.convergence(run, predict(logits, draws[:3, :200], X, Y, per_example=True))
    draws[3], draws[1, 200:] = np.nan, np.nan
    part = scores.convergence(run, predict(logits, draws, X, Y, per_example=True))
    np.testing.assert_array_equal(whole.rhat, part.rhat)
    np.testing.assert_array_equal(whole.ess, part.ess)


def test_coupled_chains_are_warned_of(run: hk.Run) -> None:
    coupled = run_of(hk.Elastic(1.0), steps=400)
    made = coupled.predict(logits, X, Y, per_example=True)
    with pytest.warns(hk.HookeanWarning, match="R-hat between coupled chains is meaningless"):
        scores.convergence(coupled, made)
    released = run_of(hk.Elastic(1.0, schedule=hk.release()), steps=400)
    scores.convergence(released, released.predict(logits, X, Y))  # warnings are errors


def test_bad_arguments_are_named(run: hk.Run) -> None:
    classes = run.predict(logits, X)
    numbers = dataclasses.replace(classes, kind="regression")
    for call, message in (
        (lambda: scores.convergence(run, classes), "without y"),
        (lambda: scores.regression(classes, Y), "of a classification"),
        (lambda: scores.regression(numbers, Y), "without y"),
        (lambda: scores.classification(numbers, Y), "of a regression"),
        (lambda: scores.out_of_distribution(classes, numbers), "of a regression"),
        (lambda: scores.nll(classes.mean[:, 0], Y), r"probabilities: have shape \(30,\)"),
        (lambda: scores.nll(classes.mean, Y[1:]), r"labels: have shape \(29,\)"),
        (lambda: scores.brier(classes.mean, Y * 1.0), "type float64"),
        (lambda: scores.accuracy(classes.mean, Y + 1), "from 0 to 1"),
        (lambda: scores.reliability(classes.mean, Y, 0), "bins: is 0"),
    ):
        with pytest.raises(hk.ArgumentError, match=message):
            call()
