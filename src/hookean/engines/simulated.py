"""Asynchronous workers, simulated: a deterministic clock in one thread. The reference for every other engine.

A scenario gives the log of the run beforehand (`hookean.exchange.timeline`); here the log is executed, event by event,
in one compiled loop. The same log and seed give the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling import Worker
from hookean.engines.base import Engine, broken, buffered_draws, temperature
from hookean.exchange import Copy, Event, Kind, Report, Scenario, num_boxes, timeline
from hookean.job import Job, Progress, Seen, new_seen
from hookean.random import Stream, stream_key
from hookean.recorder import Recorder, Saved, Snapshot, Window
from hookean.telemetry import Telemetry
from hookean.tree import num_bytes, row, set_row, tree_map
from hookean.types import Params

SECONDS_BETWEEN_LOOKS = 0.25
MOST_AT_ONCE = 4096
"""Events in one call of the compiled loop."""


class Carry(NamedTuple):
    """Workers and centre, and messages under way."""

    workers: Worker
    steps: jax.Array
    centre: Any
    reports: Report | None
    copies: Copy | None
    answer: Copy | None
    saved: Worker | None
    seen: Seen


class Desk(NamedTuple):
    """What an event of one worker can touch: that worker, the centre, and the letter box that is used."""

    worker: Worker
    step: jax.Array
    seen: Seen
    saved: Any  # this and the next three are None where nothing is exchanged
    centre: Any
    report: Any
    copy: Any


class Room(NamedTuple):
    """Draws and statistics that wait for the host, in slots."""

    draws: Params
    stats: dict[str, jax.Array]


class Columns(NamedTuple):
    """A piece of a log as arrays. `slot` is where the event's draw waits, -1 for none."""

    kind: Any
    worker: Any
    steps: Any
    slot: Any
    box: Any


@dataclasses.dataclass(frozen=True)
class Simulated(Engine):
    """A scenario of workers that are fast, slow, late or lost."""

    scenario: Scenario = Scenario()

    summary: ClassVar[str] = "asynchronous workers on a simulated clock"

    def check(self, chains: int) -> None:
        """Refuse a scenario that does not fit."""
        self.scenario.check(chains)

    def run(self, job: Job, recorder: Recorder, saved: Saved | None = None) -> dict[str, Any]:
        """Draw up the log, then execute it, stretch after stretch."""
        facts: dict[str, Any] = {"stretches": [], "done": 0} if saved is None else saved.facts
        done = facts["done"] if saved is not None and saved.leaves else 0
        ends = [*(end for end in facts["stretches"] if end < job.num_steps), job.num_steps]
        logs = [self._log(job, start, end) for start, end in zip([0, *ends], ends, strict=False)]
        log = [event for part in logs for event in part]
        boxes, restores = num_boxes(log), any(event.kind is Kind.RESTORE for event in log)

        def opening(boxes: int, restores: bool) -> Callable[..., Carry]:
            return lambda key, starts: _open(dataclasses.replace(job, key=key, starts=starts), boxes, restores)

        if saved is None or not saved.leaves:
            carry = jax.jit(opening(boxes, restores))(job.key, job.starts)
        else:
            shapes = jax.eval_shape(opening(facts["boxes"], facts["restores"]), job.key, job.starts)
            carry = _widened(tree_map(jnp.asarray, saved.like(shapes)), boxes, restores)
        kept = {"stretches": ends, "boxes": boxes, "restores": restores}
        carry = execute(job, log, recorder, carry, done, kept)
        return {
            "steps": int(jnp.max(carry.steps)),
            "final": (carry.workers, carry.centre),
            # Not of leaves: the lease of a lost worker may end long after all others are done.
            "seconds": max((event.time for event in log if event.kind is not Kind.LEAVE), default=0.0),
        }

    def _log(self, job: Job, start: int, end: int) -> list[Event]:
        """The log of steps `start` to `end`. What makes a run longer is a stretch of its own: the clock starts again,
        whoever is not lost begins at once, and crashes that were planned for earlier steps do not come again.
        """
        scenario, kept = self.scenario, job.kept_steps
        first = int(np.searchsorted(kept, start, "right"))
        if start > 0:
            lost = [c.worker for c in scenario.crashes if c.step < start and c.restart_after is None]
            crashes = [dataclasses.replace(c, step=c.step - start) for c in scenario.crashes if c.step >= start]
            crashes += [dataclasses.replace(c, step=0) for c in scenario.crashes if c.worker in lost]
            scenario = dataclasses.replace(scenario, crashes=crashes, joins=())
        log = timeline(
            scenario,
            job.chains,
            end - start,
            kept[first:] - start,
            job.coupling.rhythm,
            server_owns_chain=job.coupling.server_owns_chain,
            num_bytes=num_bytes(row(job.starts, 0)),
            seed=int(jax.random.bits(stream_key(job.key, Stream.SCENARIO, start), dtype=jnp.uint32)),
        )
        log = [event._replace(draw=event.draw + first) if event.draw >= 0 else event for event in log]
        left = start > 0 and job.coupling.rhythm is not None and not scenario.barrier  # whoever was done
        begin = range(job.chains) if left else ()
        return [*(Event(Kind.JOIN, worker) for worker in begin), *log]


