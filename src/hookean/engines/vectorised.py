"""K chains in one compiled program on one device. All step together and exchange together: no asynchrony.

The program runs segments: a few steps of all chains, then an exchange and a draw where they are due. Warm-up and
thinning happen inside, so that memory holds the kept draws only; they wait on the device in a buffer until the host
takes them. The host asks for as many segments at a time as take about a quarter of a second, and looks between.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling import Worker
from hookean.engines.base import Engine, broken, buffered_draws, temperature
from hookean.job import SHARED_COPY, Job, Progress, Seen, new_seen
from hookean.recorder import Recorder, Saved, Snapshot, Window
from hookean.tree import num_bytes, row, tree_map
from hookean.types import Params

LONGEST_SEGMENT = 50
SECONDS_BETWEEN_LOOKS = 0.25


class Carry(NamedTuple):
    """What the compiled loop hands on."""

    step: jax.Array
    workers: Worker
    centre: Any
    seen: Seen


class Room(NamedTuple):
    """Draws and statistics that wait for the host, and how many."""

    kept: jax.Array
    draws: Params
    stats: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Vectorised(Engine):
    """One compiled program for all chains. The fastest on one accelerator."""

    summary: ClassVar[str] = "all chains in one compiled program, exchanging together"

    def run(self, job: Job, recorder: Recorder, saved: Saved | None = None) -> dict[str, Any]:
        """Segment after segment."""

        def begin(key: jax.Array, starts: Params) -> Carry:
            return _open(dataclasses.replace(job, key=key, starts=starts))

        if saved is None:
            carry = jax.jit(begin)(job.key, job.starts)
        else:
            carry = tree_map(jnp.asarray, saved.like(jax.eval_shape(begin, job.key, job.starts)))
        length, step = segment_length(job), int(carry.step)
        whole = job.num_steps - job.num_steps % length
        # What is no whole segment is taken step by step: the end of a run, and of one that is now made longer.
        for size, last in ((1, min(-(-step // length) * length, job.num_steps)), (length, whole), (1, job.num_steps)):
            if int(carry.step) < last:
                carry = self._loop(job, carry, size, last, recorder)
        recorder.save(Snapshot(carry, {}))
        return {"steps": int(carry.step), "final": (carry.workers, carry.centre)}

    def _loop(self, job: Job, carry: Carry, length: int, last: int, recorder: Recorder) -> Carry:
        """Segments of `length` steps until step `last`."""

        def program(carry: Carry, room: Room, key: jax.Array, data: Any, count: Any) -> tuple[Carry, Room]:
            return _segments(dataclasses.replace(job, key=key), carry, room, data, length, count)

        compiled = jax.jit(program, donate_argnums=(0, 1))  # handed over, so that all is written in place
        capacity = buffered_draws(job)
        room = _room(job, capacity)
        step, at_once = int(carry.step), 1
        first = True
        while step < last and not recorder.stopping:
            # No more than fill the buffer: up to the step before the draw for which there is no room.
            kept = int(np.searchsorted(job.kept_steps, step, "right"))
            full = job.kept_steps[kept + capacity] if kept + capacity < len(job.kept_steps) else last + length
            count = max(1, min(at_once, (last - step) // length, (int(full) - 1 - step) // length))
            began = time.perf_counter()
            carry, room = compiled(carry, room, job.key, job.target.data, count)
            self._hand_over(job, recorder, room, kept)
            room = room._replace(kept=jnp.zeros_like(room.kept))
            error = broken(job, carry.workers, carry.centre, carry.seen)
            if error is not None:
                raise error
            took = time.perf_counter() - began
            if not first:  # the first call is mostly compilation
                pace = count / max(took, 1e-9)
                at_once = max(1, min(2 * at_once, math.ceil(pace * SECONDS_BETWEEN_LOOKS)))
            first = False
            self._count(job, recorder, step, step + count * length, took)
            step += count * length
            self._look(job, recorder, carry, step)
        return carry

    def _hand_over(self, job: Job, recorder: Recorder, room: Room, first: int) -> None:
        count = int(room.kept)
        if count == 0:
            return
        draws, stats = jax.device_get(tree_map(lambda x: x[:, :count], (room.draws, room.stats)))
        for chain in range(job.num_sampled):
            recorder.keep(chain, first, row(draws, chain), row(stats, chain))

    def _look(self, job: Job, recorder: Recorder, carry: Carry, step: int) -> None:
        heat = temperature(job, carry.workers, carry.centre)
        potentials = np.asarray(carry.seen.potential)

        def windows() -> list[Window]:
            return [Window(chain, step, float(x), heat, recorder) for chain, x in enumerate(potentials)]

        recorder.look(Progress(step, float(np.mean(potentials)), heat), windows, lambda: Snapshot(carry, {}))

    def _count(self, job: Job, recorder: Recorder, start: int, end: int, seconds: float) -> None:
        counts, rhythm = recorder.telemetry, job.coupling.rhythm
        counts.steps += job.chains * (end - start)
        counts.stepping += seconds
        if rhythm is not None:
            rounds = end // rhythm.report - start // rhythm.report
            counts.exchanges += job.chains * rounds
            counts.bytes += 2 * rounds * num_bytes(job.starts)
            counts.aged(rhythm.refresh - 1, job.chains * rounds)


def segment_length(job: Job) -> int:
    """Steps between two moments at which something else may be due."""
    rhythm = job.coupling.rhythm
    common = math.gcd(job.thin, job.warmup, 0 if rhythm is None else rhythm.report)
    return max(d for d in range(1, min(common, LONGEST_SEGMENT, job.num_steps) + 1) if common % d == 0)


def _open(job: Job) -> Carry:
    workers, centre = job.open()
    return Carry(jnp.zeros((), jnp.int32), workers, centre, new_seen(job.chains))


def _room(job: Job, capacity: int) -> Room:
    return Room(jnp.zeros((), jnp.int32), *job.empty_draws(capacity))


def _segments(job: Job, carry: Carry, room: Room, data: Any, length: int, count: Any) -> tuple[Carry, Room]:
    Loop = tuple[Any, Carry, Room]

    def unbroken(loop: Loop) -> Any:
        return (loop[0] < count) & jnp.all(loop[1].seen.broken_at < 0)

    def one(loop: Loop) -> Loop:
        return loop[0] + 1, *_segment(job, loop[1], loop[2], data, length)

    _, carry, room = jax.lax.while_loop(unbroken, one, (0, carry, room))
    return carry, room


def _segment(job: Job, carry: Carry, room: Room, data: Any, length: int) -> tuple[Carry, Room]:
    """`length` steps of all chains, then what is due."""
    chains = jnp.arange(job.chains)
    advance = jax.vmap(job.advance, (None, SHARED_COPY, 0, 0, None, None), (SHARED_COPY, 0))

    def one(j: Any, state: tuple[Worker, Seen]) -> tuple[Worker, Seen]:
        return advance(data, *state, chains, carry.step + j, j == length - 1)

    workers, seen = jax.lax.fori_loop(0, length, one, (carry.workers, carry.seen))
    step = carry.step + length
    seen = jax.vmap(job.inspect, (SHARED_COPY, 0, None))(workers, seen, step)
    carry = carry._replace(step=step, workers=workers, seen=seen)
    healthy = jnp.all(seen.broken_at < 0)
    rhythm = job.coupling.rhythm
    if job.coupling.server_owns_chain:  # a draw is the state after the server has heard all
        carry = _when(healthy, lambda c: _exchange(job, c), carry)
    room = _when(healthy & job.keeps(step), lambda room: _keep(job, carry, room), room)
    if rhythm is None or job.coupling.server_owns_chain:
        return carry, room
    due = healthy if length % rhythm.report == 0 else healthy & (step % rhythm.report == 0)
    return _when(due, lambda c: _exchange(job, c), carry), room


def _when(condition: Any, change: Any, value: Any) -> Any:
    return jax.lax.cond(condition, change, lambda value: value, value)


def _exchange(job: Job, carry: Carry) -> Carry:
    """All report, the centre answers, and all take the answer if it is time."""
    rhythm = job.coupling.rhythm
    assert rhythm is not None
    chains = jnp.arange(job.chains)
    reports = jax.vmap(job.report, (SHARED_COPY, 0, None))(carry.workers, chains, rhythm.report)
    centre, copy = job.coupling.receive_all(job.roles[1], carry.centre, reports, job.key)
    adopted = jax.vmap(job.coupling.adopt, (SHARED_COPY, None, None), SHARED_COPY)(carry.workers, copy, carry.step)
    if rhythm.refresh != rhythm.report:
        due = carry.step % rhythm.refresh == 0
        adopted = tree_map(lambda new, old: jnp.where(due, new, old), adopted, carry.workers)
    return carry._replace(workers=adopted, centre=centre)


def _keep(job: Job, carry: Carry, room: Room) -> Room:
    """Write the states and their statistics where the next draw belongs."""
    if job.coupling.server_owns_chain:
        position = tree_map(lambda x: x[None], carry.centre.state.position)
        seen = tree_map(lambda x: jnp.mean(x, 0), carry.seen)
        stats = tree_map(lambda x: x[None], job.measure_server(carry.centre, seen))
    else:
        position = carry.workers.state.position
        stats = jax.vmap(job.measure, (SHARED_COPY, 0, None))(carry.workers, carry.seen, carry.step)

    def write(room_of: jax.Array, value: jax.Array) -> jax.Array:
        return room_of.at[:, room.kept].set(value)

    draws, stats = tree_map(write, room.draws, position), tree_map(write, room.stats, stats)
    return Room(room.kept + 1, draws, stats)
