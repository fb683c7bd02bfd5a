"""Predictions of a posterior: averages over draws, and where their uncertainty comes from.

    p(y | x) = mean over draws of p(y | x, theta)

    classification   H[mean p] = mean of H[p]  + mutual information of y and theta
    regression       Var[y]    = mean of sd^2  + variance of the means
                     total     = aleatoric     + epistemic            (Depeweg et al. 2018)

Draws and examples pass through in blocks, so that memory holds one block of each and what is returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm

from hookean.tree import leaf_names, tree_map
from hookean.types import ArgumentError, Batch, Params, check_count, in_one_line

Apply = Callable[[Params, Batch], Any]
"""(params, x) -> logits [B, classes], or for regression a pair (mean, sd) of arrays [B], where sd may be a number."""

Kind = Literal["classification", "regression"]

MOST_BYTES = 2**30
"""What log-probabilities of every draw and example may take."""


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What all draws together say about N examples, each draw with the same weight.

    Attributes:
        kind: "classification" or "regression".
        mean: probabilities [N, classes], or predictive means [N].
        by_chain: the same for each chain alone, [chain, N, classes] or [chain, N]; NaN for a chain without draws.
        aleatoric: [N], the uncertainty that stays when theta is known: expected entropy in nats, or mean of sd^2.
        epistemic: [N], the uncertainty about theta: mutual information in nats, or variance of the means.
        used: [chain], draws that count.
        missing: draws that are NaN, because their workers were lost or late; they are left out.
        log_score: [N], log p(y | x) of the given y under the average over draws; None without y.
        log_probabilities: [chain, draw], log p(y | x, theta) averaged over the examples, or [chain, draw, N] for each
            of them where that was asked for; NaN for a missing draw; None without y.
        distribution_at_y: regression, [N]: P(Y <= y) under the average over draws, uniform if all is well calibrated;
            None without y.
    """

    kind: Kind
    mean: np.ndarray
    by_chain: np.ndarray
    aleatoric: np.ndarray
    epistemic: np.ndarray
    used: np.ndarray
    missing: int
    log_score: np.ndarray | None = None
    log_probabilities: np.ndarray | None = None
    distribution_at_y: np.ndarray | None = None

    @property
    def total(self) -> np.ndarray:
        """[N], all uncertainty: entropy of the mean probabilities, or predictive variance."""
        return self.aleatoric + self.epistemic

    @property
    def sd(self) -> np.ndarray:
        """[N], predictive standard deviation of a regression."""
        if self.kind != "regression":
            raise AttributeError("sd: a classification has none; see `total`, `aleatoric` and `epistemic`")
        return np.sqrt(self.total)


class Block(NamedTuple):
    """What D draws of one chain say about B examples. Examples are the last axis; sums go over the draws there are.

    Attributes:
        good: [D, B], whether the prediction is a number.
        first: sum of p [classes, B], or of the means [B].
        second: [B], sum of squares of the means about their mean in the block.
        aleatoric: [B], sum of entropies or variances.
        each: [D, B], log-probability of y.
        score: [B], logarithm of the sum of its exponential.
        below: [B], sum of P(Y <= y | theta).
    """

    good: jax.Array
    first: jax.Array
    second: jax.Array
    aleatoric: jax.Array
    each: jax.Array
    score: jax.Array
    below: jax.Array


