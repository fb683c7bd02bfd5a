"""What is sampled: a posterior given by data, a likelihood and a prior, or any log density.

    U(theta)  = - sum over all N examples of log p(x | theta) - log p(theta)
    U~(theta) = - (N / |B|) sum over a batch B of log p(x | theta) - log p(theta)        unbiased

The factor N / |B| is the library's own: a user gives the log-likelihood of each example, never a scaled loss.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, Self

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from hookean.random import shuffled
from hookean.tree import leaf_names, not_finite, same_structure, tree_map
from hookean.types import ArgumentError, Batch, BatchError, Params, check_count, in_one_line

Batches = Iterable[Batch] | Callable[[int], Iterable[Batch]]
"""Batches that can be gone through again and again, or a function chain -> such batches."""

READ_AHEAD = 4
"""Batches of a stream that wait for each chain."""


class Fetched(NamedTuple):
    """A batch of a stream, and 0; or, once reading has failed, anything and NaN, which stops the run."""

    batch: Batch
    alarm: Any


class Target:
    """A posterior.

    Args:
        log_likelihood: function (params, batch) -> array [B], the log-likelihood of each example of the batch, which
            has the structure of `data`.
        log_prior: function params -> scalar, the log density of the prior up to a constant.
        data: a pytree of arrays with one leading axis, the examples.
        batch_size: examples in a batch; None for all, at every step.
        batching: "replacement" draws each example of a batch at random; "epochs" goes through reshuffled data, without
            the examples that are left over at the end of an epoch.
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
        _check_function("log_likelihood", log_likelihood)
        _check_function("log_prior", log_prior)
        arrays = _checked_arrays("data", data)
        self.num_examples = _common_length("data", arrays)
        self.batch_size = self.num_examples if batch_size is None else check_count("batch_size", batch_size)
        if self.batch_size > self.num_examples:
            raise ArgumentError(
                "batch_size",
                f"is {batch_size}, with {self.num_examples} examples",
                "Give at most the number of examples, or None for all of them",
            )
        if batching not in ("replacement", "epochs"):
            raise ArgumentError("batching", f"is {batching!r}", 'Choose "replacement" or "epochs"')
        self.log_likelihood: Callable[[Params, Batch], jax.Array] | None = log_likelihood
        self.log_prior = log_prior
        self.data = tree_map(jax.device_put, arrays)
        self.batching = batching
        self._stream: _Stream | None = None

    @classmethod
    def from_log_density(cls, log_density: Callable[[Params], jax.Array]) -> Self:
        """Any JAX function params -> scalar, taken whole at every step."""
        _check_function("log_density", log_density)
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
                number that gives one. Each chain goes through it by itself, again from the start when it ends; for
                chains that see different batches give a function. Reading is done ahead, in the background.
            num_examples: N, the size of the whole data set.
        """
        _check_function("log_likelihood", log_likelihood)
        _check_function("log_prior", log_prior)
        stream = _Stream(batches)
        target = cls.__new__(cls)
        target.batch_size = _common_length("batches", stream.first)
        target.num_examples = check_count("num_examples", num_examples)
        if target.num_examples < target.batch_size:
            raise ArgumentError(
                "num_examples",
                f"is {num_examples}, with batches of {target.batch_size}",
                "Give the size of the whole data set, not the number of batches",
            )
        target.log_likelihood, target.log_prior, target.data = log_likelihood, log_prior, None
        target.batching, target._stream = "replacement", stream
        return target

    @property
    def is_exact(self) -> bool:
        """Whether every step sees the whole potential."""
        return self.log_likelihood is None or (self.batch_size == self.num_examples and self._stream is None)

    def batch(self, data: Batch, key: jax.Array, chain: Any, step: Any) -> Batch | Fetched:
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

    def potential(self, position: Params, batch: Batch | Fetched) -> jax.Array:
        """U~ on `batch`; U itself where the batch is all there is."""
        if isinstance(batch, Fetched):
            return self.potential(position, batch.batch) + batch.alarm
        log_prior = self.log_prior(position)
        if self.log_likelihood is None:
            return -log_prior
        each = self.log_likelihood(position, batch)
        return -(self.num_examples / each.shape[0]) * jnp.sum(each) - log_prior

    def large_batch(self, most: int = 2048) -> Batch:
        """At most `most` evenly spread examples, for measuring the potential's shape; of a stream, the first batch."""
        if self._stream is not None:
            return self._stream.first
        if self.num_examples <= most:
            return self.data
        chosen = np.linspace(0, self.num_examples - 1, most).astype(int)
        return tree_map(lambda leaf: leaf[chosen], self.data)

    def fingerprint(self, position: Params) -> dict[str, str]:
        """Hashes of what the functions compute and of the data, by which another target is noticed."""
        rows = self.data if self._stream is None else self._stream.first
        shapes = tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (position, rows))
        program = jax.jit(self.potential).lower(*shapes).as_text()
        data = hashlib.sha256(repr((self.num_examples, self.batch_size, self.batching)).encode())
        for name, leaf in zip(leaf_names(rows, "data"), jax.tree.leaves(rows), strict=True):
            data.update(f"{name} {leaf.dtype} {leaf.shape}".encode())
            data.update(np.ascontiguousarray(np.asarray(leaf)).view(np.uint8).data)
        return {"functions": hashlib.sha256(program.encode()).hexdigest(), "data": data.hexdigest()}

    def close(self) -> BatchError | None:
        """End what reads ahead for a run; says what went wrong in reading, if anything did."""
        return None if self._stream is None else self._stream.close()

    def check(self, position: Params) -> None:
        """Refuse parameters that are not floating-point and functions of the wrong shape, without running them."""
        for name, leaf in zip(leaf_names(position), jax.tree.leaves(position), strict=True):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ArgumentError(
                    "init", f"leaf {name!r} has type {leaf.dtype}", "Parameters must be floating-point: use 1.0, not 1"
                )
        which = "log_density" if self.log_likelihood is None else "log_prior"
        shape = _output_shape(which, self.log_prior, position)
        if shape != ():
            raise ArgumentError(
                which, f"gives shape {shape} and not a number", "Return the sum over all parameters, a scalar"
            )
        if self.log_likelihood is None:
            return
        rows = self.data if self._stream is None else self._stream.first
        batch = tree_map(lambda leaf: jax.ShapeDtypeStruct((self.batch_size, *leaf.shape[1:]), leaf.dtype), rows)
        shape = _output_shape("log_likelihood", self.log_likelihood, position, batch)
        wanted = (self.batch_size,)
        if shape == ():
            raise ArgumentError(
                "log_likelihood",
                f"gives one number for the whole batch, not one for each of its {self.batch_size} examples",
                f"Return an array of shape {wanted} and leave out the mean or sum: the factor N/|B| is the library's",
            )
        if shape != wanted:
            remedy = f"Return one log-likelihood for each example, an array of shape {wanted}"
            if shape == 2 * wanted:
                remedy += f"; here an array of shape {(*wanted, 1)} may have met one of shape {wanted}"
            raise ArgumentError(
                "log_likelihood", f"gives shape {shape} for a batch of {self.batch_size} examples", remedy
            )


