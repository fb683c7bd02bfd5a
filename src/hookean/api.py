"""`sample`, and what can be done with a run on disk: `load`, `resume` and `replay` it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import platform
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hookean import diagnostics
from hookean import progress as progress_display
from hookean.coupling import Coupling, Independent  # type: ignore[attr-defined]
from hookean.dynamics import Dynamics
from hookean.engines import Engine, Threads, Vectorised  # type: ignore[attr-defined]
from hookean.engines.pieces import replay as replay_of_threads
from hookean.job import Job
from hookean.preparation import prepare
from hookean.recorder import Callback, Recorder, Saved
from hookean.run import Run
from hookean.store import Store, Stored, Writer
from hookean.store import load as open_store
from hookean.targets import Target
from hookean.telemetry import Telemetry
from hookean.tree import leaf_names, tree_map
from hookean.types import (
    ArgumentError,
    HookeanWarning,
    Interrupted,
    Params,
    StoreError,
    check_count,
    in_one_line,
)

VERSION = "0.1.0"


def sample(
    target: Target,
    init: Params | Callable[[jax.Array], Params],
    *,
    dynamics: Dynamics,
    coupling: Coupling | None = None,
    chains: int = 4,
    num_steps: int = 10_000,
    warmup: int = 0,
    thin: int = 1,
    engine: Engine | None = None,
    seed: int = 0,
    progress: bool = True,
    store: Store | str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Draw from a posterior with `chains` parallel chains.

    Args:
        target: what to sample.
        init: where to start: a pytree of parameters for all chains, or a function key -> pytree, one start per chain.
        dynamics: how a chain moves.
        coupling: how chains act on each other; None for independent ones.
        chains: K, the number of chains or workers.
        num_steps: steps of each chain, the warm-up included.
        warmup: steps at the start of which nothing is kept.
        thin: keep every so many states after the warm-up.
        engine: what carries the run out; None for `Threads()` on a CPU or on several accelerators, and `Vectorised()`
            on one accelerator. The choice and its reason are printed.
        seed: the same seed gives the same noise and batches, whatever carries the run out; `Vectorised` and `Simulated`
            give the same bits on the same machine. With `Threads` the order of exchanges is up to the hardware, and the
            log remembers it.
        progress: show progress, on stderr.
        store: a folder in which to keep the run while it goes on (or `hk.Store(folder, ...)`), so that it can be read
            meanwhile, and resumed. Draws are then read from disk when they are indexed, and not held in memory.
        callbacks: functions that are called with a `hk.Window` at the end of each window of a chain.

    Returns:
        A `Run`.

    Raises:
        ArgumentError: an argument cannot work (a `ValueError`). Nothing has been compiled then.
        DivergenceError: a chain turned NaN or Inf; its attribute `run` has the draws until then.
        BatchError: the target's own batches failed; its attribute `run` has the draws until then.
        StoreError: the store could not be written.
        Interrupted: Ctrl-C (a `KeyboardInterrupt`). Its attribute `run` has the draws until then.
    """
    coupling = Independent() if coupling is None else coupling
    engine, reason = (engine, "") if engine is not None else _chosen_engine()
    settings = Settings(dynamics, coupling, engine, chains, num_steps, warmup, thin, seed)
    if store is not None:
        store = store if isinstance(store, Store) else Store(store)
        store.check()
    _check_callbacks(callbacks)
    job = prepare(target, init, **settings.as_dict())
    with _closing(target):
        writer = None if store is None else _create(store, settings, job)
        return _carry_out(settings, job, writer, None, progress, callbacks, reason)


def load(path: str | os.PathLike[str], target: Target | None = None) -> Run:
    """Open a run on disk, finished or not, however large: draws are read when they are indexed.

    Nothing is unpickled, unless the `target` is given; `run.summary()` of a run that has not ended needs it.
    """
    stored = open_store(path)
    if target is not None:
        settings = _settings_of(stored)
        return _run_of(
            stored, settings.as_dict(), prepare(target, None, **settings.as_dict(), starts=_starts_of(stored))
        )
    return _run_of(stored, stored.description["settings"], None)


