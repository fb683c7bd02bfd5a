"""Where a run leaves what it finds: kept draws, its log of exchanges, and its state now and then.

Engines hand over; a recorder keeps it in memory, or in a store on disk. Neither knows of the other: an engine asks
for nothing but whether to stop, and a recorder never asks how a draw came about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hookean.exchange import Event
from hookean.job import Job, Progress, Result
from hookean.store import Writer
from hookean.telemetry import Telemetry
from hookean.tree import tree_map
from hookean.types import HookeanError, Params


class Window(NamedTuple):
    """What a callback sees of one chain at the end of one of its windows.

    `step` counts the chain's own steps. `run` is where a callback may ask for something: `run.stop()`,
    `run.remove_chain(chain)`, `run.add_chain()`, and `run.telemetry`.
    """

    chain: int
    step: int
    potential: float
    temperature: float
    run: Recorder


Callback = Callable[[Window], None]

CHAIN_FACTS = ("step", "potential", "temperature")
"""What a store tells of each chain."""


class Snapshot(NamedTuple):
    """All that an engine needs to go on: a pytree of arrays, and facts that are plain values."""

    state: Any
    facts: dict[str, Any]


class Saved(NamedTuple):
    """A snapshot that comes back from disk: the leaves of its state, and its facts."""

    leaves: list[np.ndarray]
    facts: dict[str, Any]

    def like(self, state: Any) -> Any:
        """The leaves in the structure, on the types, of `state` (arrays or their shapes)."""
        leaves, structure = jax.tree.flatten(state)
        if len(leaves) != len(self.leaves):
            raise HookeanError(
                f"the checkpoint has {len(self.leaves)} arrays where this run needs {len(leaves)}: it was written by "
                "other settings or another version of the library"
            )
        return jax.tree.unflatten(structure, [_as(new, leaf) for new, leaf in zip(leaves, self.leaves, strict=True)])


def _as(like: Any, saved: np.ndarray) -> np.ndarray:
    if tuple(np.shape(like)) != tuple(saved.shape):
        raise HookeanError(f"the checkpoint has an array of shape {saved.shape} where {np.shape(like)} is needed")
    return saved if saved.dtype == like.dtype else saved.astype(like.dtype)


class Recorder:
    """Takes what an engine hands over.

    Engines use `keep`, `log`, `look` and `save`; callbacks use `stop`, `add_chain` and `remove_chain`.
    """

    def __init__(
        self,
        job: Job,
        watch: Callable[[Progress], None] | None = None,
        callbacks: Sequence[Callback] = (),
        writer: Writer | None = None,
        keeps: bool = True,
    ) -> None:
        """Make room: in memory for all draws if there is no `writer` and they are to be kept."""
        self.job, self.writer, self.callbacks = job, writer, tuple(callbacks)
        self.telemetry = Telemetry()
        self.facts: dict[str, Any] = {}
        """What was last said of the run, for those who look at its store."""
        self.chains: dict[int, dict[str, float]] = {}
        """Where each chain was last seen: step, potential and temperature."""
        self.stopping = False
        self.requests: list[tuple[str, int]] | None = None
        """What callbacks asked for, where the engine can do it: ("add", -1) or ("remove", chain)."""
        self._watch = watch
        self._first: tuple[float, int] | None = None
        self._log: list[Event] = []
        self._draws: Params = None
        self._stats: dict[str, np.ndarray] = {}
        self._filled = 0
        if writer is None and keeps:
            draws, stats = jax.eval_shape(job.empty_draws)
            self._draws = tree_map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), draws)
            self._stats = {name: np.full(leaf.shape, np.nan, leaf.dtype) for name, leaf in stats.items()}

    # -- what an engine hands over ------------------------------------------------------------------------------------

    def keep(self, chain: int, first: int, draws: Params, stats: dict[str, np.ndarray]) -> None:
        """Draws `first`, `first + 1`, ... of a chain. A worker that fell back hands over the same ones again."""
        count = len(next(iter(stats.values())))
        self._filled = max(self._filled, first + count)
        if self.writer is not None:
            self.writer.keep(chain, first, draws, stats)
            return

        def write(room: np.ndarray, rows: Any) -> None:
            room[chain, first : first + count] = rows

        tree_map(write, self._draws, draws)
        for name, room in self._stats.items():
            write(room, stats[name])

    def log(self, events: Sequence[Event]) -> None:
        """Events in the order in which they took effect."""
        if self.writer is None:
            self._log.extend(events)
        else:
            self.writer.log(events)

    def look(
        self, progress: Progress, windows: Callable[[], Sequence[Window]], snapshot: Callable[[], Snapshot] | None
    ) -> bool:
        """News between two compiled pieces of work. Whether to stop.

        A checkpoint is made where one is due and a `snapshot` can be had.
        """
        if self._watch is not None:
            self._watch(progress)
        if self.callbacks or self.writer is not None:
            for window in windows():
                self.chains[window.chain] = {name: getattr(window, name) for name in CHAIN_FACTS}
                for callback in self.callbacks:
                    callback(window)
        if self.writer is not None:
            chains = {str(chain): facts for chain, facts in sorted(self.chains.items())}
            pace = {"steps_per_second": self._pace(progress.step)}
            self.facts = {**progress._asdict(), **pace, "chains": chains, "telemetry": self.telemetry.facts()}
            self.writer.tell(self.facts)
            if snapshot is not None and self.checkpoint_due():
                self.save(snapshot())
            elif self.writer.due():
                self.writer.flush()
        return self.stopping

    def checkpoint_due(self) -> bool:
        """Whether it is time for a snapshot."""
        return self.writer is not None and self.writer.checkpoint_due()

    def _pace(self, step: int) -> float | None:
        """Steps per second of a chain since the first look, before which there is mostly compilation."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, step
        began, first = self._first
        return (step - first) / (now - began) if step > first and now > began else None

    def save(self, snapshot: Snapshot) -> None:
        """Write a checkpoint. All draws and events of before are handed over already."""
        if self.writer is not None:
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(snapshot.state))]
            self.writer.checkpoint(leaves, {**snapshot.facts, "telemetry": self.telemetry.facts()})

    # -- what a callback may ask for ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the run at the next window, with what it has."""
        self.stopping = True

    def add_chain(self) -> None:
        """Let one of the engine's free seats begin."""
        self._request("add", -1)

    def remove_chain(self, chain: int) -> None:
        """Let a chain stop at its next window; what it has kept stays."""
        self._request("remove", chain)

    def _request(self, what: str, chain: int) -> None:
        if self.requests is None:
            raise HookeanError(f"this engine cannot {what} chains while it runs. Use hk.Threads(seats=...)")
        self.requests.append((what, chain))

    # -- what is left at the end --------------------------------------------------------------------------------------

    def result(self, info: dict[str, Any]) -> Result:
        """Draws and statistics in memory, without the end that no chain has filled."""
        draws, stats = tree_map(lambda leaf: leaf[:, : self._filled], (self._draws, self._stats))
        found = {**info, "telemetry": self.telemetry}
        return Result(draws, stats, {**found, "log": self._log} if self._log else found)
