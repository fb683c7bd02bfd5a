"""Predictions: against sums over all draws at once, and against closed forms."""

from __future__ import annotations

import copy
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax, logsumexp

import hookean as hk
from hookean import predict as module
from hookean.predict import Predictions, predict

RANDOM = np.random.default_rng(0)
CHAINS, DRAWS, N, CLASSES = 3, 21, 23, 4


def linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["w"] + params["b"]


def gaussian(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (x @ params["w"])[:, 0] + 100.0, jnp.exp(params["b"][0] + 0.1 * x[:, 0])


def draws_of(missing: bool = True) -> dict[str, np.ndarray]:
    draws = {
        "w": RANDOM.normal(size=(CHAINS, DRAWS, 5, CLASSES)).astype(np.float32),
        "b": RANDOM.normal(size=(CHAINS, DRAWS, CLASSES)).astype(np.float32),
    }
    if missing:
        draws["w"][0, 15:], draws["b"][0, 15:] = np.nan, np.nan  # a worker that was lost
        draws["b"][1, 3, 2] = np.nan
    return draws


X = RANDOM.normal(size=(N, 5)).astype(np.float32)
LABELS = RANDOM.integers(0, CLASSES, N)
Y = 100 + RANDOM.normal(size=N)
BLOCKS = [(N, DRAWS), (7, 4), (1, 1), (1000, 1000)]


def close(found: Any, wanted: Any, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


# -- against all draws at once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "draws_at_once"), BLOCKS)
def test_classes_as_from_all_draws_at_once(batch_size: int, draws_at_once: int) -> None:
    draws = draws_of()
    options: dict[str, Any] = {"batch_size": batch_size, "draws_at_once": draws_at_once}
    found = predict(linear, draws, X, LABELS, per_example=True, **options)
    logs = log_softmax(
        np.einsum("ni,cdik->cdnk", X, draws["w"].astype(float)) + draws["b"][:, :, None], -1
    )  # [chain, draw, N, class], what the library never forms
    p = np.exp(logs)
    close(found.mean, np.nanmean(p, (0, 1)))
    close(found.by_chain, np.nanmean(p, 1))
    close(found.aleatoric, np.nanmean(-np.sum(p * logs, -1), (0, 1)))
    close(found.total, stats.entropy(np.nanmean(p, (0, 1)), axis=-1))
    assert found.used.tolist() == [15, 20, 21] and found.missing == 7
    each = np.take_along_axis(logs, LABELS[None, None, :, None], -1)[..., 0]
    close(found.log_probabilities, each)
    close(found.log_score, logsumexp(np.where(np.isnan(each), -np.inf, each), (0, 1)) - np.log(56))
    close(found.log_score, np.log(found.mean[np.arange(N), LABELS]))
    assert found.distribution_at_y is None
    mean_only = predict(linear, draws, X, LABELS, **options)
    assert mean_only.log_probabilities is not None
    close(mean_only.log_probabilities, each.mean(2))
    unlabelled = predict(linear, draws, X, **options)
    np.testing.assert_array_equal(unlabelled.mean, found.mean)
    assert unlabelled.log_score is None and unlabelled.log_probabilities is None


@pytest.mark.parametrize(("batch_size", "draws_at_once"), BLOCKS)
def test_numbers_as_from_all_draws_at_once(batch_size: int, draws_at_once: int) -> None:
    draws = draws_of()
    found = predict(
        gaussian, draws, X, Y, kind="regression", batch_size=batch_size, draws_at_once=draws_at_once, per_example=True
    )
    mean = np.einsum("ni,cdi->cdn", X, draws["w"][..., 0].astype(float)) + 100
    sd = np.exp(draws["b"][:, :, None, 0] + 0.1 * X[:, 0])
    missing = np.isnan(draws["w"]).any((2, 3)) | np.isnan(draws["b"]).any(2)
    mean[missing], sd[missing] = np.nan, np.nan
    close(found.mean, np.nanmean(mean, (0, 1)))
    close(found.by_chain, np.nanmean(mean, 1))
    close(found.aleatoric, np.nanmean(sd**2, (0, 1)))
    # Means of about 100 have an error of 100 * 2^-24 in float32; so have, about, their deviations.
    close(found.epistemic, np.nanvar(mean, (0, 1)), 1e-4)
    close(found.sd, np.sqrt(found.aleatoric + found.epistemic))
    each = stats.norm.logpdf(Y, mean, sd)
    close(found.log_probabilities, each, 1e-3)
    close(found.log_score, logsumexp(np.where(np.isnan(each), -np.inf, each), (0, 1)) - np.log(56), 1e-3)
    close(found.distribution_at_y, np.nanmean(stats.norm.cdf(Y, mean, sd), (0, 1)), 1e-4)
    with pytest.raises(AttributeError, match="classification"):
        _ = predict(linear, draws, X).sd


# -- closed forms ------------------------------------------------------------------------------------------------------


def test_draws_that_agree_are_not_uncertain_and_draws_that_contradict_are() -> None:
    """Two certain draws that disagree: all of log 2 is mutual information. Draws without opinion: none of it."""
    certain = np.array([[[50.0, -50.0], [-50.0, 50.0]]])  # [chain, draw, class]
    found = predict(lambda b, x: x + b, certain, np.zeros((3, 2)))
    close(found.mean, np.full((3, 2), 0.5))
    close(found.epistemic, np.full(3, np.log(2)))
    close(found.aleatoric, np.zeros(3))
    found = predict(lambda b, x: x + 0 * b, certain, np.zeros((3, 2)))
    close(found.epistemic, np.zeros(3))
    close(found.aleatoric, np.full(3, np.log(2)))
    assert np.all(found.epistemic >= 0)


def test_a_class_of_probability_0_has_entropy_0_and_an_infinite_score() -> None:
    found = predict(lambda b, x: x + b, np.array([[[0.0, -np.inf]]]), np.zeros((2, 2)), np.array([0, 1]))
    assert found.total.tolist() == [0, 0] and found.log_score is not None
    assert found.log_score.tolist() == [0, -np.inf]


def test_probabilities_too_small_for_float32_keep_their_score() -> None:
    found = predict(lambda b, x: x + b, np.array([[[0.0, -300.0], [0.0, -400.0]]]), np.zeros((1, 2)), np.array([1]))
    close(found.log_score, [-300 - np.log(2)])


def test_the_predictive_law_of_a_conjugate_model() -> None:
    """theta ~ N(0, 3), y ~ N(theta, 2): y ~ N(0, sqrt(13)).

    Draws are the quantiles at (i + 1/2)/n: sums over them are midpoint rules, whose error in a mean of f is at most
    |f|'s total variation over 2n: 1/2n for P(Y <= y), max f / n for the density. theta^2 has unbounded variation; of
    its mean 9 the tails beyond the first and last quantile keep at most 9 * 2 * integral of z^2 over a tail of 1/2n.
    """
    n = 20_000
    theta = 3 * stats.norm.ppf((np.arange(n) + 0.5) / n).reshape(4, -1)
    y = np.array([-4.0, 0.0, 1.0, 7.0])
    found = predict(
        lambda theta, x: (theta + x, jnp.asarray(2.0)), theta, np.zeros(4), y, kind="regression", draws_at_once=500
    )
    assert found.log_score is not None
    wanted = stats.norm(0, np.sqrt(13))
    rounding = 2e-6
    assert np.abs(found.distribution_at_y - wanted.cdf(y)).max() < 1 / (2 * n) + rounding
    assert np.abs(np.exp(found.log_score) - wanted.pdf(y)).max() < stats.norm.pdf(0) / 2 / n + rounding
    close(found.aleatoric, np.full(4, 4.0))
    z = stats.norm.isf(0.5 / n)
    assert np.abs(found.epistemic - 9).max() < 9 * 2 * (z * stats.norm.pdf(z) + 0.5 / n) + 10 * rounding


# -- where draws lie ---------------------------------------------------------------------------------------------------


class Lazy:
    """An array on a disk, say: it is read in slices, and says how large they were."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.largest = array, 0
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self._array[index]
        self.largest = max(self.largest, part.size)
        return part

    def __array__(self, *arguments: Any, **options: Any) -> np.ndarray:
        raise AssertionError("read whole")


def test_lazy_arrays_are_read_in_slices() -> None:
    draws = draws_of()
    lazy = {name: Lazy(leaf) for name, leaf in draws.items()}
    x = Lazy(X)
    found = predict(linear, lazy, x, LABELS, batch_size=6, draws_at_once=5)
    assert lazy["w"].largest == 5 * 5 * CLASSES and lazy["b"].largest == 5 * CLASSES and x.largest == 6 * 5
    np.testing.assert_array_equal(found.mean, predict(linear, draws, X, batch_size=6, draws_at_once=5).mean)


def test_memory_holds_blocks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array on the device is larger than a block, and one shape is compiled whatever is left over at the end."""
    sizes: list[int] = []
    traced: list[Any] = []

    def watched(tree: Any) -> Any:
        sizes.extend(leaf.size for leaf in jax.tree.leaves(tree))
        return jax.tree.map(np.asarray, tree)

    monkeypatch.setattr(module.jax, "device_get", watched)

    def counted(params: Any, x: jax.Array) -> jax.Array:
        traced.append(x.shape)
        return linear(params, x)

    predict(counted, draws_of(), X, LABELS, batch_size=6, draws_at_once=5, per_example=True)
    assert max(sizes) == max(5 * 6, 6 * CLASSES)
    assert traced == [(6, 5)] * 2  # once for its shape, once compiled


def test_inputs_may_be_a_tree_and_parameters_of_low_precision() -> None:
    draws = draws_of(missing=False)
    tree = {"left": X[:, :2], "right": X[:, 2:]}

    def apply(params: Any, x: Any) -> jax.Array:
        return linear(params, jnp.concatenate([x["left"], x["right"]], 1))

    wanted = predict(linear, draws, X)
    close(predict(apply, draws, tree).mean, wanted.mean)
    coarse = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), draws)
    found = predict(linear, coarse, jnp.asarray(X, jnp.bfloat16))
    close(found.mean.sum(1), np.ones(N), 1e-6)  # the softmax is not of low precision
    assert np.abs(found.mean - wanted.mean).max() < 0.02


