"""Runs on disk: what is read is what was kept, whoever is killed, whatever is damaged."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import zarr

from hookean.exchange import Event, Kind
from hookean.store import Store, Stored, Writer, load
from hookean.types import ArgumentError, HookeanWarning, StoreError

Pair = namedtuple("Pair", ["first", "second"])

EVENTS = [Event(Kind.RUN, 0, 3, 1, time=0.5), Event(Kind.SEND, 1, 3, box=2, time=1.25), Event(Kind.LEAVE, 0, time=2.0)]


def draw_of(tree: Any, rows: int, seed: int = 0) -> Any:
    """`rows` random draws of a tree of shapes."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda s: random.normal(size=(rows, *s.shape)).astype(s.dtype), tree)


def shape(*axes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(axes, np.dtype(dtype))


def make(path: Path, tree: Any, num_draws: int = 10, chains: int = 2, **settings: Any) -> Writer:
    """A run of draws of a tree of shapes."""
    draws = jax.tree.map(lambda s: shape(num_draws, *s.shape), tree)
    description = {"law": "none", "settings": {"step": np.float32(0.5)}}
    start, leaves = [np.arange(3.0)], [np.arange(4), np.array(2.5, ml_dtypes.bfloat16)]
    return Writer.create(
        Store(path, **settings),
        draws,
        ["potential", "live"],
        chains,
        description,
        b"pickle",
        start,
        leaves,
        {"steps": 0},
    )


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Any]:
    """A finished run of six draws of two chains, with two checkpoints; chunks hold four draws of `w`."""
    tree = {"b": shape(), "w": shape(65536)}
    writer, draws = make(tmp_path / "run", tree), draw_of(tree, 6)
    for part in (slice(0, 3), slice(3, 6)):
        for chain in range(2):
            rows = jax.tree.map(lambda x, chain=chain, part=part: x[part] + chain, draws)
            writer.keep(chain, part.start, rows, {"potential": np.arange(6)[part]})
        writer.log(EVENTS)
        writer.checkpoint([np.full(1000, part.stop)], {"steps": part.stop})
    writer.close("finished")
    return tmp_path / "run", draws


# ---- round trips


@pytest.mark.parametrize(
    "tree",
    [
        shape(),
        shape(3, 2),
        {"w": shape(3), "b": shape()},
        [shape(2), (shape(), {"x": shape(1, 2)}), []],
        {2: shape(), 10: shape(3), 1: None},
        {"none": None, "empty": shape(0), "thin": shape(3, 0, 2), "full": shape(1)},
        {"a/b": shape(), "a": {"b": shape(2)}, "..": shape(1), "": shape(), "zarr.json": shape(), "é" * 200: shape()},
        {"leaf_001": shape(2), "x/": shape()},
        Pair(shape(2), OrderedDict(z=shape(), a=[shape(1), None])),
        {"double": shape(2, dtype="float64"), "half": shape(dtype="float16")},
    ],
)
def test_any_tree_comes_back(tmp_path: Path, tree: Any) -> None:
    writer, draws = make(tmp_path / "run", tree), draw_of(tree, 4)
    for chain in range(2):
        writer.keep(chain, 0, jax.tree.map(lambda x, chain=chain: x + chain, draws), {})
    writer.close("finished")
    stored = load(tmp_path / "run")
    wanted = jax.tree.map(lambda x: np.stack([x, x + 1]).astype(np.float32), draws)
    found = jax.tree.map(np.asarray, stored.draws)
    if isinstance(tree, Pair):  # becomes dictionaries, in the same order of leaves
        first, second = wanted
        wanted = {"first": first, "second": {"z": second["z"], "a": second["a"]}}
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(found))


def test_everything_else_comes_back(small: tuple[Path, Any]) -> None:
    stored = load(small[0])
    assert stored.description == {"law": "none", "settings": {"step": 0.5}}
    assert stored.progress["draws"] == [6, 6] and stored.progress["state"] == "finished"
    assert stored.progress["pid"] == os.getpid() and stored.progress["facts"] == {"steps": 0}
    assert stored.log() == EVENTS * 2 and stored.log(slice(4, 0, -2)) == (EVENTS * 2)[4:0:-2]
    assert stored.log(slice(-2, None)) == EVENTS[1:] and stored.log(slice(3, 3)) == []
    np.testing.assert_array_equal(stored.start()[0], np.arange(3.0))
    np.testing.assert_array_equal(stored.stats["potential"], [[0, 1, 2, 3, 4, 5]] * 2)
    assert np.isnan(stored.stats["live"][:]).all()  # a statistic nobody gave
    assert stored.configuration() == b"pickle"


