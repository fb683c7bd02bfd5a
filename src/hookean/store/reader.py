"""Reading a run, also while it goes on.

`load` reads two small files. Draws are read when they are indexed, and only what progress.json counts: a row is there,
or the answer is a StoreError, never a wrong number.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hookean.exchange import Event, Kind
from hookean.store.layout import (
    BFLOAT16_NAN,
    chain_name,
    draw_dtypes,
    is_held,
    newest_checkpoint,
    read_about,
    read_arrays,
    rebuild,
)
from hookean.types import HookeanWarning, Params, StoreError, in_one_line

Positions = range | np.ndarray
"""Ascending indices along an axis."""


def load(path: str | os.PathLike[str]) -> Stored:
    """Open a run on disk, finished or not. Nothing is unpickled, and draws stay on disk until they are indexed."""
    return Stored(path)


class Stored:
    """A run on disk.

    Attributes:
        path: its folder.
        description: what the run says of itself.
        progress: number of `draws` of each chain, `log_length`, `state`, `pid`, `host`, `time` and `facts`, as of the
            last `refresh`.
        draws: the parameters' pytree with lazy leaves [chain, draw, ...]. Dicts, lists and tuples are what they were;
            other nodes (such as named tuples) have become dicts.
        stats: lazy arrays [chain, draw].
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read what describes the run."""
        self.path = Path(path)
        self.refresh()
        reader, disk = draw_dtypes(self._about["dtype"])
        leaves = [
            Lazy(self, f"draws/{leaf['path']}", f"leaf {leaf['name']!r}, draws", tuple(leaf["shape"]), reader, disk)
            for leaf in self._about["leaves"]
        ]
        self.draws: Params = rebuild(self._about["skeleton"], leaves)
        single = np.dtype(np.float32)
        self.stats = {
            name: Lazy(self, f"stats/{name}", f"statistic {name!r}, draws", (), single, single)
            for name in self._about["stats"]
        }

    def refresh(self) -> Stored:
        """Look how far the run is by now."""
        self._about = read_about(self.path)
        self.description: dict[str, Any] = self._about["description"]
        try:
            self.progress = self._checked(json.loads((self.path / "progress.json").read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            checkpoint = newest_checkpoint(self.path, self._about["chains"])
            warnings.warn(
                f"store: {self.path / 'progress.json'} cannot be read ({in_one_line(error)}). What is shown is what "
                f"checkpoint {checkpoint.number} counts.",
                HookeanWarning,
                stacklevel=2,
            )
            counts = {"draws": checkpoint.draws, "log_length": checkpoint.log_length}
            unknown = {"state": "unknown", "pid": None, "host": None, "time": None}
            self.progress = {**counts, **unknown, "facts": checkpoint.facts}
        return self

    @property
    def state(self) -> str:
        """As of the last `refresh`: running, stopped, finished or failed; killed where nobody writes it any longer."""
        state = str(self.progress["state"])
        return "killed" if state == "running" and not is_held(self.path) else state

    def _checked(self, progress: dict[str, Any]) -> dict[str, Any]:
        counts, most = [*progress["draws"], progress["log_length"]], self._about["num_draws"]
        if len(counts) != self._about["chains"] + 1 or not all(type(n) is int and n >= 0 for n in counts):
            raise ValueError("its counts make no sense")
        if max(progress["draws"]) > most or not isinstance(progress["facts"], dict):
            raise ValueError("its counts make no sense")
        return progress

    def log(self, part: slice = slice(None)) -> list[Event]:
        """Events of the log of exchanges, all or a slice of them."""
        rows = range(self.progress["log_length"])[part]
        rows, turned = (rows, False) if rows.step > 0 else (rows[::-1], True)
        names = self._about["columns"]
        try:
            events = _read(
                self.path / "log/events", "the log, events", rows, [range(len(names))], (len(names),), "int32"
            )
            times = _read(self.path / "log/times", "the log's times, events", rows, [], (), "float64")
        except _Damage as error:
            raise StoreError(f"{self.path}: {error}") from error.__cause__
        found = []
        for row, time in zip(events.tolist(), times.tolist(), strict=True):
            fields = dict(zip(names, row, strict=True))
            found.append(Event(**{**fields, "kind": Kind(fields["kind"]), "time": time}))
        return found[::-1] if turned else found

    def start(self) -> list[np.ndarray]:
        """Leaves of the starts."""
        return read_arrays(self.path / "start.npz")[0]

    def newest_facts(self) -> dict[str, Any]:
        """The facts of the newest checkpoint."""
        return newest_checkpoint(self.path, self._about["chains"]).facts

    def configuration(self) -> bytes:
        """What resuming needs, pickled. Unpickling runs code: do so only with a run that you trust."""
        try:
            return (self.path / "configuration.pkl").read_bytes()
        except OSError as error:
            raise StoreError(f"{self.path}: the configuration cannot be read ({in_one_line(error)})") from error

    def __repr__(self) -> str:
        counts = self.progress["draws"]
        return f"<run {self.path}: {self.state}, {len(counts)} chains, up to {max(counts)} draws>"


class Lazy:
    """An array [chain, draw, ...] on disk. Indexed as a NumPy array, it reads what is asked for, and gives one.

    There are as many draws as the longest chain has; what other chains lack of them is NaN.
    """

    def __init__(
        self, stored: Stored, folder: str, what: str, tail: tuple[int, ...], dtype: np.dtype, disk: np.dtype
    ) -> None:
        """Made by `Stored`."""
        self._stored, self._folder, self._what, self._tail = stored, folder, what, tail
        self.dtype, self._disk = dtype, disk

    @property
    def shape(self) -> tuple[int, ...]:
        """Chains, draws, and the shape of a draw."""
        counts = self._stored.progress["draws"]
        return (len(counts), max(counts), *self._tail)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return 2 + len(self._tail)

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        counts, shape = self._stored.progress["draws"], self.shape
        (chains, draws, *tail), inside = _narrow(key, shape)
        fill = BFLOAT16_NAN if self._disk == np.uint16 else np.nan
        block = np.full([len(chains), len(draws), *map(len, tail)], fill, self._disk)
        if block.size:
            for row, chain in enumerate(chains):
                rows = draws[: int(np.searchsorted(np.asarray(draws), counts[chain]))]
                if len(rows):
                    folder = self._stored.path / chain_name(chain) / self._folder
                    try:
                        block[row, : len(rows)] = _read(folder, self._what, rows, tail, self._tail, self._disk.name)
                    except _Damage as error:
                        raise StoreError(f"{self._stored.path}: chain {chain}, {error}") from error.__cause__
        return block.view(self.dtype)[inside]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self[...]
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{self._what} on disk: {self.dtype}{list(self.shape)}>"


class _Damage(Exception):
    """Part of an array that cannot be read."""


def _read(
    folder: Path, what: str, rows: Positions, tail: Sequence[Positions], shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    """Some rows of an array, and of them what `tail` says; all of these rows have been written."""
    import zarr

    if not len(rows):
        return np.empty((0, *map(len, tail)), dtype)
    try:
        array: Any = zarr.open_array(folder, mode="r")
        if array.shape[0] <= rows[-1] or array.shape[1:] != shape or array.dtype != dtype:
            raise ValueError(f"it is {array.dtype}{list(array.shape)}")
    except Exception as error:
        raise _Damage(f"{what}: zarr.json is damaged ({in_one_line(error)})") from error

    def pick(wanted: Positions) -> np.ndarray:
        return np.asarray(array.oindex[tuple(_selection(axis) for axis in (wanted, *tail))])

    per_chunk = array.chunks[0]
    chunks = np.unique(np.asarray(rows) // per_chunk)
    failure: Exception | None = None
    try:
        if all(folder.joinpath("c", str(chunk), *["0"] * len(tail)).is_file() for chunk in chunks):
            return pick(rows)
    except Exception as error:  # Zarr has no one kind of error for it
        failure = error
    for chunk in chunks.tolist():  # which one is it?
        where = f"{what} {chunk * per_chunk} to {min((chunk + 1) * per_chunk, array.shape[0]) - 1}"
        if not folder.joinpath("c", str(chunk), *["0"] * len(tail)).is_file():
            raise _Damage(f"{where}: the chunk is missing")
        try:
            pick(range(chunk * per_chunk, min((chunk + 1) * per_chunk, array.shape[0])))
        except Exception as error:
            raise _Damage(f"{where}: the chunk is damaged ({in_one_line(error)})") from error
    raise _Damage(f"{what} {rows[0]} to {rows[-1]}: cannot be read ({failure})") from failure


def _selection(positions: Positions) -> slice | np.ndarray:
    if isinstance(positions, range):
        return slice(positions.start, positions.stop, positions.step)
    return positions


def _narrow(key: Any, shape: tuple[int, ...]) -> tuple[list[Positions], tuple[Any, ...]]:
    """What to read along each axis, and the key that picks the answer out of that."""
    np.broadcast_to(np.zeros((), bool), shape)[key]  # an index that NumPy refuses is refused in NumPy's words
    parts: list[Any] = []
    for part in key if isinstance(key, tuple) else (key,):
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
            continue
        array = np.asarray(part)
        if array.dtype == bool:
            if array.ndim == 0:
                raise IndexError("a single True or False is no index here")
            parts += array.nonzero()
        else:
            parts.append(array.astype(np.intp))
    given = sum(part is not None and part is not Ellipsis for part in parts)
    rest = [slice(None)] * (len(shape) - given)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    parts[at : at + 1] = rest

    wanted: list[Positions] = []
    inside: list[Any] = []
    for part in parts:
        if part is None:
            inside.append(None)
            continue
        axis = range(shape[len(wanted)])
        if isinstance(part, slice):
            positions = axis[part]
            wanted.append(positions if positions.step > 0 else positions[::-1])
            inside.append(slice(None, None, 1 if positions.step > 0 else -1))
        elif part.ndim == 0:
            start = axis[int(part)]
            wanted.append(range(start, start + 1))
            inside.append(0)
        else:
            chosen, places = np.unique(part % max(len(axis), 1), return_inverse=True)
            wanted.append(chosen)
            inside.append(places.reshape(part.shape))
    return wanted, tuple(inside)
