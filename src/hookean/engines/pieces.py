"""The compiled pieces of a run in which every worker and the centre go their own way, and the replay of such a run.

A worker runs *windows*: stretches of steps, after each of which its state may be kept as a draw. Everything else is an
exchange. Whoever calls the same pieces in the order of a log gets the run that the log tells, bit for bit: threads do
it to sample, `replay` does it to check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling import Worker
from hookean.exchange import Copy, Event, Kind, Report
from hookean.job import Job, Seen, new_seen
from hookean.tree import fingerprint, num_bytes, row, tree_map
from hookean.types import HookeanError, Params

LONGEST_WINDOW = 256
"""Steps of a window where nothing is exchanged."""
WINDOW_BYTES = 2**25
"""Draws of a window that wait on the device."""


class Place(NamedTuple):
    """A worker, what it last saw, and the steps it has taken."""

    worker: Worker
    seen: Seen
    step: jax.Array


class Rows(NamedTuple):
    """Positions and statistics after each stretch of a window."""

    draws: Params
    stats: dict[str, jax.Array]


class Pieces:
    """The parts of a job as compiled functions."""

    def __init__(self, job: Job) -> None:
        """Nothing is compiled before it is called."""
        self.job = job
        rhythm = job.coupling.rhythm
        self.exchanges = rhythm is not None
        self.report_every, self.refresh_every = rhythm or (LONGEST_WINDOW, LONGEST_WINDOW)
        each = num_bytes(job.starts) // job.chains
        most = -(-self.report_every // job.thin) + 1
        self.room = 1 if job.coupling.server_owns_chain else int(np.clip(WINDOW_BYTES // max(each, 1), 1, most))
        self.window = jax.jit(self._window)
        self.report = jax.jit(job.report)
        self.receive = jax.jit(self._receive, donate_argnums=0)  # in place: it holds the positions of all workers
        self.duplicate = jax.jit(_copied)
        self.adopt = jax.jit(job.coupling.adopt)
        self.join = jax.jit(job.coupling.join, donate_argnums=0)
        self.leave = jax.jit(job.coupling.leave, donate_argnums=0)
        self.payload = jax.jit(job.coupling.payload)
        self.heat = jax.jit(lambda owner: job.roles[0].kinetic_temperature(owner.state))
        self.copy = jax.jit(lambda centre: _copied(centre.copy()))
        self.served = jax.jit(lambda centre, seen: _copied((centre.state.position, job.measure_server(centre, seen))))
        self.is_finite = jax.jit(_is_finite)

    def open(self) -> tuple[list[Place], Any]:
        """All workers where they start, and the centre."""
        shared, centre = jax.jit(lambda starts: dataclasses.replace(self.job, starts=starts).open())(self.job.starts)
        places = []
        for chain in range(self.job.chains):
            worker = shared._replace(state=row(shared.state, chain))
            places.append(Place(worker, row(new_seen(1), 0), jnp.zeros((), jnp.int32)))
        return places, centre

    def compile(self, data: Any, place: Place, centre: Any) -> None:
        """Call each function once on these devices: nobody shall wait for a compiler while another holds the centre."""
        self.run(data, place, 0, [])
        if self.exchanges:
            here, there = place.step.device, jax.tree.leaves(centre)[0].device
            self.adopt(place.worker, jax.device_put(self.copy(centre), here), np.int32(0))
            told = self.report(place.worker, 0, 0), self.payload(place.worker), place.seen
            report, payload, seen = jax.device_put(told, there)
            self.is_finite(report.payload)
            centre, _ = self.receive(self.duplicate(centre), report._replace(steps=0), self.key_of(0))
            if self.job.coupling.server_owns_chain:
                self.served(centre, seen)
                self.heat(centre)
            jax.block_until_ready(self.leave(self.join(centre, 0, payload), 0))

    def plan(self, step: int, longest: int) -> tuple[list[int], list[int]]:
        """The next window of a worker that has taken `step` steps: its stretches, and the draw that each gives (or -1).

        It ends where a report is due, at the end of the run, after `longest` steps, or when the draws fill its room.
        """
        job = self.job
        end = min(step - step % self.report_every + self.report_every, job.num_steps, step + longest)
        lengths, draws, at = [], [], step
        if not job.coupling.server_owns_chain:
            kept = job.kept_steps
            first = int(np.searchsorted(kept, step, "right"))
            for draw in range(first, min(first + self.room, len(kept))):
                if kept[draw] > end:
                    break
                lengths.append(int(kept[draw]) - at)
                draws.append(draw)
                at = int(kept[draw])
        if at < end and len(lengths) < self.room:
            lengths.append(end - at)
            draws.append(-1)
        return lengths, draws

    def run(self, data: Any, place: Place, chain: int, lengths: Sequence[int]) -> tuple[Place, Rows]:
        """A window of these stretches."""
        padded = np.zeros(self.room, np.int32)
        padded[: len(lengths)] = lengths
        return self.window(data, place, np.int32(chain), padded, np.int32(len(lengths)))

    def _window(self, data: Any, place: Place, chain: Any, lengths: Any, count: Any) -> tuple[Place, Rows]:
        job = self.job
        draws, stats = job.empty_draws(self.room)
        rows = Rows(*tree_map(lambda leaf: leaf[0], (draws, stats)))

        def stretch(j: Any, loop: tuple[Place, Rows]) -> tuple[Place, Rows]:
            place, rows = loop
            steps = lengths[j]

            def one(i: Any, state: tuple[Worker, Seen]) -> tuple[Worker, Seen]:
                return job.advance(data, *state, chain, place.step + i, i == steps - 1)

            worker, seen = jax.lax.fori_loop(0, steps, one, (place.worker, place.seen))
            step = place.step + steps
            place = Place(worker, job.inspect(worker, seen, step), step)
            if job.coupling.server_owns_chain:
                return place, rows
            now = Rows(worker.state.position, job.measure(worker, place.seen, step))
            return place, tree_map(lambda room, new: room.at[j].set(new), rows, now)

        return jax.lax.fori_loop(0, count, stretch, (place, rows))

    def _receive(self, centre: Any, report: Report, key: jax.Array) -> tuple[Any, Copy]:
        return self.job.coupling.receive(self.job.roles[1], centre, report, key)

    def key_of(self, generation: int) -> jax.Array:
        """Each generation of the centre has noise of its own, for it may come to the same version once more."""
        return self.job.key if generation == 0 else jax.random.fold_in(self.job.key, generation)

    @cached_property
    def fingerprint(self) -> str:
        """Of what a worker reports."""

        def reported() -> Params:
            shared, _ = self.job.open()
            return self.job.coupling.payload(shared._replace(state=row(shared.state, 0)))

        return fingerprint(jax.eval_shape(reported))

    @cached_property
    def message_bytes(self) -> int:
        """Bytes of a report or an answer."""
        return num_bytes(self.job.starts) // self.job.chains


def _copied(tree: Any) -> Any:
    """The same values in memory of their own, which stays when the centre's is written over."""
    return tree_map(jnp.copy, tree)