def test_checkpoints_keep_every_bit(tmp_path: Path) -> None:
    writer = make(tmp_path / "run", shape())
    writer.close("stopped")
    leaves = [
        np.array(np.pi, np.float64),
        np.array([[np.nan, -0.0]], np.float32),
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array([1.5, np.nan], ml_dtypes.bfloat16),
        np.array(-2, ml_dtypes.float8_e4m3fn),
        np.zeros((0, 3), bool),
    ]
    writer, checkpoint = Writer.reopen(tmp_path / "run")
    assert checkpoint.leaves[1].dtype == ml_dtypes.bfloat16 and checkpoint.leaves[1] == 2.5
    writer.checkpoint(leaves, {"key": [1, 2]})
    writer.close("stopped")
    writer, checkpoint = Writer.reopen(tmp_path / "run")
    writer.close("stopped")
    assert checkpoint.facts == {"key": [1, 2]}
    for found, wanted in zip(checkpoint.leaves, leaves, strict=True):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_draws_have_the_type_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    writer = make(tmp_path / "run", shape(3), dtype=dtype)
    draws = np.random.default_rng(0).normal(size=(4, 3)) * [1, 1e-3, 1e300]
    writer.keep(0, 0, draws, {})
    writer.keep(1, 0, draws[:2], {})
    writer.close("finished")
    found = load(tmp_path / "run").draws[:]
    wanted = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    assert found.dtype == wanted
    with np.errstate(over="ignore"):
        assert found[0].tobytes() == draws.astype(wanted).tobytes()
    assert np.isnan(found[1, 2:].astype(float)).all() and not np.isnan(found[1, :2].astype(float)).any()


def test_rows_may_come_in_pieces_again_and_late(tmp_path: Path) -> None:
    writer = make(tmp_path / "run", shape(2), num_draws=3000, chains=1)
    wanted = np.full((3000, 2), np.nan, np.float32)
    random = np.random.default_rng(1)

    def keep(first: int, rows: int) -> None:
        wanted[first : first + rows] = random.normal(size=(rows, 2))
        writer.keep(0, first, wanted[first : first + rows], {"potential": wanted[first : first + rows, 0]})

    for first, rows in [(0, 1), (1, 5), (6, 1500), (1000, 20), (1010, 3), (1506, 1), (2900, 50), (2600, 1), (2950, 0)]:
        keep(first, rows)
        if random.random() < 0.5:
            writer.flush()
    writer.flush()
    stored = load(tmp_path / "run")
    np.testing.assert_array_equal(stored.draws[0], wanted[:2950])
    np.testing.assert_array_equal(stored.stats["potential"][0], wanted[:2950, 0])
    for first, draws in [(2999, np.zeros((2, 2))), (-1, np.zeros((1, 2))), (0, np.zeros((1, 3)))]:
        with pytest.raises(ValueError, match="draws"):
            writer.keep(0, first, draws, {})
    writer.close("finished")


def test_what_is_kept_is_a_copy(tmp_path: Path) -> None:
    writer, rows = make(tmp_path / "run", shape(2)), np.ones((1, 2), np.float32)
    writer.keep(0, 0, rows, {"potential": rows[:, 0]})
    rows[:] = 2
    writer.close("finished")
    stored = load(tmp_path / "run")
    assert stored.draws[0].tolist() == [[1, 1]] and stored.stats["potential"][0].tolist() == [1]