# -- what a user may do wrong ------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {"apply": linear, "draws": draws_of(), "x": X, "y": LABELS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "ranking"}, "kind: is 'ranking'"),
        ({"apply": 3}, "apply: is 3, not a function"),
        ({"batch_size": 0}, "batch_size: is 0"),
        ({"draws_at_once": 1.5}, "draws_at_once: is 1.5"),
        ({"draws": {}}, "draws: has no leaves"),
        ({"draws": {"w": np.zeros((3, 4, 5)), "b": np.zeros((3, 6))}}, r"draws: leaf 'w' has shape \(3, 4, 5\)"),
        ({"draws": np.zeros(3)}, r"leaf 'params' has shape \(3,\)"),
        ({"draws": np.zeros((2, 0, 3))}, "no draw was kept"),
        ({"draws": jax.tree.map(lambda leaf: leaf * np.nan, draws_of())}, r"every one is missing \(NaN\)"),
        ({"x": {"a": X, "b": X[1:]}}, "x: has no common leading axis"),
        ({"x": X[:0], "y": LABELS[:0]}, "x: has no common leading axis"),
        ({"x": np.zeros(())}, "x: has no common leading axis"),
        ({"x": X[:, :4]}, "apply: failed"),
        ({"apply": lambda w, x: linear(w, x)[:, 0]}, r"gives shape \(23,\) for a batch of 23 .* Return logits"),
        ({"apply": lambda w, x: linear(w, x)[0]}, r"gives shape \(4,\)"),
        ({"apply": gaussian}, r"arrays of shapes \(23,\), \(23,\).*regression"),
        ({"kind": "regression"}, r"shape \(23, 4\).*pair \(mean, sd\)"),
        ({"kind": "regression", "apply": lambda w, x: (linear(w, x), 1.0)}, "pair"),
        ({"y": LABELS[1:]}, r"y: has shape \(22,\), with 23 examples"),
        ({"y": LABELS + 1}, "y: is not made of classes.*0 to 3"),
        ({"y": LABELS * 1.0}, "y: is not made of classes"),
        ({"kind": "regression", "apply": gaussian, "y": np.where(LABELS > 1, np.nan, 1)}, "y: has NaN"),
        ({"y": None, "per_example": True}, "per_example: is True without y"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments = {**GOOD, **changes}
    with pytest.raises(hk.ArgumentError, match=message):
        predict(arguments.pop("apply"), arguments.pop("draws"), arguments.pop("x"), arguments.pop("y"), **arguments)


def test_too_many_log_probabilities_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 4 * CHAINS * DRAWS * 10)
    with pytest.raises(hk.ArgumentError, match="at most 10 here"):
        predict(linear, draws_of(), X, LABELS, per_example=True)
    predict(linear, draws_of(), X[:10], LABELS[:10], per_example=True)