def resume(
    path: str | os.PathLike[str],
    target: Target,
    *,
    num_steps: int | None = None,
    force: bool = False,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Go on with a run on disk from its last checkpoint, after a crash or a stop, or beyond its end.

    With the engines `Vectorised` and `Simulated` the draws are those of a run that was never interrupted, bit for bit;
    with `Threads` no draw is lost or doubled, and the log goes on.

    A run that is finished, and is to be no longer, is returned as it is.

    Args:
        path: the folder of the run. Its configuration is unpickled: resume only what you trust.
        target: what was sampled. Functions and data are compared with those of before.
        num_steps: make the run longer.
        force: go on although the target is another one by now, or the machine rounds otherwise.
        progress: show progress, on stderr.
        callbacks: as for `sample`.

    Raises:
        StoreError: there is no run, another process writes it, or what is on disk is damaged.
        ArgumentError: the target has changed, or `num_steps` is less than before.
    """
    _check_callbacks(callbacks)
    stored = open_store(path)
    settings = _settings_of(stored)
    if num_steps is not None:
        if check_count("num_steps", num_steps) < settings.num_steps:
            raise ArgumentError("num_steps", f"is {num_steps}, of a run of {settings.num_steps}", "It can only grow")
        settings = dataclasses.replace(settings, num_steps=num_steps)
    job = prepare(target, None, **settings.as_dict(), starts=_starts_of(stored))
    _compare(stored, _description(settings, job, stored.description.get("note", {})), force)
    described = stored.description["settings"]["num_steps"]
    if stored.state == "finished" and settings.num_steps == described:
        target.close()
        return _run_of(stored, settings.as_dict(), job)
    with _closing(target):
        writer, checkpoint = Writer.reopen(path, len(job.kept_steps))
        if settings.num_steps != described:
            writer.describe(
                _description(settings, job, stored.description.get("note", {}), stored.description["fingerprint"]),
                _pickled(settings, job),
            )
        saved = None if checkpoint.facts.get("fresh") else Saved(checkpoint.leaves, checkpoint.facts)
        return _carry_out(settings, job, writer, saved, progress, callbacks, "")


class Comparison(NamedTuple):
    """What a replay found. `first` says where draws differ first: chain, draw, step and leaf, or None."""

    draws: int
    differing: int
    first: tuple[int, int, int, str] | None
    largest: float
    """Largest difference of any number."""
    same_machine: bool

    @property
    def agrees(self) -> bool:
        """Bit for bit on the same machine; elsewhere within what rounding may do to a stable chain."""
        return self.differing == 0 if self.same_machine else self.largest <= REPLAY_TOLERANCE

    def __str__(self) -> str:
        """In words."""
        if self.differing == 0:
            return f"{self.draws:,} draws are the same, bit for bit"
        assert self.first is not None
        chain, draw, step, leaf = self.first
        where = f"first: chain {chain}, draw {draw} (step {step}), leaf {leaf!r}; largest difference {self.largest:.3g}"
        tolerance = "" if self.same_machine else f" (on another machine up to {REPLAY_TOLERANCE:g} is allowed)"
        return f"{self.differing:,} of {self.draws:,} draws differ; {where}{tolerance}"


REPLAY_TOLERANCE = 1e-3
"""Another processor rounds otherwise, in float32 by 1e-7 a step, and a stable chain forgets it."""


def replay(path: str | os.PathLike[str], target: Target, *, force: bool = False, progress: bool = True) -> Comparison:
    """Carry out a run on disk again, by its log of exchanges, and compare all draws. Nothing on disk changes.

    Args:
        path: the folder of the run. Its configuration is unpickled: replay only what you trust.
        target: what was sampled.
        force: go on although the target is another one by now.
        progress: show progress, on stderr.
    """
    stored = open_store(path)
    settings = _settings_of(stored)
    job = prepare(target, None, **settings.as_dict(), starts=_starts_of(stored))
    now = _description(settings, job, {})
    _compare(stored, now, force, machine=False)
    compared = _Compared(stored, job, stored.description["machine"] == now["machine"])
    with _closing(target), progress_display.Display(progress, f"replaying {stored.path}", job.num_steps) as display:
        if isinstance(settings.engine, Threads):
            replay_of_threads(job, stored.log(), compared.see)
        else:
            recorder = _Replaying(job, compared, display.update)
            facts = stored.newest_facts()
            settings.engine.run(job, recorder, Saved([], facts) if "stretches" in facts else None)
    return compared.result()


# -- how a run is carried out ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a user asked for, but for the target and the start."""

    dynamics: Dynamics
    coupling: Coupling
    engine: Engine
    chains: int
    num_steps: int
    warmup: int
    thin: int
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """Names and values."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def _chosen_engine() -> tuple[Engine, str]:
    devices = jax.local_devices()
    kind = devices[0].platform
    if kind == "cpu":
        return Threads(), f"chosen for {os.cpu_count()} cores; hk.Vectorised() is faster for small models"
    if len(devices) > 1:
        return Threads(), f"chosen for {len(devices)} {kind} devices"
    return Vectorised(), f"chosen for one {kind} device"


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    if callable(callbacks) or not all(callable(callback) for callback in callbacks):
        raise ArgumentError("callbacks", f"is {callbacks!r}", "Give a list of functions that take a hk.Window")


def _carry_out(
    settings: Settings,
    job: Job,
    writer: Writer | None,
    saved: Saved | None,
    progress: bool,
    callbacks: Sequence[Callback],
    reason: str,
) -> Run:
    with progress_display.Display(progress, _headline(job, settings.engine, reason), job.num_steps) as display:
        recorder = Recorder(job, display.update, callbacks, writer)
        if saved is not None:
            recorder.telemetry = Telemetry.of(saved.facts.get("telemetry", {}))
        display.telemetry = recorder.telemetry

        def run_of(info: dict[str, Any]) -> Run:
            if writer is None:
                result = recorder.result(info)
                return Run(result.draws, result.stats, result.info, settings.as_dict(), job)
            return _run_of(open_store(writer.path), settings.as_dict(), job, {**info, "telemetry": recorder.telemetry})

        def ended(state: str, info: dict[str, Any]) -> Run:
            if writer is None:
                return run_of(info)
            writer.flush()
            run = run_of(info)
            with np.errstate(invalid="ignore", over="ignore"):  # of a run that diverged
                summary = run.summary()
            facts = {"telemetry": recorder.telemetry.facts(), "steps": info.get("steps", 0), "summary": summary}
            writer.tell({**recorder.facts, **facts}, state)
            writer.close(state)
            return run_of(info)

        try:
            with _stopping_on_interrupt(recorder, writer) as interrupted:
                info = settings.engine.run(job, recorder, saved)
            run = ended("stopped" if recorder.stopping else "finished", info)
        except Exception as error:  # a callback's own included: what was kept is never lost
            failure: Any = job.target.close() or error
            with contextlib.suppress(StoreError, AttributeError):
                failure.run = ended("failed", {"steps": getattr(error, "step", 0)})
            if failure is error:
                raise
            raise failure from failure.__cause__
        except KeyboardInterrupt:  # the second one
            if writer is not None:
                writer.close("stopped")
            raise
        finally:
            if writer is not None:
                writer.close("failed")
    if interrupted:
        raise Interrupted("stopped at a window" + _how_to_resume(writer), run)
    return run


@contextlib.contextmanager
def _closing(target: Target) -> Iterator[None]:
    """End what reads ahead, however a run ends."""
    try:
        yield
    finally:
        target.close()


@contextlib.contextmanager
def _stopping_on_interrupt(recorder: Recorder, writer: Writer | None) -> Iterator[list[bool]]:
    """Ctrl-C once stops at the next window; twice, now. Tells by a non-empty list that it happened."""
    pressed: list[bool] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # signals are the main thread's
        return

    def stop(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)
        recorder.stop()
        print("\nstopping at the next window; Ctrl-C again stops now", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _how_to_resume(writer: Writer | None) -> str:
    if writer is None:
        return ". The draws until then are in the error's attribute `run`; with store= it could be resumed"
    by_command = f"hookean resume {writer.path}" if "source" in writer.note else ""
    return f", with a checkpoint. Go on with: {by_command or f'hk.resume({str(writer.path)!r}, target)'}"


def _headline(job: Job, engine: Engine, reason: str) -> str:
    draws, state = job.forecast_bytes()
    return (
        f"{type(job.dynamics).__name__} x {type(job.coupling).__name__}: {job.chains} chains x {job.num_steps:,} "
        f"steps, {job.num_sampled} x {len(job.kept_steps):,} draws kept; "
        f"{type(engine).__name__}: {engine.summary}{f' ({reason})' if reason else ''}\n"
        f"memory: {diagnostics.human_bytes(draws)} for the draws, {diagnostics.human_bytes(state)} for the chains, and "
        "what their gradients need"
    )


# -- runs on disk ------------------------------------------------------------------------------------------------------


def _create(store: Store, settings: Settings, job: Job) -> Writer:
    draws, stats = jax.eval_shape(job.empty_draws)
    one = tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), draws)
    return Writer.create(
        store,
        one,
        list(stats),
        job.num_sampled,
        _description(settings, job, store.note),
        _pickled(settings, job),
        [np.asarray(leaf) for leaf in jax.tree.leaves(job.starts)],
        [],
        {"fresh": True},
    )


def _pickled(settings: Settings, job: Job) -> bytes:
    """Settings, and the structure of the parameters; functions by value, for a schedule may be a lambda."""
    import cloudpickle

    leaves, structure = jax.tree.flatten(job.starts)
    try:
        return bytes(cloudpickle.dumps((settings, jax.tree.unflatten(structure, range(len(leaves))))))
    except Exception as error:
        raise ArgumentError(
            "store",
            f"needs the settings on disk, and they cannot be pickled ({in_one_line(error)})",
            "Use numbers and functions as settings; no open files, locks or the like",
        ) from error


def _settings_of(stored: Stored) -> Settings:
    return _unpickled(stored)[0]


def _starts_of(stored: Stored) -> Params:
    positions = _unpickled(stored)[1]
    leaves = stored.start()
    return tree_map(lambda i: leaves[i], positions)


def _unpickled(stored: Stored) -> tuple[Settings, Params]:
    import cloudpickle

    try:
        return cloudpickle.loads(stored.configuration())
    except StoreError:
        raise
    except Exception as error:
        versions = stored.description["versions"]
        raise StoreError(
            f"{stored.path}: the configuration cannot be read ({in_one_line(error)}). It was written by hookean "
            f"{versions['hookean']}, Python {versions['python']}; classes of your own must be importable under the "
            "names they had."
        ) from error


def _description(
    settings: Settings, job: Job, note: dict[str, Any], fingerprint: dict[str, str] | None = None
) -> dict[str, Any]:
    """What a reader is told of a run, as JSON."""
    device = jax.local_devices()[0]
    shown = {name: value for name, value in settings.as_dict().items() if isinstance(value, int)}
    objects = {name: _in_short(value) for name, value in settings.as_dict().items() if not isinstance(value, int)}
    one = tree_map(lambda leaf: leaf[0], job.starts)
    return {
        "settings": {
            **objects,
            **shown,
            "schedule": dataclasses.asdict(job.coupling.schedule),
            "couples_draws": job.coupling.couples_draws,
        },
        "versions": {
            "hookean": VERSION,
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "platform": device.platform,
            "device": device.device_kind,
            "devices": len(jax.local_devices()),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "host": platform.node(),
            "jax": jax.__version__,
        },
        "parameters": dict(zip(leaf_names(one), [list(leaf.shape) for leaf in jax.tree.leaves(one)], strict=True)),
        "float64": bool(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
        "fingerprint": job.target.fingerprint(one) if fingerprint is None else fingerprint,
        "note": note,
    }


def _in_short(value: Any) -> str:
    """As it prints, without what is as ever, and without addresses of functions."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        usual = inspect.signature(type(value)).parameters
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr and f.name in usual}
        told = [f"{name}={_in_short(it)}" for name, it in given.items() if repr(it) != repr(usual[name].default)]
        return f"{type(value).__name__}({', '.join(told)})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _compare(stored: Stored, now: dict[str, Any], force: bool, machine: bool = True) -> None:
    """Refuse to go on with another target than the run's, unless forced."""
    then = stored.description
    if then["float64"] != now["float64"]:
        state = "on" if then["float64"] else "off"
        raise ArgumentError("jax_enable_x64", f"was {state} when {stored.path} was made", f"Turn it {state}")
    changed = [name for name, value in now["fingerprint"].items() if then["fingerprint"].get(name) != value]
    if changed:
        why = (
            f"; JAX was {then['versions']['jax']} and is {jax.__version__}, which may be why"
            if (then["versions"]["jax"] != jax.__version__ and "data" not in changed)
            else ""
        )
        message = f"is not the one that {stored.path} was made with: another {' and '.join(changed)}{why}"
        if not force:
            raise ArgumentError("target", message, "Give the old one, or say force=True (--force) if this is meant")
        warnings.warn(f"target: {message}; going on, as asked", HookeanWarning, stacklevel=3)
    if machine and then["machine"] != now["machine"]:
        warnings.warn(
            f"{stored.path} was made on {_in_words(then['machine'])} and goes on on {_in_words(now['machine'])}: draws "
            "will differ from those of an uninterrupted run by rounding",
            HookeanWarning,
            stacklevel=3,
        )