def test_threads_may_keep_at_once(tmp_path: Path) -> None:
    writer = make(tmp_path / "run", shape(2), num_draws=300, chains=4)

    def work(chain: int) -> None:
        for draw in range(300):
            writer.keep(chain, draw, np.full((1, 2), 1000.0 * chain + draw), {})
            writer.log([Event(Kind.RUN, chain, draw)])
            if draw % 100 == 99:
                writer.flush()

    threads = [threading.Thread(target=work, args=(chain,)) for chain in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close("finished")
    stored = load(tmp_path / "run")
    np.testing.assert_array_equal(stored.draws[:, :, 0], 1000.0 * np.arange(4)[:, None] + np.arange(300))
    log = stored.log()
    assert [[e.steps for e in log if e.worker == chain] for chain in range(4)] == [list(range(300))] * 4


KEYS: list[Any] = [
    (),
    ...,
    0,
    -1,
    np.int64(1),
    slice(None, None, -1),
    (0, 3),
    (slice(None), 4, 2),
    (slice(None), slice(1, 9, 3), slice(None), 0),
    (slice(None), slice(9, 1, -3), slice(None, None, -2)),
    (slice(5, 2), 0),
    (..., 1),
    (0, ..., [1, 0, 1]),
    (None, 1, None, [0, 5, -1]),
    ([0, 1, 1], [3, 0, 9]),
    ([[0], [1]], [4, 4, 2], 1),
    (slice(None), [], 1),
    (slice(None), np.arange(11) % 4 == 1),
    (np.arange(22).reshape(2, 11) % 5 == 2, 1),
    (np.array(1), np.array([2]), slice(None), np.array([[True, False]] * 1)[0]),
    (1, slice(None), [0, 2], [1, 1]),
    ([1], slice(None), [0]),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indexing_is_that_of_numpy(tmp_path: Path, key: Any) -> None:
    writer = make(tmp_path / "run", shape(3, 2), num_draws=20)
    draws = np.random.default_rng(2).normal(size=(2, 11, 3, 2)).astype(np.float32)
    writer.keep(0, 0, draws[0], {})
    writer.keep(1, 0, draws[1, :7], {})
    writer.close("finished")
    draws[1, 7:] = np.nan
    lazy = load(tmp_path / "run").draws
    found = lazy[key]
    np.testing.assert_array_equal(found, draws[key], strict=True)
    assert (lazy.shape, lazy.ndim, len(lazy), lazy.size, lazy.dtype) == (draws.shape, 4, 2, draws.size, draws.dtype)


@pytest.mark.parametrize("key", [2, (0, 11), (0, 0, 0, 0, 0), [1.5], "w", (0, [0, 12]), np.ones(3, bool), True])
def test_a_wrong_index_is_an_index_error(small: tuple[Path, Any], key: Any) -> None:
    with pytest.raises(IndexError):
        load(small[0]).draws["w"][key]


def test_any_reader_of_zarr_opens_it(small: tuple[Path, Any]) -> None:
    group = zarr.open_group(small[0], mode="r")
    assert group.attrs["hookean"]["format"] == 1
    array = group["chain_001/draws/w"]
    assert array.shape == (10, 65536)
    np.testing.assert_array_equal(array[:6], (small[1]["w"] + 1))
    assert np.isnan(array[6:]).all()
    assert group["log/events"].shape == (6, len(Event._fields) - 1)
    assert group["log/times"][:3].tolist() == [
        0.5,
        1.25,
        2.0,
    ]


# ---- where a run can be made


def test_a_store_that_cannot_be_is_refused(tmp_path: Path, small: tuple[Path, Any]) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "zarr.json").write_text('{"attributes": {}}')
    for store, words in [
        (Store(small[0]), "hk.resume"),
        (Store(tmp_path / "file"), "is a file"),
        (Store(tmp_path / "file" / "below"), "nothing can be written"),
        (Store(tmp_path / "full", overwrite=True), "something else"),
        (Store(tmp_path / "zarr", overwrite=True), "something else"),
        (Store(tmp_path / "new", dtype="float16"), "float32, bfloat16"),
        (Store(tmp_path / "new", flush_seconds=-1.0), "flush_seconds"),
        (Store(tmp_path / "new", checkpoint_seconds=float("nan")), "checkpoint_seconds"),
        (Store(tmp_path / "new", keep_checkpoints=0), "keep_checkpoints"),
        (Store(""), "path"),
        (Store(3), "path"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(ArgumentError, match="store") as caught:
            store.check()
        assert words in str(caught.value)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new/deep"):
        Store(tmp_path / name).check()
        make(tmp_path / name, shape()).close("finished")
        assert load(tmp_path / name).draws.shape == (2, 0)


def test_a_store_needs_zarr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="pip install zarr"):
        Store(tmp_path / "run").check()


def test_an_older_run_is_replaced_when_asked_and_when_nobody_writes_it(small: tuple[Path, Any]) -> None:
    writer, _ = Writer.reopen(small[0])
    with pytest.raises(StoreError, match="being written"):
        make(small[0], shape(), overwrite=True)
    writer.close("stopped")
    assert load(small[0]).draws["w"][:].shape == (2, 6, 65536)
    make(small[0], shape(), overwrite=True).close("finished")
    assert load(small[0]).draws.shape == (2, 0)
    assert os.listdir(small[0].parent) == ["run"]


def test_a_run_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookean.store.writer._build", full)
    with pytest.raises(StoreError, match=r"could not be made .*No space left"):
        make(tmp_path / "run", shape())
    assert os.listdir(tmp_path) == []


# ---- going on


def test_reopening_goes_back_to_the_checkpoint_and_makes_room(tmp_path: Path) -> None:
    writer, draws = make(tmp_path / "run", shape(2)), draw_of(shape(2), 15)
    writer.keep(0, 0, draws[:5], {})
    writer.log(EVENTS)
    writer.checkpoint([np.arange(5)], {"steps": 5})
    writer.keep(0, 5, draws[5:9], {})
    writer.keep(1, 0, draws[:9], {})
    writer.log(EVENTS)
    writer.close("stopped")
    assert load(tmp_path / "run").progress["draws"] == [9, 9]

    writer, checkpoint = Writer.reopen(tmp_path / "run", num_draws=15)
    assert (checkpoint.draws, checkpoint.log_length, checkpoint.facts) == ([5, 0], 3, {"steps": 5})
    stored = load(tmp_path / "run")
    assert stored.progress["draws"] == [5, 0] and stored.progress["state"] == "running"
    assert stored.log() == EVENTS
    np.testing.assert_array_equal(stored.draws[0], draws[:5])
    assert np.isnan(stored.draws[1]).all()
    writer.keep(0, 5, draws[5:], {})
    writer.log(EVENTS[:1])
    writer.close("finished")
    stored.refresh()
    np.testing.assert_array_equal(stored.draws[0], draws)
    assert stored.log() == EVENTS + EVENTS[:1]


def test_reopening_brings_back_what_was_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Writer._write

    def watched(writer: Writer, folder: str, first: int, rows: np.ndarray) -> None:
        assert load(writer.path).progress["draws"][0] <= first, "a row counts while it is overwritten"
        write(writer, folder, first, rows)

    monkeypatch.setattr(Writer, "_write", watched)
    writer, draws = make(tmp_path / "run", shape(2)), draw_of(shape(2), 9)
    writer.keep(0, 0, draws[:6], {"potential": draws[:6, 0]})
    writer.checkpoint([], {"steps": 6})
    for first in (4, 2, 5):
        writer.keep(0, first, np.zeros((3, 2)), {"potential": np.zeros(3)})
        writer.flush()
    os.close(writer._lock)  # as if killed
    assert load(tmp_path / "run").draws[0, 2:8].max() == 0
    for _ in range(2):  # going on twice from the same place
        writer, checkpoint = Writer.reopen(tmp_path / "run")
        assert checkpoint.draws == [6, 0]
        stored = load(tmp_path / "run")
        np.testing.assert_array_equal(stored.draws[0], draws[:6])
        np.testing.assert_array_equal(stored.stats["potential"][0], draws[:6, 0])
        writer.keep(0, 1, np.ones((3, 2)), {})
        writer.flush()
        os.close(writer._lock)
    assert len(list((tmp_path / "run" / "checkpoints").glob("undo_*"))) == 1


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    writer = make(tmp_path / "run", shape(), num_draws=100, keep_checkpoints=3)
    for number in range(1, 6):
        writer.keep(0, number, np.zeros(1), {})
        writer.keep(0, 0, np.zeros(1), {})
        writer.checkpoint([np.array(number)], {})
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert [name for name in names if not name.startswith("undo")] == ["000003.npz", "000004.npz", "000005.npz"]
    assert [name[:11] for name in names if name.startswith("undo")] == ["undo_000003", "undo_000004"]
    writer.close("finished")


def test_what_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, now = make(tmp_path / "run", shape(), flush_seconds=2.0, checkpoint_seconds=60.0), time.monotonic()
    for later, flush, checkpoint in [(0.5, False, False), (3.0, True, False), (61.0, True, True)]:
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        assert (writer.due(), writer.checkpoint_due()) == (flush, checkpoint)
    writer.checkpoint([], {})
    assert not writer.due() and not writer.checkpoint_due()
    monkeypatch.undo()
    monkeypatch.setattr("hookean.store.writer.BUFFER_BYTES", 10)
    writer.keep(0, 0, np.zeros(10), {})
    assert writer.due()
    writer.close("finished")


# ---- damage


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink])
def test_a_damaged_chunk_is_named_and_the_rest_is_read(small: tuple[Path, Any], damage: Callable[[Path], None]) -> None:
    path, draws = small
    damage(path / "chain_001" / "draws" / "w" / "c" / "1" / "0")  # draws 4 to 7
    stored = load(path)
    for key in [(1, 5), (slice(None), slice(2, None)), ..., (1, [0, 5])]:
        with pytest.raises(StoreError, match=r"chain 1, leaf 'w', draws 4 to 7: the chunk is (damaged|missing)"):
            stored.draws["w"][key]
    np.testing.assert_array_equal(stored.draws["w"][0], draws["w"])
    np.testing.assert_array_equal(stored.draws["w"][1, :4], draws["w"][:4] + 1)
    damage(path / "chain_000" / "stats" / "live" / "c" / "0")
    with pytest.raises(StoreError, match=r"chain 0, statistic 'live', draws 0 to"):
        np.asarray(stored.stats["live"])


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_chunk_is_not_added_to(small: tuple[Path, Any], damage: Callable[[Path], None]) -> None:
    damage(small[0] / "chain_001" / "draws" / "w" / "c" / "1" / "0")
    writer, _ = Writer.reopen(small[0])
    writer.keep(1, 6, {"b": np.zeros(1), "w": np.zeros((1, 65536))}, {})
    with pytest.raises(StoreError, match="could not be written"):
        writer.flush()
    writer.close("failed")
    with pytest.raises(StoreError, match=r"chain 1, leaf 'w', draws 4 to 7"):
        load(small[0]).draws["w"][1, 5]


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["log/events/c/0/0", "log/times/c/0", "log/events/zarr.json"])
def test_a_damaged_log_is_an_error(small: tuple[Path, Any], damage: Callable[[Path], None], name: str) -> None:
    damage(small[0] / name)
    if name.endswith("json") and damage is flip:
        (small[0] / name).write_text(json.dumps({"zarr_format": 3}))
    with pytest.raises(StoreError, match="the log"):
        load(small[0]).log()