def test_a_prediction_that_is_no_number_is_found() -> None:
    draws = draws_of(missing=False)
    draws["b"][1, 13, 0] = 1e38
    with pytest.raises(hk.ArgumentError, match="NaN or infinite, from draw 13 of chain 1"):
        predict(lambda w, x: x + jnp.where(w["b"][0] > 1e37, jnp.nan, 0), draws, X, draws_at_once=4)
    with pytest.raises(hk.ArgumentError, match="NaN or infinite, from draw 13 of chain 1"):
        predict(lambda w, x: x * 0 + 1e30 * w["b"][0], draws, X, draws_at_once=4)
    with pytest.raises(hk.ArgumentError, match="no sd above 0, from draw 13 of chain 1"):
        predict(lambda w, x: (x[:, 0], 1e38 - w["b"][0]), draws, X, kind="regression", draws_at_once=4)


# -- of a run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> hk.Run:
    def log_likelihood(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        return jnp.take_along_axis(jax.nn.log_softmax(linear(params["layers"][0], x)), y[:, None], 1)[:, 0]

    target = hk.Target(
        log_likelihood, lambda p: -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)), (X, LABELS)
    )
    start = {"layers": [{"w": jnp.zeros((5, CLASSES)), "b": jnp.zeros(CLASSES)}]}
    return hk.sample(target, start, dynamics=hk.SGHMC(0.05), chains=2, num_steps=60, warmup=20, thin=4, progress=False)