def predict(
    apply: Apply,
    draws: Params,
    x: Batch,
    y: Any = None,
    *,
    kind: Kind = "classification",
    batch_size: int = 512,
    draws_at_once: int = 16,
    per_example: bool = False,
) -> Predictions:
    """Average the predictions of all draws. Nothing is changed, no random number is drawn.

    Args:
        apply: what the model says: a JAX function (params, x) -> logits [B, classes]; for a regression it gives a pair
            (mean, sd), each an array [B], in the units of y; sd may be one number for all. An example's prediction must
            not depend on the others in its batch.
        draws: a pytree with leaves [chain, draw, ...], as `run.draws`. Leaves may be lazy (Zarr, memory maps): they are
            read as `leaf[chain, a:b]`. A draw with a NaN is missing, and is left out and counted.
        x: inputs, an array or a pytree of arrays with a common leading axis; they are read as `leaf[a:b]`.
        y: what was observed there: classes 0, 1, ... or numbers [N]. Needed for scores.
        kind: "classification" or "regression".
        batch_size: examples that are worked on at once.
        draws_at_once: draws that are worked on at once; fewer for large models.
        per_example: keep log-probabilities [chain, draw, N], not only their mean over the examples.

    Raises:
        ArgumentError: an argument cannot work, or no draw is there.
    """
    if kind not in ("classification", "regression"):
        raise ArgumentError("kind", f"is {kind!r}", 'Choose "classification" or "regression"')
    if not callable(apply):
        raise ArgumentError("apply", f"is {apply!r}, not a function", "Give a function (params, x)")
    batch_size, draws_at_once = check_count("batch_size", batch_size), check_count("draws_at_once", draws_at_once)
    # Slices of a JAX array would be compiled one by one; other arrays stay where they are until they are read.
    draws, x = (tree_map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, t) for t in (draws, x))
    chains, length = _checked_draws(draws)
    size = _checked_inputs(x)
    batch_size, draws_at_once = min(batch_size, size), min(draws_at_once, length)
    shape = _checked_apply(apply, draws, x, kind, batch_size)
    observed = None if y is None else _checked_observations(y, kind, size, shape)
    if per_example and observed is None:
        raise ArgumentError("per_example", "is True without y", "Give y too: log-probabilities are those of y")
    if per_example and 4 * chains * length * size > MOST_BYTES:
        raise ArgumentError(
            "per_example",
            f"would keep {chains} x {length} x {size} log-probabilities",
            f"Give fewer examples: at most {MOST_BYTES // (4 * chains * length)} here",
        )
    one_block = jax.jit(_classify(apply) if kind == "classification" else _regress(apply))
    there = jax.jit(_there)

    first, aleatoric, below = np.zeros((chains, size, *shape)), np.zeros(size), np.zeros(size)
    second, score = np.zeros(size), np.full(size, -np.inf)
    used = np.zeros(chains, int)
    each = np.full((chains, length, size) if per_example else (chains, length), np.nan, np.float32)
    for chain in range(chains):
        for begin in range(0, length, draws_at_once):
            params = _rows(draws, begin, draws_at_once, chain)
            valid = np.asarray(there(params)) & (np.arange(begin, begin + draws_at_once) < length)
            which, before, count = begin + np.flatnonzero(valid), int(used.sum()), int(valid.sum())
            if count == 0:
                continue
            sums = np.zeros(count)
            for start in range(0, size, batch_size):
                part = slice(start, min(start + batch_size, size))
                seen = None if observed is None else _padded(observed[part], batch_size)
                block = jax.device_get(one_block(params, valid, _rows(x, start, batch_size), seen))
                block = tree_map(lambda leaf, width=part.stop - start: leaf[..., :width], block)
                good = np.all(block.good, 1)
                if not np.all(good):
                    raise _bad_prediction(chain, begin + int(np.argmin(good)), kind)
                if kind == "regression":  # squares of blocks, each about its own mean, put together
                    off = block.first / count - first[:, part].sum(0) / max(before, 1)
                    second[part] += block.second + off**2 * before * count / (before + count)
                first[chain, part] += np.moveaxis(block.first, -1, 0)
                aleatoric[part] += block.aleatoric
                score[part] = np.logaddexp(score[part], block.score)
                below[part] += block.below
                if per_example:
                    each[chain, which, part] = block.each[valid]
                sums += np.sum(block.each[valid], 1, dtype=float)
            used[chain] += count
            if not per_example:
                each[chain, which] = sums / size

    total = int(used.sum())
    if total == 0:
        raise ArgumentError("draws", "every one is missing (NaN)", "Predict from a run that kept some")
    with np.errstate(invalid="ignore"):
        by_chain = first / used.reshape(-1, *(1,) * (first.ndim - 1))
    mean, aleatoric = first.sum(0) / total, aleatoric / total
    # Mutual information is not negative (Jensen); rounding may make it so.
    epistemic = second / total if kind == "regression" else np.maximum(_entropy(mean) - aleatoric, 0.0)
    predictions = Predictions(kind, mean, by_chain, aleatoric, epistemic, used, chains * length - total)
    if observed is None:
        return predictions
    predictions = dataclasses.replace(predictions, log_score=score - np.log(total), log_probabilities=each)
    return dataclasses.replace(predictions, distribution_at_y=below / total) if kind == "regression" else predictions