def test_a_log_cut_short_is_an_error(small: tuple[Path, Any]) -> None:
    zarr.open_array(small[0] / "log" / "events", mode="r+").resize((4, 5))
    with pytest.raises(StoreError, match=r"the log, events: .*\[4, 5\]"):
        load(small[0]).log()


@pytest.mark.parametrize("damage", [truncate, empty, flip])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    small: tuple[Path, Any], damage: Callable[[Path], None]
) -> None:
    path, draws = small
    damage(path / "checkpoints" / "000002.npz")
    with pytest.warns(HookeanWarning, match=r"000002\.npz cannot be read .* Taking the checkpoint before it"):
        writer, checkpoint = Writer.reopen(path)
    assert (checkpoint.facts, checkpoint.draws, checkpoint.log_length) == ({"steps": 3}, [3, 3], 3)
    np.testing.assert_array_equal(checkpoint.leaves[0], np.full(1000, 3))
    stored = load(path)
    np.testing.assert_array_equal(stored.draws["b"][0], draws["b"][:3])
    writer.checkpoint([], {"steps": 9})
    writer.close("stopped")
    writer, checkpoint = Writer.reopen(path)
    assert checkpoint.facts == {"steps": 9}
    writer.close("stopped")

    for file in (path / "checkpoints").iterdir():
        damage(file)
    with (
        pytest.warns(HookeanWarning, match="cannot be read"),
        pytest.raises(StoreError, match="no checkpoint that can be read"),
    ):
        Writer.reopen(path)
    assert load(path).draws["b"][:].shape == (2, 3)  # what there is can be read