def _check_function(argument: str, function: Any) -> None:
    if not callable(function):
        raise ArgumentError(argument, f"is {type(function).__name__} and not a function", "Give a function")


def _checked_arrays(argument: str, tree: Batch) -> Batch:
    """All leaves as arrays of types that JAX has; refuses what would be lost on the way there, and NaN and Inf."""
    leaves, structure = jax.tree.flatten(tree)
    names = leaf_names(tree, bare=argument)
    arrays = jax.tree.unflatten(
        structure, [_checked_array(argument, name, leaf) for name, leaf in zip(names, leaves, strict=True)]
    )
    name = not_finite(arrays, bare=argument)
    if name is not None:
        raise ArgumentError(argument, f"has NaN or Inf in leaf {name!r}", "Remove or impute these entries")
    return arrays


def _checked_array(argument: str, name: str, leaf: Any) -> Any:
    if np.ma.is_masked(leaf):
        raise ArgumentError(argument, f"has masked entries in leaf {name!r}", "Remove or impute these entries")
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
        raise ArgumentError(
            argument,
            f"has type {array.dtype} in leaf {name!r} (a {type(leaf).__name__})",
            "Give arrays of numbers; code categories and dates as such. Data that comes in pieces goes to "
            "Target.from_batches",
        )
    wanted = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype == wanted:
        return array
    with np.errstate(over="ignore", under="ignore"):
        converted = array.astype(wanted)
    exact = wanted.kind in "iu"
    if not np.all(converted == array if exact else np.isfinite(converted) | ~np.isfinite(array)):
        raise ArgumentError(
            argument,
            f"has numbers in leaf {name!r} that do not fit in {wanted}",
            "Rescale them, or enable JAX's 64-bit types (jax_enable_x64)",
        )
    return converted


def _common_length(argument: str, arrays: Batch) -> int:
    """Length of the leading axis that all leaves share."""
    names, leaves = leaf_names(arrays, argument), jax.tree.leaves(arrays)
    shapes = {name: np.shape(leaf) for name, leaf in zip(names, leaves, strict=True)}
    if not shapes:
        raise ArgumentError(argument, "has no arrays", "Give a pytree of arrays, such as a pair (x, y)")
    for name, shape in shapes.items():
        if not shape:
            raise ArgumentError(
                argument,
                f"leaf {name!r} is a number",
                "Every leaf needs a leading axis of examples; make lists arrays, for instance with np.asarray",
            )
    lengths = {shape[0] for shape in shapes.values()}
    if len(lengths) > 1:
        listed = ", ".join(f"{name!r} has {shape[0]}" for name, shape in shapes.items())
        raise ArgumentError(argument, f"leaves differ in length: {listed}", "Give each leaf one row per example")
    if lengths == {0}:
        raise ArgumentError(argument, "is empty", "Give at least one example")
    return int(lengths.pop())


