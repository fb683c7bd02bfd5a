"""What is sampled: a posterior given by data, a likelihood and a prior, or any log density.

    U(theta)  = - sum over all N examples of log p(x | theta) - log p(theta)
    U~(theta) = - (N / |B|) sum over a batch B of log p(x | theta) - log p(theta)        unbiased

The factor N / |B| is the library's own: a user gives the log-likelihood of each example, never a scaled loss.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Self

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from hookean.random import shuffled
from hookean.tree import first_leaf, leaf_names, tree_map
from hookean.types import ArgumentError, Batch, HookeanError, Params

Batches = Iterable[Batch] | Callable[[int], Iterable[Batch]]
"""Batches that can be gone through again and again, or a function chain -> such batches."""


class Target:
    """A posterior.

    Args:
        log_likelihood: function (params, batch) -> array [B], the log-likelihood of each example of the batch, which
            has the structure of `data`.
        log_prior: function params -> scalar, the log density of the prior up to a constant.
        data: a pytree of arrays with one leading axis, the examples.
        batch_size: examples in a batch; None for all, at every step.
        batching: "replacement" draws each example of a batch at random; "epochs" goes through reshuffled data.
    """

    def __init__(
        self,
        log_likelihood: Callable[[Params, Batch], jax.Array],
        log_prior: Callable[[Params], jax.Array],
        data: Batch,
        batch_size: int | None = None,
        batching: Literal["replacement", "epochs"] = "replacement",
    ) -> None:
        """Check the data; nothing is compiled yet."""
        self.num_examples = _common_length("data", data)
        self.batch_size = _checked_batch_size(batch_size, self.num_examples)
        if batching not in ("replacement", "epochs"):
            raise ArgumentError("batching", f"is {batching!r}", 'Choose "replacement" or "epochs"')
        name = first_leaf(data, lambda leaf: leaf.dtype.kind == "f" and not bool(np.all(np.isfinite(leaf))))
        if name is not None:
            raise ArgumentError("data", f"has NaN or Inf in leaf {name!r}", "Remove or impute these entries")
        self.log_likelihood: Callable[[Params, Batch], jax.Array] | None = log_likelihood
        self.log_prior = log_prior
        self.data = tree_map(jnp.asarray, data)
        self.batching = batching
        self._stream: _Stream | None = None

    @classmethod
    def from_log_density(cls, log_density: Callable[[Params], jax.Array]) -> Self:
        """Any JAX function params -> scalar, taken whole at every step."""
        target = cls.__new__(cls)
        target.num_examples = target.batch_size = 1
        target.log_likelihood, target.log_prior, target.data = None, log_density, None
        target.batching, target._stream = "replacement", None
        return target

    @classmethod
    def from_batches(
        cls,
        log_likelihood: Callable[[Params, Batch], jax.Array],
        log_prior: Callable[[Params], jax.Array],
        batches: Batches,
        num_examples: int,
    ) -> Self:
        """Data that does not fit in memory, as batches of one and the same shape.

        Args:
            log_likelihood: as for `Target`.
            log_prior: as for `Target`.
            batches: an iterable that can be gone through again (a data loader, a list), or a function of the chain's
                number that gives one. Each chain goes through its own, again from the start when it ends; reading is
                done ahead, in the background.
            num_examples: N, the size of the whole data set.
        """
        stream = _Stream(batches)
        target = cls.__new__(cls)
        target.batch_size = _common_length("batches", stream.example)
        if isinstance(num_examples, bool) or not isinstance(num_examples, int) or num_examples < target.batch_size:
            raise ArgumentError(
                "num_examples",
                f"is {num_examples!r}, with batches of {target.batch_size}",
                "Give the size of the whole data set",
            )
        target.num_examples = num_examples
        target.log_likelihood, target.log_prior, target.data = log_likelihood, log_prior, None
        target.batching, target._stream = "replacement", stream
        return target

    @property
    def is_exact(self) -> bool:
        """Whether every step sees the whole potential."""
        return self.log_likelihood is None or (self.batch_size == self.num_examples and self._stream is None)

    def batch(self, data: Batch, key: jax.Array, chain: Any, step: Any) -> Batch:
        """The batch of a chain at a step; `key` names the chain's stream, `data` is `self.data` as an argument."""
        if self._stream is not None:
            return self._stream.batch(chain, step)
        if self.is_exact:
            return data
        if self.batching == "epochs":
            per_epoch = self.num_examples // self.batch_size
            positions = (step % per_epoch) * self.batch_size + jnp.arange(self.batch_size)
            chosen = shuffled(jax.random.fold_in(key, step // per_epoch), positions, self.num_examples)
        else:
            chosen = jax.random.randint(jax.random.fold_in(key, step), (self.batch_size,), 0, self.num_examples)
        return tree_map(lambda leaf: leaf[chosen], data)

    def potential(self, position: Params, batch: Batch) -> jax.Array:
        """U~ on `batch`; U itself where the batch is all there is."""
        log_prior = self.log_prior(position)
        if self.log_likelihood is None:
            return -log_prior
        each = self.log_likelihood(position, batch)
        return -(self.num_examples / each.shape[0]) * jnp.sum(each) - log_prior

    def large_batch(self, most: int = 2048) -> Batch:
        """At most `most` evenly spread examples, for measuring the potential's shape; of a stream, the first batch."""
        if self._stream is not None:
            return self._stream.fetch(0, 0)
        if self.num_examples <= most:
            return self.data
        chosen = np.linspace(0, self.num_examples - 1, most).astype(int)
        return tree_map(lambda leaf: leaf[chosen], self.data)

    def check(self, position: Params) -> None:
        """Refuse parameters that are not floating-point and functions of the wrong shape, without running them."""
        for name, leaf in zip(leaf_names(position), jax.tree.leaves(position), strict=True):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ArgumentError(
                    "init", f"leaf {name!r} has type {leaf.dtype}", "Parameters must be floating-point: use 1.0, not 1"
                )
            if not bool(np.all(np.isfinite(np.asarray(leaf)))):
                raise ArgumentError("init", f"leaf {name!r} has NaN or Inf", "Start from finite values")
        which = "log_density" if self.log_likelihood is None else "log_prior"
        shape = _output_shape(which, self.log_prior, position)
        if shape != ():
            raise ArgumentError(which, f"gives shape {shape} and not a number", "Sum over the parameters")
        if self.log_likelihood is None:
            return
        key = jax.eval_shape(lambda: jax.random.key(0))
        batch = (
            self._stream.example
            if self._stream is not None
            else jax.eval_shape(lambda data, key: self.batch(data, key, 0, 0), self.data, key)
        )
        shape = _output_shape("log_likelihood", self.log_likelihood, position, batch)
        wanted = (self.batch_size,)
        if shape == ():
            raise ArgumentError(
                "log_likelihood",
                f"gives one number for the whole batch, not one for each of its {self.batch_size} examples",
                f"Return an array of shape {wanted} and leave out the mean or sum: the factor N/|B| is the library's",
            )
        if shape != wanted:
            raise ArgumentError(
                "log_likelihood",
                f"gives shape {shape} for a batch of {self.batch_size} examples",
                f"Return one log-likelihood for each example, an array of shape {wanted}",
            )


def _common_length(argument: str, tree: Batch) -> int:
    """Length of the leading axis that all leaves share."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ArgumentError(argument, "has no arrays", "Give a pytree of arrays, such as a pair (x, y)")
    lengths = {}
    for name, leaf in zip(leaf_names(tree), leaves, strict=True):
        shape = np.shape(leaf)
        if not shape:
            raise ArgumentError(argument, f"leaf {name!r} is a number", "Every leaf needs a leading axis of examples")
        lengths[name] = shape[0]
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise ArgumentError(argument, f"leaves differ in length: {listed}", "Give each leaf one row per example")
    length = next(iter(lengths.values()))
    if length == 0:
        raise ArgumentError(argument, "is empty", "Give at least one example")
    return length


def _checked_batch_size(batch_size: Any, num_examples: int) -> int:
    if batch_size is None:
        return num_examples
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ArgumentError("batch_size", f"is {batch_size!r}", "Give an integer of at least 1, or None for all data")
    if batch_size > num_examples:
        raise ArgumentError(
            "batch_size", f"is {batch_size}, with {num_examples} examples", "Give at most the number of examples"
        )
    return batch_size


def _output_shape(argument: str, function: Callable[..., Any], *arguments: Any) -> tuple[int, ...]:
    try:
        result = jax.eval_shape(function, *arguments)
    except Exception as error:
        raise ArgumentError(
            argument, f"failed on parameters of the shapes of init: {error}", "Call it by hand on init to see more"
        ) from error
    if not hasattr(result, "shape"):
        raise ArgumentError(argument, f"gives {type(result).__name__} and not an array", "Return one array")
    return tuple(result.shape)


class _Stream:
    """A user's batches, fetched by (chain, step) from inside compiled code and read ahead in the background."""

    ahead = 4

    def __init__(self, batches: Batches) -> None:
        if isinstance(batches, Iterator):
            raise ArgumentError(
                "batches",
                "can be gone through only once",
                "Give a list, a data loader, or a function chain -> iterable, so that each chain has its own",
            )
        self.batches = batches
        first = next(iter(self._open(0)), None)
        if first is None:
            raise ArgumentError("batches", "yields nothing", "Give at least one batch")
        self.example = tree_map(self._shape, first)
        self._lock = threading.Lock()
        self._readers: dict[int, Iterator[Batch]] = {}
        self._last: dict[int, tuple[int, Batch]] = {}

    @staticmethod
    def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
        array = np.asarray(leaf)
        return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))

    def _open(self, chain: int) -> Iterable[Batch]:
        return self.batches(chain) if callable(self.batches) else self.batches

    def _read(self, chain: int) -> Iterator[Batch]:
        """Batches without end, from a thread that stays a few ahead."""
        ready: queue.Queue[Any] = queue.Queue(self.ahead)

        def fill() -> None:
            try:
                while True:
                    empty = True
                    for batch in self._open(chain):
                        ready.put(self._checked(batch))
                        empty = False
                    if empty:
                        raise HookeanError(f"batches: chain {chain} got none on a further round")
            except BaseException as error:  # handed to the thread that waits
                ready.put(error)

        threading.Thread(target=fill, name=f"batches of chain {chain}", daemon=True).start()
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def _checked(self, batch: Batch) -> Batch:
        arrays = tree_map(lambda leaf, like: np.asarray(leaf, like.dtype), batch, self.example)
        shapes = [array.shape for array in jax.tree.leaves(arrays)]
        wanted = [leaf.shape for leaf in jax.tree.leaves(self.example)]
        if shapes != wanted:
            raise HookeanError(f"batches: got shapes {shapes}, the first had {wanted}. Drop a smaller last batch.")
        name = first_leaf(arrays, lambda leaf: leaf.dtype.kind == "f" and not bool(np.all(np.isfinite(leaf))))
        if name is not None:
            raise HookeanError(f"batches: NaN or Inf in leaf {name!r}. Remove or impute these entries.")
        return arrays

    def fetch(self, chain: Any, step: Any) -> Batch:
        """The batch of a chain at a step."""
        chain, step = int(chain), int(step)
        with self._lock:
            at, batch = self._last.get(chain, (-1, None))
            if step == at:
                return batch
            if step < at or chain not in self._readers:  # a new run starts over
                self._readers[chain], at = self._read(chain), -1
            for _ in range(step - at):
                batch = next(self._readers[chain])
            self._last[chain] = (step, batch)
            return batch

    def batch(self, chain: Any, step: Any) -> Batch:
        """The batch as a value inside compiled code."""
        return jax.experimental.io_callback(self.fetch, self.example, chain, step, ordered=False)
