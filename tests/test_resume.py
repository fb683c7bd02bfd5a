"""Runs that are stopped, killed and damaged go on as if nothing had happened. About 4 minutes, half of them kills."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import hookean as hk
from hookean.exchange import Kind

ROOT = Path(__file__).resolve().parents[1]
Layers = namedtuple("Layers", ["first", "second"])


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run, its continuation and its repetition are one program, and need be compiled but once."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


# -- what is run -------------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3)).astype(np.float32)
Y = (X @ [1.0, -1.0, 0.5] + RANDOM.normal(size=40)).astype(np.float32)
DICT = {"slope": np.zeros(3, np.float32), "level": np.float32(0.5)}


def line(w: Any, batch: Any) -> jax.Array:
    slope, level = jax.tree.leaves(w)[::-1] if isinstance(w, dict) else jax.tree.leaves(w)
    return -((batch[1] - batch[0] @ slope - level) ** 2) / 2


def prior(w: Any) -> jax.Array:
    return -sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(w)) / 2


def regression(**settings: Any) -> hk.Target:
    return hk.Target(line, prior, (X, Y), batch_size=8, **settings)


def stream(chain: int) -> Iterator[Any]:
    rows = np.random.default_rng(chain)
    while True:
        chosen = rows.integers(0, len(Y), size=8)
        yield X[chosen], Y[chosen]


class Case(NamedTuple):
    """One kind of run; `settings` are those of hk.sample."""

    settings: dict[str, Any]
    engine: hk.Engine = hk.Vectorised()
    target: Callable[[], hk.Target] = regression
    init: Any = DICT
    dtype: str = "float32"

    def sample(self, path: Path | None = None, **others: Any) -> hk.Run:
        usual = {"dynamics": hk.SGHMC(0.05), "chains": 3, "num_steps": 240, "warmup": 24, "thin": 3, "seed": 3}
        store = None if path is None else hk.Store(path, self.dtype, checkpoint_seconds=0.05, flush_seconds=0.0)
        settings = {**usual, "engine": self.engine, **self.settings, **others}
        with quietly():
            return hk.sample(self.target(), self.init, progress=False, store=store, **settings)

    def resume(self, path: Path, **others: Any) -> hk.Run:
        with quietly():
            return hk.resume(path, self.target(), progress=False, **others)

    def replay(self, path: Path) -> Any:
        with quietly():
            return hk.replay(path, self.target(), progress=False)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """What warns of coupled draws and the like is tested elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hk.HookeanWarning)
        yield


ELASTIC = hk.Elastic(0.5, 8)
CRASHES = hk.Simulated(
    hk.Scenario(latency=1.5, crashes=[hk.Crash(0, 60, restart_after=9.0), hk.Crash(1, 130)], joins=[hk.Join(2, 20.0)])
)
BARRIER = hk.Simulated(hk.Scenario(barrier=True))
DETERMINISTIC = {
    "vectorised, a lambda as step": Case(
        {"dynamics": hk.SGHMC(lambda step: 0.05 / (1 + step / 200)), "coupling": ELASTIC}
    ),
    "vectorised, stale gradients": Case({"coupling": hk.StaleGradient(4, 2), "dynamics": hk.SGHMC(0.01)}),
    "crashes": Case({"coupling": ELASTIC}, CRASHES),
    "crashes, stale gradients": Case({"coupling": hk.StaleGradient(4, 2), "dynamics": hk.SGHMC(0.01)}, CRASHES),
    "barrier": Case({"coupling": ELASTIC}, BARRIER),
    "pSGLD": Case({"dynamics": hk.PSGLD(0.01)}),
    "SGNHT, named tuples": Case({"dynamics": hk.SGNHT(0.03)}, init=Layers(np.zeros(3), (np.float32(0.1),))),
    "scale-adapted, optax": Case(
        {"dynamics": hk.ScaleAdaptedSGHMC(optax.cosine_decay_schedule(0.05, 400)), "coupling": hk.Elastic(1, 4)}
    ),
    "released": Case({"coupling": hk.Elastic(1, 8, schedule=hk.release())}),
    "epochs": Case({}, target=lambda: regression(batching="epochs")),
    "bfloat16": Case({}, init=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), DICT), dtype="bfloat16"),
    "batches of one's own": Case(
        {"chains": 2}, target=lambda: hk.Target.from_batches(line, prior, stream, num_examples=40)
    ),
    "batches of one's own, crashes": Case(
        {"coupling": ELASTIC}, CRASHES, lambda: hk.Target.from_batches(line, prior, stream, num_examples=40)
    ),
}  # fmt: skip
THREADED = {
    "threads": Case({"coupling": ELASTIC}, hk.Threads()),
    "threads, stale gradients": Case({"coupling": hk.StaleGradient(4, 2), "dynamics": hk.SGHMC(0.01)}, hk.Threads()),
    "threads, independent": Case({"dynamics": hk.SGNHT(0.03)}, hk.Threads(), init=Layers(np.zeros(3), (np.zeros(()),))),
}