def _is_finite(tree: Params) -> jax.Array:
    return jax.tree.reduce(jnp.logical_and, tree_map(lambda leaf: jnp.all(jnp.isfinite(leaf)), tree))


Keep = Callable[[int, int, Params, dict[str, Any]], None]
"""What is called with chain, number, position and statistics of each draw."""


def replay(job: Job, log: Sequence[Event], keep: Keep) -> tuple[list[Place], Any]:
    """Carry out a log of threads, event by event, in one thread. Of draws handed to `keep`, the last wins."""
    pieces = Pieces(job)
    places, centre = pieces.open()
    answers: list[Copy | None] = [None] * job.chains
    written, key, generation = pieces.duplicate(centre), pieces.key_of(0), 0
    wanted = {(event.seq, event.version) for event in log if event.kind is Kind.ADOPT and event.box == -2}
    copies: dict[tuple[int, int], Copy] = {}
    late: dict[tuple[int, int, int], tuple[Report, Seen]] = {}
    data = job.target.data
    served = job.coupling.server_owns_chain
    for event in log:
        worker = event.worker
        if event.kind is Kind.RUN:
            places[worker], rows = pieces.run(data, places[worker], worker, [event.steps])
            if event.draw >= 0:
                keep(worker, event.draw, *jax.device_get(row(rows, 0)))
        elif event.kind is Kind.REPORT:
            now = pieces.report(places[worker].worker, worker, event.steps), places[worker].seen
            report, seen = late.pop((worker, event.incarnation, event.seq), now)
            centre, answers[worker] = pieces.receive(centre, report._replace(steps=np.int32(event.steps)), key)
            if served and event.draw >= 0:
                keep(0, event.draw, *jax.device_get(pieces.served(centre, seen)))
        elif event.kind is Kind.SEND:
            report = pieces.report(places[worker].worker, worker, 0)
            late[worker, event.incarnation, event.seq] = report, places[worker].seen
        elif event.kind is Kind.ADOPT and event.box < 0:
            place = places[worker]
            copy = answers[worker] if event.box == -1 else copies[event.seq, event.version]
            places[worker] = place._replace(worker=pieces.adopt(place.worker, copy, place.step - event.steps))
        elif event.kind is Kind.JOIN:
            place = places[worker]
            late = {which: message for which, message in late.items() if which[0] != worker}  # of an earlier life
            centre = pieces.join(centre, worker, pieces.payload(place.worker))
            places[worker] = place._replace(worker=pieces.adopt(place.worker, pieces.copy(centre), place.step))
        elif event.kind is Kind.LEAVE:
            centre = pieces.leave(centre, worker)
        elif event.kind is Kind.SNAPSHOT:
            written = pieces.duplicate(centre)
        elif event.kind is Kind.REBUILD:
            centre, generation = pieces.duplicate(written), event.seq
            key = pieces.key_of(generation)
        else:
            raise HookeanError(f"a log with {event.kind.name} is not one of threads")
        if event.kind is not Kind.ADOPT and (generation, event.version) in wanted:
            copies[generation, event.version] = pieces.copy(centre)
    return places, centre
