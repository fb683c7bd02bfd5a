"""What lies where in the folder of a run, and how its single files are written and read.

    zarr.json                  a Zarr group; its attribute "hookean" describes the run
    chain_000/draws/<leaf>     arrays [draw, ...]; bytes and their checksum, not compressed: noise does not compress
    chain_000/stats/<name>     arrays [draw]
    log/events, log/times      the log of exchanges, one row an event
    progress.json              how many rows of each array count; replaced at once, after the rows have been written
    checkpoints/<number>.npz   what a run goes on from
    checkpoints/undo_*.npz     draws that the last checkpoints count and that were overwritten since
    start.npz                  where the chains started
    configuration.pkl          what was asked for; only resuming reads it
    lock                       held by the process that writes, as long as it lives

Rows beyond the counts in progress.json are left-overs without meaning.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from hookean.types import ArgumentError, HookeanWarning, Params, StoreError, check_count, in_one_line

FORMAT = 1
DTYPES = ("float32", "bfloat16", "float64")
BFLOAT16_NAN = 0x7FC0
SAFE_NAME = re.compile(r"(?!__|zarr\.json$)[A-Za-z0-9_-][A-Za-z0-9_.-]{0,79}")


@dataclasses.dataclass(frozen=True)
class Store:
    """Keep a run on disk, so that it can be watched, read without its memory, and resumed after a crash.

    Attributes:
        path: a folder that does not exist yet.
        dtype: type of the draws on disk. Checkpoints keep every bit whatever it is.
        overwrite: replace an older run at `path` (nothing else is ever replaced).
        checkpoint_seconds: how often to save what is needed to resume.
        flush_seconds: how often to write new draws; more rarely where that would take a tenth of all time.
        keep_checkpoints: how many checkpoints to keep; with two, one may be damaged.
        note: anything to be remembered with the run, as JSON.
    """

    path: str | os.PathLike[str]
    dtype: str = "float32"
    overwrite: bool = False
    checkpoint_seconds: float = 60.0
    flush_seconds: float = 2.0
    keep_checkpoints: int = 2
    note: dict[str, Any] = dataclasses.field(default_factory=dict)

    def check(self) -> None:
        """Refuse a store that could not be made, without making anything."""
        if importlib.util.find_spec("zarr") is None:
            raise ArgumentError("store", "needs the package zarr, which is not installed", "pip install zarr")
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise ArgumentError("store", f"has path {self.path!r}", "Give the name of a folder")
        if self.dtype not in DTYPES:
            raise ArgumentError("store", f"has dtype {self.dtype!r}", f"Give one of {', '.join(DTYPES)}")
        for name in ("checkpoint_seconds", "flush_seconds"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
                raise ArgumentError("store", f"has {name} {seconds!r}", "Give seconds, 0 or more")
        check_count("store: keep_checkpoints", self.keep_checkpoints)
        path = Path(self.path)
        if path.is_dir() and any(path.iterdir()):
            if not is_run(path):
                raise ArgumentError("store", f"{path} holds something else than a run", "Give a folder of its own")
            if not self.overwrite:
                remedy = "Go on with it by hk.resume, take another path, or say overwrite=True"
                raise ArgumentError("store", f"{path} holds a run already", remedy)
        elif os.path.lexists(path) and not path.is_dir():
            raise ArgumentError("store", f"{path} is a file", "Give the name of a folder")
        parent = next(p for p in path.absolute().parents if os.path.lexists(p))
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ArgumentError("store", f"nothing can be written in {parent}", "Give a path where you may write")


@dataclasses.dataclass
class Checkpoint:
    """What a run goes on from: leaves and facts of the caller, and how many draws and events count."""

    leaves: list[np.ndarray]
    facts: dict[str, Any]
    draws: list[int]
    log_length: int
    number: int = 0


def chain_name(chain: int) -> str:
    """Folder of a chain."""
    return f"chain_{chain:03d}"


def leaf_folders(tree: Params) -> list[str]:
    """A path for each leaf: its name where the name is fit for a path, a number where it is not."""
    split = []
    for number, (keys, _) in enumerate(jax.tree_util.tree_flatten_with_path(tree)[0]):
        parts = [jax.tree_util.keystr((key,), simple=True) for key in keys] or ["params"]
        split.append(parts if all(map(SAFE_NAME.fullmatch, parts)) else [f"leaf_{number:03d}"])
    ordered = sorted(split)
    if any(long[: len(short)] == short for short, long in itertools.pairwise(ordered)):
        split = [[f"leaf_{number:03d}"] for number in range(len(split))]
    return ["/".join(parts) for parts in split]


def skeleton(tree: Params) -> Any:
    """JSON from which `rebuild` makes the tree again. Nodes other than dict, list and tuple become dicts."""
    numbers = itertools.count()

    def walk(node: Any) -> Any:
        if node is None:
            return {"kind": "none"}
        found = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
        if len(found) == 1 and found[0][0] == ():
            return next(numbers)
        kind = type(node).__name__ if type(node) in (dict, list, tuple) else "dict"
        entry = {"kind": kind, "items": [walk(child) for _, child in found]}
        if kind == "dict":
            if type(node) is dict and all(type(key) in (str, int) for key in node):
                keys: list[Any] = [keys[0].key for keys, _ in found]
            else:
                keys = [jax.tree_util.keystr(keys, simple=True) for keys, _ in found]
            entry["keys"] = keys if len(set(keys)) == len(keys) else [str(i) for i in range(len(keys))]
        return entry

    return walk(tree)


def rebuild(bones: Any, leaves: Sequence[Any]) -> Params:
    """The tree of a skeleton, with these leaves."""
    if isinstance(bones, int):
        return leaves[bones]
    if bones["kind"] == "none":
        return None
    items = [rebuild(item, leaves) for item in bones["items"]]
    if bones["kind"] == "dict":
        return dict(zip(bones["keys"], items, strict=True))
    return tuple(items) if bones["kind"] == "tuple" else items


def to_json(value: Any) -> bytes:
    """As JSON; NumPy's numbers and arrays become plain ones, and whatever else is written as it prints."""

    def plain(other: Any) -> Any:
        return other.tolist() if hasattr(other, "tolist") else str(other)

    return json.dumps(value, default=plain, indent=1).encode()