def after(step: int, act: Callable[[hk.Window], Any] = lambda window: window.run.stop()) -> Callable[[hk.Window], None]:
    """A callback that does something once a chain is past a step."""
    done: list[bool] = []

    def callback(window: hk.Window) -> None:
        if window.step >= step and not done:
            done.append(True)
            act(window)

    return callback


def numbers(run: hk.Run) -> list[np.ndarray]:
    return [
        np.asarray(leaf) for leaf in (*jax.tree.leaves(run.draws), *(run.stats[name] for name in sorted(run.stats)))
    ]


def assert_same_bits(found: hk.Run, wanted: hk.Run, message: str = "") -> None:
    for left, right in zip(numbers(found), numbers(wanted), strict=True):
        assert left.dtype == right.dtype and left.shape == right.shape, message
        assert left.tobytes() == np.ascontiguousarray(right).tobytes(), message


def assert_no_draw_lost_or_doubled(run: hk.Run, num_steps: int) -> None:
    """By the log: each chain took each step once and kept each draw once; and the draws are there."""
    assert all(np.isfinite(leaf.astype(float)).all() for leaf in numbers(run)[: len(jax.tree.leaves(run.draws))])
    log, kept = run.log(), run.stats["potential"].shape[1]
    assert kept == len(run.kept_steps)
    for chain in range(run.config["chains"]):
        own = [event for event in log if event.kind is Kind.RUN and event.worker == chain]
        assert sum(event.steps for event in own) == num_steps
        if run.stats["potential"].shape[0] > 1:
            assert [event.draw for event in own if event.draw >= 0] == list(range(kept))
    if run.stats["potential"].shape[0] == 1:  # the server's chain
        draws = [event.draw for event in log if event.kind is Kind.REPORT and event.draw >= 0]
        assert draws == list(range(kept))


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    case, path = DETERMINISTIC[name], tmp_path / "run"
    whole = case.sample()
    stopped = case.sample(path, callbacks=[after(40)])
    assert stopped.stored.state == "stopped" and 40 <= stopped.info["steps"] < 240
    assert stopped.stats["potential"].shape[1] < whole.stats["potential"].shape[1]
    assert_same_bits(case.resume(path), whole)
    assert hk.load(path).stored.state == "finished"
    assert case.replay(path).agrees

    if isinstance(case.engine, hk.Simulated):
        assert case.replay(path).agrees


@pytest.mark.parametrize("name", ["vectorised, a lambda as step", "vectorised, stale gradients", "crashes", "barrier"])
def test_a_finished_run_can_be_made_longer(name: str, tmp_path: Path) -> None:
    """With `Vectorised`, as if it had been so from the start."""
    case, path = DETERMINISTIC[name], tmp_path / "run"
    short = case.sample(path)
    wanted, kept = numbers(short), short.stats["potential"].shape[1]
    stopped = case.resume(path, num_steps=401, callbacks=[after(250)])  # 401 is no multiple of anything
    assert stopped.stored.state == "stopped"
    longer = case.resume(path)
    assert longer.stats["potential"].shape[1] == len(longer.kept_steps) > kept
    for found, before in zip(numbers(longer), wanted, strict=True):
        np.testing.assert_array_equal(found[:, :kept], before)
    if isinstance(case.engine, hk.Vectorised):
        assert_same_bits(longer, case.sample(num_steps=401))
    else:
        comparison = case.replay(path)
        assert comparison.agrees and comparison.draws > 2 * kept, str(comparison)