def _in_words(machine: dict[str, Any]) -> str:
    return f"{machine['devices']} x {machine['device']} ({machine['host']}, JAX {machine['jax']})"


def _run_of(stored: Stored, config: dict[str, Any], job: Job | None, info: dict[str, Any] | None = None) -> Run:
    facts = stored.progress["facts"]
    found = {"steps": facts.get("steps", facts.get("step", 0)), **facts, **(info or {})}
    return Run(stored.draws, stored.stats, found, config, job, stored)


# -- comparing with a run on disk --------------------------------------------------------------------------------------


class _Compared:
    """Draws beside those of a store."""

    def __init__(self, stored: Stored, job: Job, same_machine: bool) -> None:
        self.stored, self.job, self.same_machine = stored, job, same_machine
        self.counts = list(stored.progress["draws"])
        self.found: dict[tuple[int, int], tuple[str, float] | None] = {}
        self.names = leaf_names(job.starts)

    @property
    def complete(self) -> bool:
        return len(self.found) >= sum(self.counts)

    def see(self, chain: int, draw: int, position: Params, stats: Any) -> None:
        """Compare one draw; of those that a worker gave twice, the last counts."""
        if draw >= self.counts[chain]:
            return
        worst: tuple[str, float] | None = None
        pairs = zip(self.names, jax.tree.leaves(self.stored.draws), jax.tree.leaves(position), strict=True)
        for name, on_disk, leaf in pairs:
            kept = np.asarray(on_disk[chain, draw])
            again = np.asarray(leaf).astype(kept.dtype)
            if kept.tobytes() != again.tobytes():
                off = np.max(np.abs(kept.astype(float) - again.astype(float)), initial=0.0)
                if worst is None or not off <= worst[1]:
                    worst = name, float(off)
        self.found[chain, draw] = worst

    def result(self) -> Comparison:
        off = {place: worst for place, worst in self.found.items() if worst is not None}
        first = None
        if off:
            chain, draw = min(off, key=lambda place: (place[1], place[0]))
            first = chain, draw, int(self.job.kept_steps[draw]), off[chain, draw][0]
        largest = max((worst[1] for worst in off.values()), default=0.0)
        return Comparison(len(self.found), len(off), first, largest, self.same_machine)


class _Replaying(Recorder):
    """Compares in place of keeping."""

    def __init__(self, job: Job, compared: _Compared, watch: Any) -> None:
        super().__init__(job, watch, writer=None, keeps=False)
        self.compared = compared

    def keep(self, chain: int, first: int, draws: Params, stats: dict[str, np.ndarray]) -> None:
        for i in range(len(next(iter(stats.values())))):
            self.compared.see(chain, first + i, tree_map(lambda leaf, i=i: leaf[i], draws), None)
        self.stopping = self.stopping or (chain == self.job.num_sampled - 1 and self.compared.complete)


__all__ = ["Comparison", "Run", "load", "replay", "resume", "sample"]