def execute(
    job: Job,
    log: Sequence[Event],
    recorder: Recorder,
    carry: Carry,
    done: int = 0,
    facts: dict[str, Any] | None = None,
) -> Carry:
    """Run the events of `log` from `done` on, in their order. `facts` go into checkpoints."""
    kinds = sorted({event.kind for event in log})
    numbers = {
        name: np.array([getattr(event, name) for event in log], np.int32) for name in (*Columns._fields[:3], "box")
    }
    draws = np.array([event.draw for event in log], np.int32)
    keeps = draws >= 0
    capacity = buffered_draws(job) * job.num_sampled

    def program(carry: Carry, room: Room, key: jax.Array, data: Any, events: Columns, count: Any) -> tuple[Carry, Room]:
        return _run(dataclasses.replace(job, key=key), kinds, carry, room, data, events, count)

    compiled = jax.jit(program, donate_argnums=(0, 1))
    room = _room(job, capacity)
    at_once, first = 1, True
    while done < len(log) and not recorder.stopping:
        most = min(at_once, len(log) - done)
        so_far = np.cumsum(keeps[done : done + most])
        count = int(np.searchsorted(so_far, capacity, "right"))
        now = slice(done, done + count)
        slots = np.where(keeps[now], np.cumsum(keeps[now]) - 1, -1)
        columns = Columns(slot=slots, **{name: column[now] for name, column in numbers.items()})
        began = time.perf_counter()
        carry, room = compiled(
            carry, room, job.key, job.target.data, tree_map(lambda c: np.resize(c, MOST_AT_ONCE), columns), count
        )
        error = broken(job, carry.workers, carry.centre, carry.seen)
        _hand_over(job, recorder, room, log[now], unbroken_only=error is not None)
        recorder.log(log[now])
        if error is not None:
            raise error
        took = time.perf_counter() - began
        if not first:  # the first call is mostly compilation
            pace = count / max(took, 1e-9)
            at_once = max(1, min(4 * at_once, math.ceil(pace * SECONDS_BETWEEN_LOOKS), MOST_AT_ONCE))
        first = False
        done += count
        _count(recorder.telemetry, job, log[now], took)
        snapshot = Snapshot(carry, {**(facts or {}), "done": done})
        _look(job, recorder, carry, snapshot)
    recorder.save(Snapshot(carry, {**(facts or {}), "done": done}))
    return carry


def _hand_over(job: Job, recorder: Recorder, room: Room, events: Sequence[Event], unbroken_only: bool) -> None:
    """Draws of `events`, by slot; where a chain broke on the way, those that were still written."""
    kept = [(0 if job.coupling.server_owns_chain else e.worker, e.draw) for e in events if e.draw >= 0]
    if not kept:
        return
    draws, stats = jax.device_get(tree_map(lambda x: x[: len(kept)], (room.draws, room.stats)))
    for slot, (chain, draw) in enumerate(kept):
        if not unbroken_only or np.isfinite(stats["live"][slot]) or np.isfinite(stats["potential"][slot]):
            recorder.keep(chain, draw, *tree_map(lambda x, i=slot: x[i : i + 1], (draws, stats)))


def _look(job: Job, recorder: Recorder, carry: Carry, snapshot: Snapshot) -> None:
    potentials, steps = np.asarray(carry.seen.potential), np.asarray(carry.steps)
    heat = temperature(job, carry.workers, carry.centre)
    known = potentials[np.isfinite(potentials)]
    progress = Progress(int(np.mean(steps)), float(np.mean(known)) if len(known) else math.nan, heat)

    def windows() -> list[Window]:
        return [Window(i, int(steps[i]), float(potentials[i]), heat, recorder) for i in range(job.chains)]

    recorder.look(progress, windows, lambda: snapshot)