@pytest.mark.parametrize("name", THREADED)
def test_threads_lose_and_double_no_draw(name: str, tmp_path: Path) -> None:
    case, path = THREADED[name], tmp_path / "run"
    stopped = case.sample(path, callbacks=[after(60)], num_steps=600)
    assert stopped.stored.state == "stopped"
    assert_no_draw_lost_or_doubled(case.resume(path), 600)
    longer = case.resume(path, num_steps=701)
    assert_no_draw_lost_or_doubled(longer, 701)
    comparison = case.replay(path)
    assert comparison.differing == 0 and comparison.draws == longer.stats["potential"].size, str(comparison)


def test_double_precision(tmp_path: Path) -> None:
    case = Case({"coupling": ELASTIC}, init={"slope": np.zeros(3), "level": np.array(0.5)}, dtype="float64")
    with jax.enable_x64(True):
        whole = case.sample()
        assert numbers(whole)[0].dtype == np.float64
        case.sample(tmp_path / "run", callbacks=[after(90)])
        assert_same_bits(case.resume(tmp_path / "run"), whole)
    with pytest.raises(hk.ArgumentError, match=r"jax_enable_x64: was on .*Turn it on"):
        case.resume(tmp_path / "run", num_steps=500)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------

SIMPLE = {
    "vectorised": DETERMINISTIC["vectorised, a lambda as step"],
    "simulated": DETERMINISTIC["crashes"],
    "threads": THREADED["threads"],
}