def test_predicting_does_not_touch_the_chains(run: hk.Run) -> None:
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), (run.draws, run.stats, run.info["final"]))
    settings = copy.copy(run.config)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        return linear(params["layers"][0], x)

    found = run.predict(apply, X, LABELS, batch_size=8)
    assert isinstance(found, Predictions) and found.used.tolist() == [10, 10]
    twice = run.predict(apply, X, LABELS, batch_size=8)
    np.testing.assert_array_equal(found.mean, twice.mean)
    after = (run.draws, run.stats, run.info["final"])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.dtype == new.dtype and old.tobytes() == np.asarray(new).tobytes()
    assert run.config == settings


class Recorder(SimpleNamespace):
    """What an ArviZ would be given."""


def as_of_old(posterior: Any = None, *, sample_stats: Any = None, coords: Any = None, attrs: Any = None) -> Recorder:
    return Recorder(posterior=posterior, sample_stats=sample_stats, coords=coords, attrs=attrs)


def as_of_now(data: Any, *, name: Any = None, coords: Any = None, attrs: Any = None) -> Recorder:
    return Recorder(**data, coords=coords, attrs=attrs["/"])


@pytest.mark.parametrize("from_dict", [as_of_old, as_of_now])
def test_what_arviz_is_given(run: hk.Run, monkeypatch: pytest.MonkeyPatch, from_dict: Any) -> None:
    monkeypatch.setitem(sys.modules, "arviz", SimpleNamespace(from_dict=from_dict))
    given = run.to_arviz()
    assert set(given.posterior) == {"layers.0.w", "layers.0.b"} and set(given.sample_stats) == set(run.stats)
    np.testing.assert_array_equal(given.posterior["layers.0.w"], run.draws["layers"][0]["w"])
    assert given.coords["draw"].tolist() == list(range(24, 61, 4)) and given.coords["chain"].tolist() == [0, 1]
    assert given.attrs["inference_library"] == "hookean" and "SGHMC" in given.attrs["dynamics"]


def test_names_that_fall_together_are_refused(run: hk.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz", SimpleNamespace(from_dict=as_of_now))
    twins = {"a": {"b": np.zeros((2, 10))}, "a.b": np.zeros((2, 10))}
    with pytest.raises(hk.HookeanError, match=r"one name, of a\.b, a\.b"):
        hk.Run(twins, run.stats, run.info, run.config, run.job).to_arviz()


def test_arviz_itself(run: hk.Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arviz = pytest.importorskip("arviz", reason="ArviZ is an extra, and is not installed")
    data = run.to_arviz()
    assert data.posterior["layers.0.w"].dims[:2] == ("chain", "draw")
    np.testing.assert_array_equal(data.posterior["layers.0.b"].values, run.draws["layers"][0]["b"])
    assert data.posterior.draw.values.tolist() == list(range(24, 61, 4))
    assert data.sample_stats["potential"].shape == (2, 10)
    assert np.all(np.isfinite(arviz.rhat(data)["layers.0.b"].values))


def test_without_arviz_its_extra_is_named(run: hk.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(hk.HookeanError, match="extra `arviz`"):
        run.to_arviz()