def replace_file(path: Path, write: Callable[[BinaryIO], Any], durable: bool = True) -> None:
    """Write a file so that under its name there is the old one or the new one, whole; `durable`: a power cut too."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or the names in a folder are on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path]) -> None:
    """The same for many files: at once, since the disk takes them together."""
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(sync, paths))


def save_arrays(path: Path, arrays: Sequence[Any], about: dict[str, Any]) -> None:
    """A file of arrays, each bit of them, and a description. The format is npz, which carries checksums."""
    arrays = [np.asarray(array) for array in arrays]
    about = {**about, "dtypes": [array.dtype.name for array in arrays]}
    raw = {
        # NumPy has no name for bfloat16 and its like in a file
        f"leaf_{i}": array.view(f"u{array.dtype.itemsize}") if array.dtype.isbuiltin == 2 else array
        for i, array in enumerate(arrays)
    }
    replace_file(path, lambda file: np.savez(file, about=np.frombuffer(to_json(about), np.uint8), **raw))


def read_arrays(path: Path) -> tuple[list[np.ndarray], dict[str, Any]]:
    """What `save_arrays` saved, or a StoreError: every byte is under a checksum."""
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            about = json.loads(file["about"].tobytes())
            arrays = []
            for i, name in enumerate(about["dtypes"]):
                array = file[f"leaf_{i}"]
                arrays.append(array if array.dtype.name == name else array.view(_dtype(name)))
            return arrays, about
    except Exception as error:  # zip, json and NumPy each have their own for a damaged file
        raise StoreError(f"{path} cannot be read ({in_one_line(error)})") from error


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


def draw_dtypes(dtype: str) -> tuple[np.dtype, np.dtype]:
    """Types of the draws for a reader, and on disk, where Zarr has no bfloat16."""
    return (_dtype(dtype), np.dtype("uint16")) if dtype == "bfloat16" else (np.dtype(dtype), np.dtype(dtype))


def is_run(path: Path) -> bool:
    """Whether a folder is a run, perhaps of another version."""
    try:
        return "hookean" in json.loads((path / "zarr.json").read_bytes())["attributes"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_held(path: Path) -> bool:
    """Whether a process writes the run: the kernel releases its lock with the process, however that ends."""
    import fcntl

    try:
        descriptor = os.open(path / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def read_about(path: Path) -> dict[str, Any]:
    """The description of a run, or a StoreError that says why there is none."""
    try:
        about = json.loads((path / "zarr.json").read_bytes())["attributes"]["hookean"]
        version = about["format"]
        if version > FORMAT:
            raise StoreError(
                f"{path} was made by a newer hookean (format {version}, this one reads {FORMAT}). Upgrade."
            )
        for name in ("chains", "num_draws", "dtype", "leaves", "skeleton", "stats", "columns", "store", "description"):
            about[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not path.exists():
            raise StoreError(f"{path} does not exist. Give the folder that was named in hk.Store(...).") from None
        raise StoreError(
            f"{path} is not a run of hookean, or its zarr.json is damaged ({in_one_line(error)}). Give the folder that "
            "was named in hk.Store(...)."
        ) from error
    return about


def newest_checkpoint(path: Path, chains: int) -> Checkpoint:
    """The newest checkpoint that is whole. Says so where that is not the newest one."""
    found = sorted((int(p.stem), p) for p in (path / "checkpoints").glob("*.npz") if p.stem.isdigit())
    for number, file in reversed(found):
        try:
            leaves, about = read_arrays(file)
            if len(about["draws"]) != chains:
                raise StoreError(f"{file} is of a run with {len(about['draws'])} chains, not {chains}")
            return Checkpoint(leaves, about["facts"], about["draws"], about["log_length"], number)
        except StoreError as error:
            warnings.warn(f"store: {error}. Taking the checkpoint before it.", HookeanWarning, stacklevel=3)
    raise StoreError(f"{path} has no checkpoint that can be read ({len(found)} damaged): the run cannot be resumed")