# -- one block on the device -------------------------------------------------------------------------------------------


def _there(params: Params) -> jax.Array:
    """Which draws have no NaN."""
    masks = [~jnp.any(jnp.isnan(leaf.reshape(len(leaf), -1)), 1) for leaf in jax.tree.leaves(params)]
    return jnp.all(jnp.stack(masks), 0)


def _over(valid: jax.Array, values: jax.Array) -> jax.Array:
    """Sum over the draws that are there."""
    return jnp.sum(jnp.where(jnp.reshape(valid, (-1,) + (1,) * (values.ndim - 1)), values, 0), 0)


def _score(valid: jax.Array, each: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(jnp.where(valid[:, None], each, -jnp.inf), axis=0)


def _classify(apply: Apply) -> Callable[..., Block]:
    def block(params: Params, valid: jax.Array, x: Batch, y: jax.Array | None) -> Block:
        logits = jax.vmap(lambda theta: apply(theta, x))(params)
        logs = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), -1)
        p = jnp.exp(logs)
        entropy = -jnp.sum(jnp.where(p > 0, p * logs, 0), -1)
        each = jnp.zeros_like(entropy) if y is None else jnp.take_along_axis(logs, y[None, :, None], -1)[..., 0]
        # Asked of the logits: compiled for a CPU, the exponential of NaN may be 0.
        number = ~jnp.any(jnp.isnan(logits), -1) & jnp.isfinite(jnp.max(logits, -1))
        good = number | ~valid[:, None]
        nothing = jnp.zeros_like(entropy[0])
        first = _over(valid, p).T
        return Block(good, first, nothing, _over(valid, entropy), each, _score(valid, each), nothing)

    return block


def _regress(apply: Apply) -> Callable[..., Block]:
    def block(params: Params, valid: jax.Array, x: Batch, y: jax.Array | None) -> Block:
        def one(theta: Params) -> tuple[jax.Array, jax.Array]:
            mean, sd = apply(theta, x)
            exact = jnp.promote_types(jnp.result_type(mean, sd), jnp.float32)
            return jnp.asarray(mean, exact), jnp.broadcast_to(jnp.asarray(sd, exact), jnp.shape(mean))

        mean, sd = jax.vmap(one)(params)
        good = (jnp.isfinite(mean) & jnp.isfinite(sd) & (sd > 0)) | ~valid[:, None]
        first = _over(valid, mean)
        second = _over(valid, (mean - first / jnp.sum(valid)) ** 2)
        each, below = jnp.zeros_like(mean), jnp.zeros_like(mean)
        if y is not None:
            each, below = norm.logpdf(y, mean, sd), norm.cdf(y, mean, sd)
        return Block(good, first, second, _over(valid, sd**2), each, _score(valid, each), _over(valid, below))

    return block


def _entropy(p: np.ndarray) -> np.ndarray:
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), -1)


# -- reading -----------------------------------------------------------------------------------------------------------


def _padded(array: Any, length: int) -> np.ndarray:
    """`array` with its last row repeated up to `length`, so that all blocks have one shape."""
    array = np.asarray(array)
    return array if len(array) == length else np.concatenate([array, np.repeat(array[-1:], length - len(array), 0)])


def _rows(tree: Any, begin: int, length: int, *before: int) -> Any:
    """Rows begin, begin + 1, ... of every leaf (of its part `before`), as NumPy arrays of `length` rows."""
    return tree_map(lambda leaf: _padded(leaf[(*before, slice(begin, begin + length))], length), tree)