@pytest.mark.parametrize("name", SIMPLE)
def test_one_interrupt_stops_in_order(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case, path = SIMPLE[name], tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    press = after(90, lambda window: signal.raise_signal(signal.SIGINT))
    with pytest.raises(hk.Interrupted, match="with a checkpoint") as caught:
        case.sample(path, callbacks=[press], num_steps=1000)
    assert f"hk.resume({str(path)!r}, target)" in str(caught.value)
    assert "Ctrl-C again stops now" in capfd.readouterr().err
    assert caught.value.run.stored.state == "stopped" and caught.value.run.stats["potential"].shape[1] > 0
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(hk.Interrupted):
        case.resume(path, callbacks=[after(300, lambda window: signal.raise_signal(signal.SIGINT))])
    finished = case.resume(path)
    if name == "threads":
        assert_no_draw_lost_or_doubled(finished, 1000)
    else:
        assert_same_bits(finished, case.sample(num_steps=1000))


@pytest.mark.parametrize("name", SIMPLE)
def test_two_interrupts_stop_now(name: str, tmp_path: Path) -> None:
    case, path = SIMPLE[name], tmp_path / "run"

    def press(window: hk.Window) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        case.sample(path, callbacks=[after(90, press)], num_steps=1000)
    assert not isinstance(caught.value, hk.Interrupted)
    assert hk.load(path).stored.state == "stopped"
    finished = case.resume(path)
    assert finished.stats["potential"].shape[1] == len(finished.kept_steps)


def test_without_a_store_an_interrupt_leaves_the_draws() -> None:
    press = after(90, lambda window: signal.raise_signal(signal.SIGINT))
    with pytest.raises(hk.Interrupted, match="with store= it could be resumed") as caught:
        SIMPLE["vectorised"].sample(callbacks=[press])
    assert 0 < caught.value.run.draws["slope"].shape[1] < 72


# -- what there is to go on from ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, compiled_once: None) -> tuple[Path, hk.Run]:
    """A run that was stopped, with more than one checkpoint, and what it would have become."""
    case, path = SIMPLE["vectorised"], tmp_path_factory.mktemp("stopped") / "run"
    case.sample(path, callbacks=[lambda window: time.sleep(0.03), after(90)])
    assert len(list((path / "checkpoints").glob("[0-9]*.npz"))) == 2
    return path, case.sample()


@pytest.fixture
def copied(stopped: tuple[Path, hk.Run], tmp_path: Path) -> tuple[Path, hk.Run]:
    shutil.copytree(stopped[0], tmp_path / "run")
    return tmp_path / "run", stopped[1]


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_a_checkpoint_that_is_half_written_is_passed_over_aloud(copied: tuple[Path, hk.Run]) -> None:
    path, whole = copied
    *_, newest = sorted((path / "checkpoints").glob("[0-9]*.npz"))
    halve(newest)
    with pytest.warns(hk.HookeanWarning, match=rf"{newest.name} cannot be read .*Taking the checkpoint before it"):
        run = hk.resume(path, regression(), progress=False)
    assert_same_bits(run, whole)


def test_without_any_checkpoint_there_is_an_error_and_the_draws_stay(copied: tuple[Path, hk.Run]) -> None:
    path, whole = copied
    for file in (path / "checkpoints").glob("*.npz"):
        halve(file)
    with pytest.raises(hk.StoreError, match="no checkpoint that can be read"):
        SIMPLE["vectorised"].resume(path)
    kept = hk.load(path).draws["slope"][:]
    assert kept.tobytes() == np.ascontiguousarray(whole.draws["slope"][:, : kept.shape[1]]).tobytes()


def test_a_chunk_that_is_cut_short_is_named_when_it_is_read(copied: tuple[Path, hk.Run]) -> None:
    path, _ = copied
    halve(path / "chain_001" / "draws" / "slope" / "c" / "0" / "0")
    run = hk.load(path)
    with pytest.raises(hk.StoreError, match=r"chain 1, leaf 'slope', draws 0 to \d+: the chunk is damaged"):
        run.draws["slope"][:, -1]
    assert np.isfinite(run.draws["slope"][0]).all() and np.isfinite(run.draws["level"][:]).all()
    with pytest.raises(hk.StoreError, match="chain_001/draws/slope/c/0/0 is damaged"):  # new draws belong beside these
        SIMPLE["vectorised"].resume(path)


def test_a_log_that_is_cut_short_is_an_error_and_no_wrong_answer(tmp_path: Path) -> None:
    case, path = SIMPLE["threads"], tmp_path / "run"
    case.sample(path, callbacks=[after(60)], num_steps=2000)
    (chunk, *_) = sorted((path / "log" / "events" / "c").rglob("*0"))
    halve(next(file for file in (chunk, *chunk.rglob("*")) if file.is_file()))
    with pytest.raises(hk.StoreError, match="the log"):
        case.replay(path)
    with pytest.raises(hk.StoreError):
        case.resume(path)


def test_a_store_of_a_newer_version_is_refused(copied: tuple[Path, hk.Run]) -> None:
    about = json.loads((copied[0] / "zarr.json").read_text())
    about["attributes"]["hookean"]["format"] += 1
    (copied[0] / "zarr.json").write_text(json.dumps(about))
    for call in (hk.load, SIMPLE["vectorised"].resume, SIMPLE["vectorised"].replay):
        with pytest.raises(hk.StoreError, match=r"made by a newer hookean .*Upgrade"):
            call(copied[0])


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (lambda: hk.Target(line, lambda w: 2 * prior(w), (X, Y), batch_size=8), "functions"),
        (lambda: hk.Target(line, prior, (X, Y + 1), batch_size=8), "data"),
        (lambda: hk.Target(line, prior, (X[::2], Y[::2]), batch_size=8), "data"),
    ],
)
def test_another_target_is_refused_unless_forced(
    target: Callable[[], hk.Target], what: str, copied: tuple[Path, hk.Run]
) -> None:
    path, whole = copied
    before = files(path)
    for call in (hk.resume, hk.replay):
        with pytest.raises(hk.ArgumentError, match=rf"target: is not the one .*another .*{what}.*force=True"):
            call(path, target(), progress=False)
    assert files(path) == before
    with pytest.warns(hk.HookeanWarning, match=f"another .*{what}; going on, as asked"):
        run = hk.resume(path, target(), force=True, progress=False)
    kept = hk.load(path).draws["slope"][:]
    assert kept.shape == whole.draws["slope"].shape
    assert kept[:, 0].tobytes() == whole.draws["slope"][:, 0].tobytes()
    assert not np.array_equal(kept, whole.draws["slope"])
    assert run.stored.state == "finished"


