"""The one process that writes a run.

At any moment a SIGKILL leaves a folder in which everything that progress.json counts is whole, and a checkpoint to go
on from. Rows are written first and counted then; a row that counts already is first discounted. Rows that the last
checkpoints count are saved before they are overwritten, since whoever goes on from there wants them back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from hookean.exchange import Event
from hookean.store.layout import (
    BFLOAT16_NAN,
    FORMAT,
    Checkpoint,
    Store,
    chain_name,
    draw_dtypes,
    is_run,
    leaf_folders,
    newest_checkpoint,
    read_about,
    read_arrays,
    replace_file,
    save_arrays,
    skeleton,
    sync,
    sync_all,
    to_json,
)
from hookean.tree import leaf_names
from hookean.types import Params, StoreError, in_one_line

CHUNK_BYTES = 2**20
"""A chunk is one file, and is rewritten whole when rows are added to it: neither too small nor too large."""

CHUNK_ROWS = (1024, 16384)
"""A run may be resumed for longer, hence not fewer than draws; and chunks of tiny rows need not be large."""

BUFFER_BYTES = 256 * 2**20
"""More than this does not wait for the next flush."""

COLUMNS = tuple(name for name in Event._fields if name != "time")


class _Rows(NamedTuple):
    chain: int
    first: int
    columns: list[np.ndarray]  # leaves, then statistics, as they are on disk

    @property
    def end(self) -> int:
        return self.first + (len(self.columns[0]) if self.columns else 0)


class Writer:
    """Writes a run. `keep`, `log` and `tell` only take note, and may be called from any thread."""

    def __init__(self, path: Path, about: dict[str, Any], lock: int, checkpoint: Checkpoint) -> None:
        """Use `create` or `reopen`."""
        self.path, self._about, self._lock = path, about, lock
        self._store = Store(path, **about["store"])
        self._dtype, self._disk_dtype = draw_dtypes(about["dtype"])
        self._folders = [f"draws/{leaf['path']}" for leaf in about["leaves"]]
        self._folders += [f"stats/{name}" for name in about["stats"]]
        self._arrays: dict[str, Any] = {}
        self._take(checkpoint)
        self._counts, self._given = list(checkpoint.draws), list(checkpoint.draws)
        self._log_length = checkpoint.log_length
        self._facts, self._state = checkpoint.facts, "running"
        self._rows: list[_Rows] = []
        self._events: list[Event] = []
        self._waiting = 0
        self._written: set[Path] = set()
        self._failure: StoreError | None = None
        self._buffer, self._disk = threading.Lock(), threading.RLock()
        self._flushed = self._checkpointed = time.monotonic()
        self._seconds = 0.0  # what the last flush took

    @classmethod
    def create(
        cls,
        store: Store,
        draws: Params,
        stats: Sequence[str],
        chains: int,
        description: dict[str, Any],
        configuration: bytes,
        start: list[np.ndarray],
        leaves: list[np.ndarray],
        facts: dict[str, Any],
    ) -> Self:
        """Make a run with its first checkpoint (`leaves`, `facts`) beside its place, and put it there when complete.

        Args:
            store: where and how.
            draws: a pytree of shapes [draw, ...] of one chain (anything with a `shape`).
            stats: names of the statistics.
            chains: how many chains give draws.
            description: what a reader is told of the run, as JSON.
            configuration: what resuming needs, pickled by the caller.
            start: leaves of the starts.
            leaves: leaves of the first checkpoint.
            facts: the caller's facts, as JSON, in the first checkpoint and in progress.json.
        """
        store.check()
        path = Path(os.path.abspath(store.path))
        settings = {f.name: getattr(store, f.name) for f in dataclasses.fields(store) if f.name not in ("path",)}
        shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(draws)]
        about = {
            "format": FORMAT,
            "chains": chains,
            "num_draws": shapes[0][0],
            "dtype": store.dtype,
            "leaves": [
                {"name": name, "path": folder, "shape": shape[1:]}
                for name, folder, shape in zip(leaf_names(draws), leaf_folders(draws), shapes, strict=True)
            ],
            "skeleton": skeleton(draws),
            "stats": list(stats),
            "columns": COLUMNS,
            "store": settings,
            "description": description,
        }
        building = path.with_name(f".{path.name}.{os.getpid()}.new")
        lock = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(building, ignore_errors=True)
            _build(building, about)
            save_arrays(building / "start.npz", start, {})
            replace_file(building / "configuration.pkl", lambda file: file.write(configuration))
            lock = _acquire(building)
            checkpoint = Checkpoint(leaves, facts, [0] * chains, 0)
            writer = cls(building, read_about(building), lock, checkpoint)
            writer._save(checkpoint)
            writer._publish()
            sync_all([building, *building.rglob("*")])
            _move_into_place(building, path, store.overwrite)
        except BaseException as error:
            shutil.rmtree(building, ignore_errors=True)
            if lock >= 0:
                os.close(lock)
            if isinstance(error, OSError):
                raise StoreError(f"{path} could not be made ({in_one_line(error)}). Take another place.") from error
            raise
        writer.path = path
        writer._arrays.clear()
        return writer

    @classmethod
    def reopen(cls, path: str | os.PathLike[str], num_draws: int | None = None) -> tuple[Self, Checkpoint]:
        """Go on with a run from its newest checkpoint: what was written after it is forgotten.

        `num_draws` makes room for more draws than the run was made for.
        """
        path = Path(os.path.abspath(path))
        about = read_about(path)
        lock = _acquire(path)
        try:
            checkpoint = newest_checkpoint(path, about["chains"])
            writer = cls(path, about, lock, checkpoint)
            with writer._writing():
                for partial in path.rglob("*.partial"):
                    partial.unlink()
                writer._undo(checkpoint)
                writer._publish()
                writer._extend(max(num_draws or 0, about["num_draws"]))
        except BaseException:
            os.close(lock)
            raise
        return writer, checkpoint

    @property
    def note(self) -> dict[str, Any]:
        """What was to be remembered with the run."""
        return dict(self._about["store"].get("note", {}))

    def describe(self, description: dict[str, Any], configuration: bytes) -> None:
        """Change what a reader is told of the run, and what resuming needs."""
        import zarr

        with self._disk, self._writing():
            replace_file(self.path / "configuration.pkl", lambda file: file.write(configuration))
            self._about["description"] = json.loads(to_json(description))
            zarr.open_group(self.path, mode="r+").update_attributes({"hookean": self._about})

    def keep(self, chain: int, first: int, draws: Params, stats: dict[str, Any]) -> None:
        """Take draws [m, ...] of a chain, the first of which has the index `first`, with their statistics [m].

        A worker that fell back gives indices anew, and the later ones win. Indices that were left out are NaN.
        """
        shapes = [tuple(leaf["shape"]) for leaf in self._about["leaves"]]
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(draws)]
        rows = len(leaves[0])
        if [leaf.shape for leaf in leaves] != [(rows, *shape) for shape in shapes]:
            raise ValueError(f"draws of shapes {[leaf.shape for leaf in leaves]} do not fit leaves of shapes {shapes}")
        if not 0 <= first <= first + rows <= self._about["num_draws"]:
            raise ValueError(f"draws {first} to {first + rows - 1} of a run of {self._about['num_draws']}")
        if not rows:
            return
        with np.errstate(over="ignore"):
            columns = [leaf.astype(self._dtype).view(self._disk_dtype) for leaf in leaves]
        for name in self._about["stats"]:
            columns.append(np.array(np.broadcast_to(stats.get(name, np.nan), (rows,)), np.float32))
        with self._buffer:
            gap = first - self._given[chain]
            if gap > 0:
                for i, column in enumerate(columns):
                    fill = BFLOAT16_NAN if column.dtype == np.uint16 else np.nan
                    columns[i] = np.concatenate([np.full((gap, *column.shape[1:]), fill, column.dtype), column])
                first -= gap
            self._given[chain] = max(self._given[chain], first + len(columns[0]))
            self._rows.append(_Rows(chain, first, columns))
            self._waiting += sum(column.nbytes for column in columns)

    def log(self, events: Sequence[Event]) -> None:
        """Take the next events of the log."""
        with self._buffer:
            self._events += events

    def tell(self, facts: dict[str, Any], state: str = "running") -> None:
        """Replace what the next flush says of the run."""
        with self._buffer:
            self._facts, self._state = facts, state

    def due(self) -> bool:
        """Whether it is time to flush."""
        pause = max(self._store.flush_seconds, 9 * self._seconds)
        return self._waiting > BUFFER_BYTES or time.monotonic() - self._flushed >= pause

    def checkpoint_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._checkpointed >= self._store.checkpoint_seconds

    def flush(self) -> None:
        """Write all rows that were taken, then count them."""
        with self._disk, self._writing():
            began = time.monotonic()
            with self._buffer:
                rows, self._rows, self._waiting = self._rows, [], 0
                events, self._events = self._events, []
            self._write_rows(list(_merged(rows)))
            self._write_log(events)
            self._publish()
            self._flushed = time.monotonic()
            self._seconds = self._flushed - began

    def checkpoint(self, leaves: list[np.ndarray], facts: dict[str, Any]) -> None:
        """Flush, and save what is needed to go on from here."""
        with self._disk, self._writing():
            self.flush()
            self._sync_written()
            checkpoint = Checkpoint(leaves, facts, list(self._counts), self._log_length, self._number + 1)
            self._save(checkpoint)
            self._take(checkpoint)
            oldest = self._number - self._store.keep_checkpoints + 1
            for file in (self.path / "checkpoints").glob("*.npz"):
                if int(file.stem.removeprefix("undo_").split("_")[0]) < oldest:
                    file.unlink()
            self._checkpointed = time.monotonic()

    def close(self, state: str) -> None:
        """Flush, say how the run ended, and let others have it. After a failure to write: say what can be said."""
        with self._disk:
            if self._lock < 0:
                return
            self.tell(self._facts, state)
            try:
                if self._failure is None:
                    self.flush()
                    with self._writing():
                        self._sync_written()
                else:
                    with contextlib.suppress(OSError):
                        self._publish()
            finally:
                os.close(self._lock)
                self._lock = -1

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A failure to write is final, and says what is safe."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except Exception as error:  # Zarr has its own for a damaged chunk that is to be added to
            if error is self._failure:  # of a flush within a checkpoint
                raise
            counts = f"{min(self._counts)} to {max(self._counts)}" if self._counts else "no"
            self._failure = StoreError(
                f"{self.path} could not be written ({in_one_line(error)}). Safe on disk: {counts} draws a chain, and "
                f"checkpoint {self._number}. See to the disk (space, quota, permissions), then go on with hk.resume."
            )
            raise self._failure from error

    def _take(self, checkpoint: Checkpoint) -> None:
        self._number, self._safe, self._undos = checkpoint.number, list(checkpoint.draws), 0

    def _save(self, checkpoint: Checkpoint) -> None:
        about = {"facts": checkpoint.facts, "draws": checkpoint.draws, "log_length": checkpoint.log_length}
        save_arrays(self.path / "checkpoints" / f"{checkpoint.number:06d}.npz", checkpoint.leaves, about)

    def _publish(self) -> None:
        about = {
            "format": FORMAT,
            "draws": self._counts,
            "log_length": self._log_length,
            "state": self._state,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            "facts": self._facts,
        }
        replace_file(self.path / "progress.json", lambda file: file.write(to_json(about)), durable=False)

    def _array(self, folder: str) -> Any:
        import zarr

        if folder not in self._arrays:
            with zarr.config.set({"array.write_empty_chunks": True}):  # a missing chunk is to mean damage, never NaN
                self._arrays[folder] = zarr.open_array(self.path / folder, mode="r+")
        return self._arrays[folder]

    def _write(self, folder: str, first: int, rows: np.ndarray) -> None:
        if not rows.size:
            return
        array = self._array(folder)
        per_chunk, rest = array.chunks[0], ["0"] * (rows.ndim - 1)
        chunks = range(first // per_chunk, (first + len(rows) - 1) // per_chunk + 1)
        files = [self.path.joinpath(folder, "c", str(chunk), *rest) for chunk in chunks]
        if first % per_chunk and not files[0].exists():  # Zarr would take the rows before these for NaN
            raise StoreError(f"{files[0]} is missing: rows {chunks[0] * per_chunk} to {first - 1} are lost")
        try:
            array[first : first + len(rows)] = rows
        except OSError:
            raise
        except Exception as error:  # Zarr has no one kind of error for rows that are there already, and damaged
            raise StoreError(f"{files[0]} is damaged ({in_one_line(error)})") from error
        self._written.update(files)

    def _write_rows(self, runs: list[_Rows]) -> None:
        lowest = list(self._counts)
        for run in runs:
            lowest[run.chain] = min(lowest[run.chain], run.first)
        for chain, first in enumerate(lowest):
            if first < self._safe[chain]:
                self._save_undo(chain, first)
        counts, self._counts = self._counts, lowest
        if lowest != counts:  # what is being overwritten does not count
            self._publish()
        for run in runs:
            for folder, column in zip(self._folders, run.columns, strict=True):
                self._write(f"{chain_name(run.chain)}/{folder}", run.first, column)
            counts[run.chain] = max(counts[run.chain], run.end)
        self._counts = counts

    def _write_log(self, events: list[Event]) -> None:
        if not events:
            return
        columns: dict[str, np.ndarray] = {
            "log/events": np.array([[getattr(event, name) for name in COLUMNS] for event in events], np.int32),
            "log/times": np.array([event.time for event in events], np.float64),
        }
        for folder, rows in columns.items():
            array = self._array(folder)
            array.resize((self._log_length + len(events), *array.shape[1:]))
            self._write(folder, self._log_length, rows)
            self._written.add(self.path / folder / "zarr.json")
        self._log_length += len(events)

    def _sync_written(self) -> None:
        sync_all(self._written)
        self._written.clear()

    def _save_undo(self, chain: int, first: int) -> None:
        """Save draws from `first` on that the last checkpoint counts."""
        columns = [self._array(f"{chain_name(chain)}/{folder}")[first : self._safe[chain]] for folder in self._folders]
        file = self.path / "checkpoints" / f"undo_{self._number:06d}_{self._undos:06d}.npz"
        save_arrays(file, columns, {"chain": chain, "first": first})
        self._undos += 1

    def _undo(self, checkpoint: Checkpoint) -> None:
        """Put back what was overwritten since the checkpoint, the last first, and drop damaged newer ones."""
        folder = self.path / "checkpoints"
        undos = [p for p in sorted(folder.glob("undo_*.npz")) if int(p.stem.split("_")[1]) >= checkpoint.number]
        saved = [read_arrays(file) for file in reversed(undos)]
        for _, about in saved:
            self._counts[about["chain"]] = min(self._counts[about["chain"]], about["first"])
        if saved:
            self._publish()
        for columns, about in saved:
            for name, column in zip(self._folders, columns, strict=True):
                self._write(f"{chain_name(about['chain'])}/{name}", about["first"], column)
        self._sync_written()
        self._counts = list(checkpoint.draws)
        for file in [p for p in folder.glob("[0-9]*.npz") if int(p.stem) > checkpoint.number] + undos[::-1]:
            file.unlink()

    def _extend(self, num_draws: int) -> None:
        import zarr

        if num_draws > self._about["num_draws"]:
            for chain in range(self._about["chains"]):
                for folder in self._folders:
                    array = self._array(f"{chain_name(chain)}/{folder}")
                    array.resize((num_draws, *array.shape[1:]))
            self._about["num_draws"] = num_draws
            zarr.open_group(self.path, mode="r+").update_attributes({"hookean": self._about})
        for folder in ("log/events", "log/times"):
            array = self._array(folder)
            array.resize((self._log_length, *array.shape[1:]))


def _build(path: Path, about: dict[str, Any]) -> None:
    """Groups and empty arrays of a run."""
    import json

    import zarr
    from zarr.codecs import Crc32cCodec

    root = zarr.create_group(path, zarr_format=3, attributes={"hookean": json.loads(to_json(about))})

    def array(folder: str, shape: tuple[int, ...], rows: int, dtype: Any, fill: Any) -> None:
        chunks = (rows, *(max(1, n) for n in shape[1:]))
        root.create_array(
            folder, shape=shape, chunks=chunks, dtype=dtype, fill_value=fill, filters=None, compressors=[Crc32cCodec()]
        )

    num_draws = about["num_draws"]
    most = min(max(num_draws, CHUNK_ROWS[0]), CHUNK_ROWS[1])
    dtype = draw_dtypes(about["dtype"])[1]
    first = chain_name(0)
    for leaf in about["leaves"]:
        row_bytes = dtype.itemsize * max(1, int(np.prod(leaf["shape"])))
        rows = min(most, max(1, CHUNK_BYTES // row_bytes))
        fill = BFLOAT16_NAN if about["dtype"] == "bfloat16" else np.nan
        array(f"{first}/draws/{leaf['path']}", (num_draws, *leaf["shape"]), rows, dtype, fill)
    for name in about["stats"]:
        array(f"{first}/stats/{name}", (num_draws,), most, np.float32, np.nan)
    for chain in range(1, about["chains"]):
        shutil.copytree(path / first, path / chain_name(chain))
    array("log/events", (0, len(COLUMNS)), CHUNK_ROWS[1], np.int32, -1)
    array("log/times", (0,), CHUNK_ROWS[1], np.float64, np.nan)
    (path / "checkpoints").mkdir()


def _move_into_place(building: Path, path: Path, overwrite: bool) -> None:
    """Rename; an older run goes away only then, and only if nobody writes it."""
    old = None
    if overwrite and is_run(path):
        os.close(_acquire(path))
        old = path.with_name(f".{path.name}.{os.getpid()}.old")
        os.rename(path, old)
    os.rename(building, path)
    sync(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _acquire(path: Path) -> int:
    """The lock of a run, as a file descriptor; the kernel releases it with the process, however that ends."""
    import fcntl

    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for pause in (0.01, 0.1, None):  # whoever asks whether the run is held holds it for a moment
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if pause is None:
                    raise
                time.sleep(pause)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise StoreError(f"{path} is being written by another process ({holder}). Stop it, or wait for it.") from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _merged(rows: list[_Rows]) -> Iterator[_Rows]:
    """The same rows, what belongs together in one piece."""
    for chain in sorted({row.chain for row in rows}):
        pieces: list[_Rows] = []
        for row in (row for row in rows if row.chain == chain):
            if pieces and pieces[-1].end != row.first:
                yield _joined(pieces)
                pieces = []
            pieces.append(row)
        yield _joined(pieces)


def _joined(pieces: list[_Rows]) -> _Rows:
    columns = [np.concatenate(parts) for parts in zip(*(piece.columns for piece in pieces), strict=True)]
    return _Rows(pieces[0].chain, pieces[0].first, columns)