# -- checks ------------------------------------------------------------------------------------------------------------


def _checked_draws(draws: Params) -> tuple[int, int]:
    shapes = dict(zip(leaf_names(draws), (tuple(np.shape(leaf)) for leaf in jax.tree.leaves(draws)), strict=True))
    remedy = "Give a pytree with leaves [chain, draw, ...], such as run.draws"
    if not shapes:
        raise ArgumentError("draws", "has no leaves", remedy)
    first = next(iter(shapes.values()))[:2]
    for name, shape in shapes.items():
        if len(shape) < 2 or shape[:2] != first:
            raise ArgumentError("draws", f"leaf {name!r} has shape {shape}", remedy)
    if 0 in first:
        raise ArgumentError("draws", "no draw was kept", "Predict from a run that kept some")
    return first


def _checked_inputs(x: Batch) -> int:
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(x)}
    if len(lengths) != 1 or lengths in ({()}, {(0,)}):
        raise ArgumentError("x", "has no common leading axis", "Give arrays with a row for each example, one or more")
    return int(lengths.pop()[0])


def _checked_apply(apply: Apply, draws: Params, x: Batch, kind: Kind, batch_size: int) -> tuple[int, ...]:
    """Shape of one example's average: (classes,) or (). Nothing is computed."""

    def like(leaf: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))

    theta = tree_map(lambda leaf: like(leaf, *leaf.shape[2:]), draws)
    batch = tree_map(lambda leaf: like(leaf, batch_size, *leaf.shape[1:]), x)
    try:
        given = jax.eval_shape(apply, theta, batch)
    except Exception as error:
        raise ArgumentError(
            "apply", f"failed ({in_one_line(error)})", "Give a JAX function of one draw's parameters and a batch of x"
        ) from error
    if kind == "classification":
        if not isinstance(given, jax.ShapeDtypeStruct) or len(given.shape) != 2 or given.shape[0] != batch_size:
            raise ArgumentError(
                "apply",
                f"gives {_shapes(given)} for a batch of {batch_size} examples",
                'Return logits [B, classes] (of two classes too), or say kind="regression"',
            )
        return given.shape[1:]
    if not _is_pair(given, batch_size):
        raise ArgumentError(
            "apply",
            f"gives {_shapes(given)} for a batch of {batch_size} examples",
            "Return a pair (mean, sd) of arrays [B]; sd may be one number",
        )
    return ()


def _is_pair(given: Any, batch_size: int) -> bool:
    leaves = jax.tree.leaves(given)
    return (
        isinstance(given, tuple | list)
        and len(given) == len(leaves) == 2
        and leaves[0].shape == (batch_size,)
        and leaves[1].shape in ((), (batch_size,))
    )


def _shapes(given: Any) -> str:
    shapes = [str(leaf.shape) for leaf in jax.tree.leaves(given)]
    return f"shape {shapes[0]}" if len(shapes) == 1 else f"arrays of shapes {', '.join(shapes) or 'none'}"


def _checked_observations(y: Any, kind: Kind, size: int, shape: tuple[int, ...]) -> np.ndarray:
    y = np.asarray(y)
    if y.shape != (size,):
        raise ArgumentError("y", f"has shape {y.shape}, with {size} examples", f"Give an array of shape {(size,)}")
    if kind == "regression":
        if not np.all(np.isfinite(y)):
            raise ArgumentError("y", "has NaN or Inf", "Give finite numbers")
        return y.astype(jnp.result_type(float))
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= shape[0]:
        raise ArgumentError("y", "is not made of classes", f"Give integers from 0 to {shape[0] - 1}, as many as logits")
    return y.astype(np.int32)


def _bad_prediction(chain: int, draw: int, kind: Kind) -> ArgumentError:
    logits, numbers = "logits that are NaN or infinite", "a mean or sd that is not finite, or no sd above 0"
    what = logits if kind == "classification" else numbers
    return ArgumentError("apply", f"gives {what}, from draw {draw} of chain {chain}", "Mend it where that happens")