def _output_shape(argument: str, function: Callable[..., Any], *arguments: Any) -> tuple[int, ...]:
    try:
        result = jax.eval_shape(function, *arguments)
    except Exception as error:
        raise ArgumentError(
            argument,
            f"failed on arguments of the shapes and types of init and data ({in_one_line(error)})",
            "Call it by hand on init to see more; inside it use jax.numpy, not numpy",
        ) from error
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise ArgumentError(argument, f"gives {type(result).__name__} and not an array", "Return one array")
    if not jnp.issubdtype(result.dtype, jnp.floating):
        raise ArgumentError(argument, f"gives type {result.dtype}", "Return floating-point numbers")
    return tuple(result.shape)


class _Stream:
    """A user's batches, fetched by (chain, step) from inside compiled code."""

    def __init__(self, batches: Batches) -> None:
        if isinstance(batches, Iterator):
            raise ArgumentError(
                "batches",
                "can be gone through only once",
                "Give a list, a data loader, or a function chain -> iterable, so that each chain has its own",
            )
        if not (callable(batches) or hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
            raise ArgumentError(
                "batches",
                f"is {type(batches).__name__}",
                "Give an iterable of batches, or a function chain -> iterable",
            )
        self._batches = batches
        self._lock = threading.Lock()
        self._readers: dict[int, _Reader] = {}
        self._failure: BatchError | None = None
        try:
            first = next(iter(self.round(0)), None)
        except Exception as error:
            raise ArgumentError(
                "batches", f"failed on the first one ({in_one_line(error)})", "See the error above for where"
            ) from error
        if first is None:
            raise ArgumentError("batches", "yields nothing", "Give at least one batch")
        self.first = _checked_arrays("batches", first)
        self._shapes = tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.first)

    def round(self, chain: int) -> Iterable[Batch]:
        """The batches of a chain, once through."""
        return self._batches(chain) if callable(self._batches) else self._batches

    def checked(self, batch: Batch) -> Batch:
        """A batch as arrays; refuses what is not like the first."""
        arrays = _checked_arrays("batches", batch)
        if not same_structure(arrays, self.first):
            raise ArgumentError("batches", "differ in structure", "Give every batch the structure of the first")
        for name, array, first in zip(
            leaf_names(arrays, "batches"), jax.tree.leaves(arrays), jax.tree.leaves(self.first), strict=True
        ):
            if array.shape != first.shape:
                raise ArgumentError(
                    "batches",
                    f"leaf {name!r} has shape {array.shape}, in the first batch {first.shape}",
                    "All batches must have one shape: drop a smaller last one",
                )
            if not np.can_cast(array.dtype, first.dtype, "same_kind"):
                raise ArgumentError(
                    "batches",
                    f"leaf {name!r} has type {array.dtype}, in the first batch {first.dtype}",
                    "All batches must have one type",
                )
        return tree_map(lambda array, first: np.asarray(array, first.dtype), arrays, self.first)

    def fetch(self, chain: Any, step: Any) -> Fetched:
        """The batch of a chain at a step. Never raises: an error inside a callback would lose the run."""
        chain, step = int(chain), int(step)
        with self._lock:
            if self._failure is None:
                try:
                    reader = self._readers.get(chain)
                    if reader is None or step < reader.step:  # a worker that falls back reads again from the start
                        if reader is not None:
                            reader.close()
                        reader = self._readers[chain] = _Reader(self, chain)
                    return Fetched(reader.read(step), np.float32(0))
                except BaseException as error:
                    self._failure = BatchError(chain, step, error)
            return Fetched(self.first, np.float32(np.nan))

    def batch(self, chain: Any, step: Any) -> Fetched:
        """The batch as a value inside compiled code."""
        shapes = Fetched(self._shapes, jax.ShapeDtypeStruct((), np.float32))
        return jax.experimental.io_callback(self.fetch, shapes, chain, step, ordered=False)

    def close(self) -> BatchError | None:
        """End all readers, so that a new run starts over; what went wrong, if anything did."""
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()
            failure, self._failure = self._failure, None
            return failure


class _Reader:
    """The batches of one chain, round after round without end, from a thread that stays a few ahead."""

    def __init__(self, stream: _Stream, chain: int) -> None:
        self.step, self._batch = -1, None
        self._ready: queue.Queue[Any] = queue.Queue(READ_AHEAD)
        self._closed = threading.Event()
        name = f"batches of chain {chain}"
        threading.Thread(target=self._fill, args=(stream, chain), name=name, daemon=True).start()

    def _fill(self, stream: _Stream, chain: int) -> None:
        try:
            while True:
                empty = True
                for batch in stream.round(chain):
                    self._ready.put(stream.checked(batch))
                    if self._closed.is_set():
                        return
                    empty = False
                if empty:
                    raise ArgumentError(
                        "batches", "yield nothing when gone through again", "Give a new iterable for every round"
                    )
        except BaseException as error:  # handed to the run, which waits for a batch
            self._ready.put(error)

    def read(self, step: int) -> Batch:
        """The batch of a step that is not before the last one."""
        while self.step < step:
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            self._batch, self.step = item, self.step + 1
        return self._batch

    def close(self) -> None:
        """Let the thread end: it may be waiting for room."""
        self._closed.set()
        while not self._ready.empty():
            self._ready.get_nowait()