def _count(counts: Telemetry, job: Job, events: Sequence[Event], seconds: float) -> None:
    """Telemetry of what has been executed. A barrier is an exchange of everybody who steps."""
    counts.stepping += seconds
    message = num_bytes(job.starts) // job.chains
    for event in events:
        if event.kind is Kind.RUN:
            counts.steps += event.steps
        elif event.kind is Kind.RESTORE:
            counts.steps -= event.steps
            counts.redone += event.steps
            counts.restarts += 1
        elif event.kind in (Kind.RECEIVE, Kind.BARRIER):
            reports = 1 if event.kind is Kind.RECEIVE else job.chains
            counts.exchanges += reports
            counts.bytes += 2 * reports * message
        elif event.kind is Kind.ADOPT:
            counts.aged(event.steps)


def _open(job: Job, boxes: int, restores: bool) -> Carry:
    shared, centre = job.open()

    def spread(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (job.chains, *jnp.shape(leaf)))

    workers = shared._replace(**{name: tree_map(spread, getattr(shared, name)) for name in ("copy", "asked", "fresh")})
    steps = jnp.zeros(job.chains, jnp.int32)
    reports = copies = answer = None
    if centre is not None:
        answer = centre.copy()
        report = job.report(row(workers, 0), 0, 0)
        reports, copies = tree_map(
            lambda leaf: jnp.zeros((max(boxes, 1), *jnp.shape(leaf)), jnp.result_type(leaf)), (report, answer)
        )
    saved = workers if restores else None
    return Carry(workers, steps, centre, reports, copies, answer, saved, new_seen(job.chains))


def _widened(carry: Carry, boxes: int, restores: bool) -> Carry:
    """The same with room for what a longer log needs."""

    def wider(leaf: jax.Array) -> jax.Array:
        more = jnp.zeros((max(boxes - len(leaf), 0), *leaf.shape[1:]), leaf.dtype)
        return jnp.concatenate([leaf, more])

    reports, copies = tree_map(wider, (carry.reports, carry.copies))
    saved = carry.workers if restores and carry.saved is None else carry.saved
    return carry._replace(reports=reports, copies=copies, saved=saved)


def _room(job: Job, slots: int) -> Room:
    draws, stats = job.empty_draws(slots)
    return Room(*tree_map(lambda leaf: leaf[0], (draws, stats)))


def _run(
    job: Job, kinds: Sequence[Kind], carry: Carry, room: Room, data: Any, events: Columns, count: Any
) -> tuple[Carry, Room]:
    """The first `count` of `events`, which are of the kinds `kinds`. Once a chain is broken nothing more happens."""

    def one(index: Any, loop: tuple[Carry, Room]) -> tuple[Carry, Room]:
        carry, room = loop
        event = row(events, index)
        unbroken = jnp.all(carry.seen.broken_at < 0)

        def act(kind: Kind, action: Callable[..., Any], on: Any) -> Any:
            due = unbroken & (event.kind == kind)
            return jax.lax.cond(due, lambda on: action(job, on, data, event), lambda on: on, on)

        everything = carry
        for kind in kinds:
            if kind in _OF_ALL:
                everything = act(kind, _OF_ALL[kind], everything)
        desk = jax.lax.optimization_barrier(_take(everything, event))  # taken now, so that it can be written over
        for kind in kinds:
            if kind in _OF_ONE:
                desk = act(kind, _OF_ONE[kind], desk)
        everything = _put_back(everything, desk, event)
        kept = (event.slot >= 0) & jnp.all(everything.seen.broken_at < 0)
        position, measured = _draw(job, desk, everything.seen, event)

        # Once a chain is broken, NaN is kept: so the host knows what is no draw any more.
        def write(slots: jax.Array, value: jax.Array) -> jax.Array:
            otherwise = jnp.where(event.slot >= 0, jnp.nan, slots[event.slot])
            return slots.at[event.slot].set(jnp.where(kept, value, otherwise).astype(slots.dtype))

        return everything, Room(tree_map(write, room.draws, position), tree_map(write, room.stats, measured))

    return jax.lax.fori_loop(0, count, one, (carry, room))