def test_every_flipped_bit_of_a_checkpoint_is_seen_or_harmless(small: tuple[Path, Any]) -> None:
    from hookean.store.layout import read_arrays

    file, random = small[0] / "checkpoints" / "000002.npz", np.random.default_rng(3)
    good, seen = file.read_bytes(), 0
    for place in random.integers(len(good), size=300):
        data = bytearray(good)
        data[place] ^= 1 << random.integers(8)
        file.write_bytes(data)
        try:
            (leaf,), about = read_arrays(file)
        except StoreError:
            seen += 1
        else:
            assert (leaf == 6).all() and about["draws"] == [6, 6]
    assert seen > 200


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"draws": [6]}', b"\xff\x00", "huge", "negative"])
def test_without_progress_the_checkpoint_counts(small: tuple[Path, Any], content: Any) -> None:
    path, draws = small
    file = path / "progress.json"
    about = json.loads(file.read_bytes())
    if content is None:
        file.unlink()
    elif isinstance(content, str):
        file.write_text(json.dumps({**about, "draws": [6, 11 if content == "huge" else -1]}))
    else:
        file.write_bytes(content)
    with pytest.warns(HookeanWarning, match=r"progress\.json cannot be read .*checkpoint 2"):
        stored = load(path)
    assert stored.progress["draws"] == [6, 6] and stored.progress["state"] == "unknown"
    np.testing.assert_array_equal(stored.draws["b"][1], draws["b"] + 1)
    writer, _ = Writer.reopen(path)
    writer.close("stopped")
    assert load(path).progress["state"] == "stopped"