def files(path: Path) -> dict[str, tuple[int, bytes]]:
    """All that is in a folder, but for the lock, in which the last holder stands."""
    return {
        str(file.relative_to(path)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != "lock"
    }


def test_a_finished_run_is_left_alone(copied: tuple[Path, hk.Run], monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = copied
    SIMPLE["vectorised"].resume(path)
    before = files(path)
    monkeypatch.setattr(hk.Vectorised, "run", lambda *_: pytest.fail("sampled"))
    for settings in ({}, {"num_steps": 240}):
        run = SIMPLE["vectorised"].resume(path, **settings)
        assert_same_bits(run, whole)
        assert run.summary() == whole.summary()
    assert files(path) == before
    with pytest.raises(hk.ArgumentError, match=r"num_steps: is 239, of a run of 240\. It can only grow"):
        SIMPLE["vectorised"].resume(path, num_steps=239)
    assert files(path) == before


def test_a_run_killed_while_it_is_made_longer_goes_on_to_its_new_end(
    copied: tuple[Path, hk.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two files that say how long it is."""
    path, _ = copied
    case = SIMPLE["vectorised"]
    case.resume(path)
    description = (path / "zarr.json").read_bytes()
    monkeypatch.setattr(hk.Vectorised, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
    with pytest.raises(RuntimeError, match="killed"):
        case.resume(path, num_steps=400)
    monkeypatch.undo()
    about, old = json.loads((path / "zarr.json").read_bytes()), json.loads(description)
    about["attributes"]["hookean"]["description"] = old["attributes"]["hookean"]["description"]
    (path / "zarr.json").write_text(json.dumps(about))
    assert_same_bits(case.resume(path), case.sample(num_steps=400))
    assert len(hk.load(path).kept_steps) == hk.load(path).stats["potential"].shape[1]


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_a_loaded_run_is_a_run(tmp_path: Path) -> None:
    case, path = SIMPLE["vectorised"], tmp_path / "run"
    fresh = case.sample()
    on_disk = case.sample(path)
    run = hk.load(path)
    assert_same_bits(run, fresh)
    np.testing.assert_array_equal(run.draws["slope"][0, -5:], fresh.draws["slope"][0, -5:])
    np.testing.assert_array_equal(run.stats["potential"][1:, ::7], fresh.stats["potential"][1:, ::7])
    np.testing.assert_array_equal(run.kept_steps, fresh.kept_steps)
    assert run.summary() == on_disk.summary() == fresh.summary() == hk.load(path, case.target()).summary()
    assert run.info["steps"] == 240

    def apply(w: Any, x: Any) -> Any:
        return x @ w["slope"] + w["level"], 1.0

    wanted = fresh.predict(apply, X, Y, kind="regression")
    np.testing.assert_array_equal(run.predict(apply, X, Y, kind="regression").mean, wanted.mean)
    shape = "3 x 72 draws of level [], slope [3]"
    made = "SGHMC x Elastic by Vectorised, 240 of 240 steps"
    assert repr(fresh) == f"<hk.Run: {made}, {shape}; in memory>"
    assert repr(run) == repr(on_disk) == f"<hk.Run: {made}, {shape}; finished, on disk in {path}>"
    assert repr(run.stored) == f"<run {path}: finished, 3 chains, up to 72 draws>"


def test_arviz_takes_a_loaded_run(tmp_path: Path) -> None:
    pytest.importorskip("arviz", reason="needs the extra arviz")
    path = tmp_path / "run"
    SIMPLE["vectorised"].sample(path)
    posterior = hk.load(path).to_arviz()["posterior"]
    np.testing.assert_array_equal(posterior["slope"].values, hk.load(path).draws["slope"][:])


def test_a_run_that_goes_on_has_no_summary_without_its_target(copied: tuple[Path, hk.Run]) -> None:
    """As it was found by others while it was running; its process is gone by now."""
    path, _ = copied
    progress = json.loads((path / "progress.json").read_text())
    progress["state"] = "running"
    del progress["facts"]["summary"]
    (path / "progress.json").write_text(json.dumps(progress))
    assert "; killed, on disk in" in repr(hk.load(path))
    with pytest.raises(hk.HookeanError, match=r"hk\.load\(path, target\)"):
        hk.load(path).summary()
    assert hk.load(path, regression()).summary().startswith("SGHMC x Elastic")


# -- other processes ---------------------------------------------------------------------------------------------------

MODEL = '''\
import jax.numpy as jnp
import numpy as np

import hookean as hk

random = np.random.default_rng(0)
x = random.normal(size=(40, 3)).astype("float32")
y = (x @ [1.0, -1.0, 0.5] + random.normal(size=40)).astype("float32")
target = hk.Target(
    lambda w, b: -((b[1] - b[0] @ w["slope"] - w["level"]) ** 2) / 2,
    lambda w: -(jnp.sum(w["slope"] ** 2) + w["level"] ** 2) / 2,
    data=(x, y),
    batch_size=8,
)
init = {"slope": np.zeros(3, "float32"), "level": np.float32(0.5)}
ENGINES = {
    "vectorised": hk.Vectorised(),
    "simulated": hk.Simulated(
        hk.Scenario(
            latency=1.5,
            crashes=[hk.Crash(k % 2, 100 + 400 * k, restart_after=9.0) for k in range(9)],
            joins=[hk.Join(2, 20.0)],
        )
    ),
    "threads": hk.Threads(),
}


def sample(engine, num_steps, path=None, **others):
    store = None
    if path is not None:
        store = hk.Store(path, checkpoint_seconds=0.02, flush_seconds=0.01)
    return hk.sample(
        target, init, dynamics=hk.SGHMC(lambda step: 0.05 / (1 + step / 2000)), coupling=hk.Elastic(0.5, 8), chains=3,
        num_steps=num_steps, warmup=40, thin=4, engine=ENGINES[engine], seed=5, store=store, progress=False, **others
    )
'''  # fmt: skip


def python(folder: Path, script: str, *arguments: Any, **settings: Any) -> subprocess.Popen[str]:
    """A process that has model.py at hand, and the cache of this one's programs."""
    (folder / "model.py").write_text(MODEL)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)]),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def finish(process: subprocess.Popen[str], seconds: float = 240) -> str:
    output, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors
    return output


def test_others_see_whole_draws_of_a_run_that_goes_on_and_may_not_touch_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    script = """
import sys, time
from hookean.engines import vectorised
import model
vectorised.SECONDS_BETWEEN_LOOKS = 0.01
model.sample("vectorised", 1_000_000, sys.argv[1], callbacks=[lambda window: time.sleep(0.005)])
"""
    process = python(tmp_path, script, path)
    namespace: dict[str, Any] = {}
    exec(compile(MODEL, "model.py", "exec"), namespace)
    reference = namespace["sample"]("vectorised", 20_000)
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        looks = set()
        while len(looks) < 10 and time.monotonic() < deadline:
            run = hk.load(path)
            found, most = numbers(run), run.stats["potential"].shape[1]
            for leaf, wanted in zip(found, numbers(reference), strict=True):
                both = min(most, wanted.shape[1])
                assert leaf[:, :both].tobytes() == np.ascontiguousarray(wanted[:, :both]).tobytes()
                assert np.isfinite(leaf).all()
            looks.add(most)
        assert len(looks) == 10
        assert hk.load(path).stored.state == "running"
        with pytest.raises(hk.StoreError, match=rf"being written by another process \(pid {process.pid} on"):
            hk.resume(path, namespace["target"], progress=False)
        with pytest.raises(hk.ArgumentError, match="holds a run already"):
            namespace["sample"]("vectorised", 20_000, path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert hk.load(path).stored.state == "killed"


KILLS = """
import os, random, shutil, signal, sys, time, traceback, warnings
warnings.simplefilter("ignore")
import json
import numpy as np
import jax
import hookean as hk
from hookean.engines import simulated, vectorised
from hookean.exchange import Kind
from jax._src import xla_bridge

folder, engine, kills, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
path, reference = folder + "/run", folder + "/reference.npz"
for module in (simulated, vectorised):
    module.SECONDS_BETWEEN_LOOKS = 0.004
exact = engine != "threads"

def arrays(run):
    return {**{"draws/" + k: np.asarray(v) for k, v in run.draws.items()},
            **{"stats/" + k: np.asarray(v) for k, v in run.stats.items()}}

def whole():
    np.savez(reference, **arrays(model.sample(engine, num_steps)))

def tell(window):
    if announced:
        os.write(announced.pop(), b"w")

def live():
    if os.path.exists(path):
        hk.resume(path, model.target, progress=False, callbacks=[tell])
    else:
        model.sample(engine, num_steps, path, callbacks=[tell])

def check():
    run = hk.load(path)
    found = arrays(run)
    kept = len(run.kept_steps)
    assert run.stored.state == "finished", run.stored.state
    if exact:
        with np.load(reference) as wanted:
            assert set(wanted) == set(found)
            for name, values in found.items():
                assert values.tobytes() == wanted[name].tobytes(), name + " differs"
        return
    for name, values in found.items():
        assert values.shape[:2] == (3, kept) and np.isfinite(values).all(), name
    log = run.log()
    for chain in range(3):
        own = [event for event in log if event.kind is Kind.RUN and event.worker == chain]
        assert sum(event.steps for event in own) == num_steps
        assert [event.draw for event in own if event.draw >= 0] == list(range(kept))
    comparison = hk.replay(path, model.target, progress=False)
    assert comparison.differing == 0 and comparison.draws == 3 * kept, comparison

def forked(task):
    # The child, and a pipe that tells when its first window is done, or that it has ended.
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        announced.append(send)
        try:
            global model
            import model  # here, for a target starts JAX's backend, and that does not survive a fork
            task()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(send)
    return child, receive

def done(task):
    child, receive = forked(task)
    os.close(receive)
    assert os.waitpid(child, 0)[1] == 0, "a child failed"

def ended(child):
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

def opened(child):
    # Whether the child holds the store by now.
    try:
        with open(path + "/progress.json") as file:
            return json.load(file)["pid"] == child
    except (OSError, ValueError):
        return False

assert not xla_bridge.backends_are_initialized()
choose, announced = random.Random(kills), []
if exact:
    done(whole)
killed = finished = inside = 0
while killed < kills:
    child, receive = forked(live)
    if choose.random() < 0.3:  # while it is made or reopened, or still compiles
        while not opened(child) and not ended(child):
            time.sleep(0.001)
        delay = choose.uniform(0, 0.3)
    else:  # while it samples and writes
        os.read(receive, 1)
        delay = choose.uniform(0, 0.4)
    end = time.monotonic() + delay
    while time.monotonic() < end and not ended(child):
        time.sleep(0.001)
    os.close(receive)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        killed += 1
        inside += any(".partial" in name for _, _, files in os.walk(path) for name in files)
        continue
    assert status == 0, "a child failed"
    done(check)
    finished += 1
    shutil.rmtree(path)
done(live)
done(check)
print(killed, "kills,", finished + 1, "finished,", inside, "inside a write")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "kills", "num_steps"), [("vectorised", 34, 1500), ("simulated", 33, 1000), ("threads", 33, 600)]
)
def test_kills_at_any_moment(engine: str, kills: int, num_steps: int, tmp_path: Path) -> None:
    """A parent that has imported JAX but started no backend forks a child for each life of the run."""
    began = time.monotonic()
    output = finish(python(tmp_path, KILLS, tmp_path, engine, kills, num_steps), 600)
    print(output.strip(), f"{(time.monotonic() - began) / kills:.2f} s a kill")
    assert output.startswith(f"{kills} kills")