def _take(carry: Carry, event: Columns) -> Desk:
    """Of the whole, what `event` can touch. Where it names no worker or box: the last, put back as it is."""
    worker, step, seen, saved = row((carry.workers, carry.steps, carry.seen, carry.saved), event.worker)
    report, copy = row((carry.reports, carry.copies), event.box)
    return Desk(worker, step, seen, saved, carry.centre, report, copy)


def _put_back(carry: Carry, desk: Desk, event: Columns) -> Carry:
    workers, steps, seen, saved = set_row(
        (carry.workers, carry.steps, carry.seen, carry.saved),
        event.worker,
        (desk.worker, desk.step, desk.seen, desk.saved),
    )
    reports, copies = set_row((carry.reports, carry.copies), event.box, (desk.report, desk.copy))
    return carry._replace(
        workers=workers, steps=steps, seen=seen, saved=saved, centre=desk.centre, reports=reports, copies=copies
    )


def _draw(job: Job, desk: Desk, all_seen: Seen, event: Columns) -> tuple[Params, dict[str, jax.Array]]:
    """What would be kept after this event."""
    if job.coupling.server_owns_chain:
        if_all = tree_map(lambda x: jnp.mean(x, 0), all_seen)
        seen = tree_map(lambda one, mean: jnp.where(event.worker < 0, mean, one), desk.seen, if_all)
        return desk.centre.state.position, job.measure_server(desk.centre, seen)
    return desk.worker.state.position, job.measure(desk.worker, desk.seen, desk.step)


def _advance(job: Job, desk: Desk, data: Any, event: Columns) -> Desk:
    def one(j: Any, state: tuple[Worker, Seen]) -> tuple[Worker, Seen]:
        return job.advance(data, *state, event.worker, desk.step + j, j == event.steps - 1)

    worker, seen = jax.lax.fori_loop(0, event.steps, one, (desk.worker, desk.seen))
    step = desk.step + event.steps
    return desk._replace(worker=worker, seen=job.inspect(worker, seen, step), step=step)


def _send(job: Job, desk: Desk, data: Any, event: Columns) -> Desk:
    report = job.report(desk.worker, event.worker, event.steps)
    return desk._replace(report=report, saved=None if desk.saved is None else desk.worker)


def _receive(job: Job, desk: Desk, data: Any, event: Columns) -> Desk:
    centre, copy = job.coupling.receive(job.roles[1], desk.centre, desk.report, job.key)
    return desk._replace(centre=centre, copy=copy)


def _adopt(job: Job, desk: Desk, data: Any, event: Columns) -> Desk:
    return desk._replace(worker=job.coupling.adopt(desk.worker, desk.copy, desk.step - event.steps))


def _leave(job: Job, desk: Desk, data: Any, event: Columns) -> Desk:
    return desk._replace(centre=job.coupling.leave(desk.centre, event.worker))


def _join(job: Job, desk: Desk, data: Any, event: Columns) -> Desk:
    centre = job.coupling.join(desk.centre, event.worker, job.coupling.payload(desk.worker))
    return desk._replace(centre=centre, worker=job.coupling.adopt(desk.worker, centre.copy(), desk.step))


def _restore(job: Job, desk: Desk, data: Any, event: Columns) -> Desk:
    return desk._replace(worker=desk.saved, step=desk.step - event.steps)


def _barrier(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    reports = jax.vmap(job.report, (0, 0, None))(carry.workers, jnp.arange(job.chains), event.steps)
    centre, answer = job.coupling.receive_all(job.roles[1], carry.centre, reports, job.key)
    return carry._replace(centre=centre, answer=answer)


def _refresh(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    assert carry.answer is not None
    adopted = jax.vmap(job.coupling.adopt, (0, None, 0))(carry.workers, carry.answer, carry.steps)
    live = carry.centre.live

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.reshape(live, (-1,) + (1,) * (new.ndim - 1)), new, old)

    return carry._replace(workers=tree_map(choose, adopted, carry.workers))


# Conditions go round no more than an event can touch: XLA tends to copy whatever a branch might have changed.
_OF_ONE = {
    Kind.RUN: _advance,
    Kind.SEND: _send,
    Kind.RECEIVE: _receive,
    Kind.ADOPT: _adopt,
    Kind.LEAVE: _leave,
    Kind.JOIN: _join,
    Kind.RESTORE: _restore,
}
"""What happens to one worker, its letter box and the centre."""

_OF_ALL = {Kind.BARRIER: _barrier, Kind.REFRESH: _refresh}
"""What happens to all at once."""