def test_what_is_no_run_is_an_error(tmp_path: Path, small: tuple[Path, Any]) -> None:
    attributes = json.loads((small[0] / "zarr.json").read_bytes())
    attributes["attributes"]["hookean"] = {"format": 2, "something": "new"}
    newer, other, garbage = tmp_path / "newer", tmp_path / "other", tmp_path / "garbage"
    for path in (newer, other, garbage):
        path.mkdir()
    (newer / "zarr.json").write_text(json.dumps(attributes))
    zarr.create_group(other, overwrite=True)
    (garbage / "zarr.json").write_bytes(b"\x00{")
    for path, words in [
        (newer, "made by a newer hookean"),
        (other, "not a run of hookean"),
        (garbage, "not a run of hookean"),
        (tmp_path, "not a run of hookean"),
        (tmp_path / "nothing", "does not exist"),
        (small[0] / "lock", "not a run of hookean"),
    ]:
        for action in (load, Writer.reopen):
            with pytest.raises(StoreError, match=words):
                action(path)
    for name in ("start.npz", "configuration.pkl"):
        (small[0] / name).unlink()
    for action in (Stored.start, Stored.configuration):
        with pytest.raises(StoreError, match="cannot be read"):
            action(load(small[0]))


def test_an_array_with_a_false_description_is_an_error(small: tuple[Path, Any]) -> None:
    file = small[0] / "chain_000" / "draws" / "b" / "zarr.json"
    good = file.read_text()
    for old, new in [("float32", "int32"), ("10", "3"), ('"zarr_format": 3', '"zarr_format": 4')]:
        assert old in good
        file.write_text(good.replace(old, new, 1))
        with pytest.raises(StoreError, match=r"chain 0, leaf 'b', draws"):
            load(small[0]).draws["b"][:]


# ---- disks that fail


def test_a_full_disk_is_an_error_and_what_counts_is_whole(tmp_path: Path) -> None:
    tree = {"b": shape(), "w": shape(65536)}
    writer, draws = make(tmp_path / "run", tree, chains=1), draw_of(tree, 10)
    part = lambda a, b: jax.tree.map(lambda x: x[a:b], draws)  # noqa: E731
    writer.keep(0, 0, part(0, 4), {})
    writer.checkpoint([np.zeros(3)], {"steps": 4})
    writer.keep(0, 2, part(2, 8), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))  # a chunk of w has 1 MiB
    try:
        with pytest.raises(StoreError, match=r"could not be written .*File too large.*Safe on disk: .*hk\.resume"):
            writer.flush()
        for action in (writer.flush, lambda: writer.checkpoint([], {})):
            with pytest.raises(StoreError, match="could not be written"):
                action()
        writer.close("failed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    stored = load(tmp_path / "run")
    (count,) = stored.progress["draws"]
    assert count in (2, 4) and stored.progress["state"] == "failed"
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[0], stored.draws), part(0, count))
    writer, checkpoint = Writer.reopen(tmp_path / "run")
    assert checkpoint.draws == [4]
    assert not [p for p in (tmp_path / "run").rglob("*.partial")], "what was half written is cleared away"
    writer.keep(0, 4, part(4, 10), {})
    writer.close("finished")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[0], stored.refresh().draws), draws)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    small: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = Writer.reopen(small[0])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(StoreError, match=r"No space left.*checkpoint 2"):
        writer.checkpoint([np.zeros(3)], {})
    writer.close("failed")
    monkeypatch.undo()
    assert sorted(p.name for p in (small[0] / "checkpoints").iterdir()) == ["000001.npz", "000002.npz"]
    writer, checkpoint = Writer.reopen(small[0])
    writer.close("stopped")
    assert checkpoint.number == 2


# ---- several processes

BEGIN = """
import os, signal, sys, time
import numpy as np
from hookean.exchange import Event, Kind
from hookean.store import Store, Writer, load
from hookean.types import StoreError

path = sys.argv[1]

def rows(chain, first, count, generation):
    value = 1e6 * generation + 1e4 * chain + np.arange(first, first + count, dtype=float)
    return {"w": value[:, None] * [1, 2, 3], "b": -value}, {"value": value}

def make(num_draws):
    shapes = {"w": np.empty((num_draws, 3)), "b": np.empty(num_draws)}
    return Writer.create(Store(path, dtype="float64"), shapes, ["value"], 2, {}, b"", [], [np.empty((2, 0))], {})
"""


def start(script: str, *arguments: Any) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_one_process_writes_and_others_read_meanwhile(tmp_path: Path) -> None:
    script = """
assert "zarr" not in sys.modules, "sampling without a store needs no zarr"
writer, sent = make(100_000), 0
print("ready", flush=True)
while True:
    for chain in range(2):
        writer.keep(chain, sent, *rows(chain, sent, 7 + chain, 0))
    sent += 7
    writer.log([Event(Kind.RUN, steps=sent)])
    writer.flush()
"""
    path = tmp_path / "run"
    process = start(script, path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    try:
        with pytest.raises(StoreError, match=rf"being written by another process \(pid {process.pid} on "):
            Writer.reopen(path)
        stored, looks, deadline = load(path), set(), time.monotonic() + 60
        while len(looks) < 30 and time.monotonic() < deadline:
            counts = stored.refresh().progress["draws"]
            looks.add(tuple(counts))
            w, b = stored.draws["w"][:], stored.draws["b"][:]
            for chain, count in enumerate(counts):
                value = 1e4 * chain + np.arange(count)
                np.testing.assert_array_equal(w[chain, :count], value[:, None] * [1, 2, 3])
                np.testing.assert_array_equal(b[chain, :count], -value)
                assert np.isnan(w[chain, count:]).all() and np.isnan(b[chain, count:]).all()
            assert [event.steps for event in stored.log()] == list(range(7, min(counts) + 1, 7))
        assert len(looks) > 5  # thirty, unless the machine is very busy
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    writer, checkpoint = Writer.reopen(path)  # the lock went with the process
    assert checkpoint.draws == [0, 0]
    writer.close("stopped")


def test_kills_at_any_moment_lose_nothing_that_counts(tmp_path: Path) -> None:
    """Children write, fall back, overwrite and checkpoint until they are killed, the next one checks and goes on."""
    script = """
def check():
    stored = load(path)
    w, b, s = stored.draws["w"][:], stored.draws["b"][:], stored.stats["value"][:]
    for chain, count in enumerate(stored.progress["draws"]):
        value = -b[chain, :count]
        assert (w[chain, :count] == value[:, None] * [1, 2, 3]).all(), (chain, w[chain, :count], value)
        assert (s[chain, :count] == value.astype(np.float32)).all()
        assert (value % 1e6 == 1e4 * chain + np.arange(count)).all(), (chain, value)
    assert [event.steps for event in stored.log()] == list(range(stored.progress["log_length"]))
    return -b

def live(generation, ready):
    check()
    writer, checkpoint = Writer.reopen(path)
    wanted = checkpoint.leaves[0]  # the draws as they were at the checkpoint, all of them
    found = check()
    for chain, count in enumerate(checkpoint.draws):
        assert (found[chain, :count] == wanted[chain, :count]).all(), "not as at the checkpoint"
    os.write(ready, b"r")
    random, counts, log = np.random.default_rng(generation), list(checkpoint.draws), checkpoint.log_length
    mirror = np.full((2, 5000), np.nan)
    mirror[:, : wanted.shape[1]] = wanted
    while True:
        for chain in range(2):
            first = max(0, counts[chain] - (int(random.integers(30)) if random.random() < 0.3 else 0))
            count = int(random.integers(1, 12))
            draws, stats = rows(chain, first, count, generation)
            writer.keep(chain, first, draws, stats)
            mirror[chain, first : first + count] = -draws["b"]
            counts[chain] = max(counts[chain], first + count)
        writer.log([Event(Kind.RUN, steps=log)])
        log += 1
        writer.flush()
        if random.random() < 0.3:
            writer.checkpoint([mirror[:, : max(counts)]], {})

make(5000).close("stopped")
random, kills = np.random.default_rng(0), int(sys.argv[2])
for generation in range(1, kills + 1):
    receive, ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            live(generation, ready)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    os.close(ready)
    began = os.read(receive, 1)
    os.close(receive)
    if random.random() < 0.9:
        time.sleep(random.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert began == b"r" and os.WIFSIGNALED(status), "a child found something wrong"
check()
print(load(path).progress["draws"], len(os.listdir(path + "/checkpoints")))
"""
    process = start(script, tmp_path / "run", 60)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert min(json.loads(output[: output.index("]") + 1])) > 50, output


def test_a_run_killed_while_it_is_made_is_there_or_not(tmp_path: Path) -> None:
    script = """
import shutil
random = np.random.default_rng(1)
for _ in range(20):
    shutil.rmtree(path, ignore_errors=True)
    child = os.fork()
    if child == 0:
        make(10)
        os._exit(0)
    time.sleep(random.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if os.path.exists(path):
        writer = os.fork()
        if writer == 0:
            code = 1
            try:
                Writer.reopen(path)[0].close("stopped")
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(writer, 0)[1] == 0
"""
    process = start(script, tmp_path / "run")
    process.communicate(timeout=120)
    assert process.returncode == 0


# ---- size


def test_a_huge_run_opens_at_once(tmp_path: Path) -> None:
    """100 GB, of which nearly all is forged: three chunks and the counts."""
    path = tmp_path / "run"
    writer = make(path, {"w": shape(1000, 1000)}, num_draws=25_000, chains=1)
    row = np.random.default_rng(4).normal(size=(1, 1000, 1000)).astype(np.float32)
    writer.keep(0, 0, {"w": row}, {})
    writer.close("stopped")
    progress = json.loads((path / "progress.json").read_bytes())
    (path / "progress.json").write_text(json.dumps({**progress, "draws": [25_000]}))
    chunks = path / "chain_000" / "draws" / "w" / "c"
    for draw in (12_345, 24_999):
        shutil.copytree(chunks / "0", chunks / str(draw))

    began = time.perf_counter()
    lazy = load(path).draws["w"]
    assert lazy.shape == (1, 25_000, 1000, 1000) and lazy.size * 4 == 100e9
    assert time.perf_counter() - began < 1.0
    began = time.perf_counter()
    np.testing.assert_array_equal(lazy[0, [0, 12_345, -1], 3, 5:7], np.repeat(row[:, 3, 5:7], 3, 0))
    assert time.perf_counter() - began < 1.0
    with pytest.raises(StoreError, match="leaf 'w', draws 1 to 1: the chunk is missing"):
        lazy[0, :, 3, 5]


def test_what_a_draw_of_5_megabytes_costs(tmp_path: Path) -> None:
    tree = {"w": shape(1000, 1300), "b": shape(1000)}
    writer, draws = make(tmp_path / "run", tree, num_draws=20, chains=1), draw_of(tree, 1)
    began = time.perf_counter()
    for draw in range(20):
        writer.keep(0, draw, draws, {})
        writer.flush()
    seconds = (time.perf_counter() - began) / 20
    began = time.perf_counter()
    writer.checkpoint([draws["w"]], {})
    print(f"{1e3 * seconds:.1f} ms a draw, {1e3 * (time.perf_counter() - began):.1f} ms a checkpoint")
    writer.close("finished")
    assert seconds < 1.0  # some ten milliseconds where nothing else is going on
