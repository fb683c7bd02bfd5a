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
from hookean.engines.base import Engine, broken, temperature
from hookean.exchange import Copy, Event, Kind, Report, Scenario, num_boxes, timeline
from hookean.job import Job, Progress, Result, Seen, Watch, new_seen
from hookean.random import Stream, stream_key
from hookean.tree import num_bytes, row, set_row, tree_map
from hookean.types import Params

SECONDS_BETWEEN_LOOKS = 0.25
MOST_AT_ONCE = 4096
"""Events in one call of the compiled loop."""


class Carry(NamedTuple):
    """Workers and centre, messages under way, and draws."""

    workers: Worker
    steps: jax.Array
    centre: Any
    reports: Report | None
    copies: Copy | None
    answer: Copy | None
    saved: Worker | None
    seen: Seen
    draws: Params
    stats: dict[str, jax.Array]


class Desk(NamedTuple):
    """What an event of one worker can touch: that worker, the centre, and the letter box that is used."""

    worker: Worker
    step: jax.Array
    seen: Seen
    saved: Worker | None
    centre: Any
    report: Report | None
    copy: Copy | None


class Columns(NamedTuple):
    """A piece of a log as arrays."""

    kind: Any
    worker: Any
    steps: Any
    draw: Any
    box: Any


@dataclasses.dataclass(frozen=True)
class Simulated(Engine):
    """A scenario of workers that are fast, slow, late or lost."""

    scenario: Scenario = Scenario()

    summary: ClassVar[str] = "asynchronous workers on a simulated clock"

    def check(self, chains: int) -> None:
        """Refuse a scenario that does not fit."""
        self.scenario.check(chains)

    def run(self, job: Job, watch: Watch) -> Result:
        """Draw up the log, then execute it."""
        log = timeline(
            self.scenario,
            job.chains,
            job.num_steps,
            job.kept_steps,
            job.coupling.rhythm,
            server_owns_chain=job.coupling.server_owns_chain,
            num_bytes=num_bytes(row(job.starts, 0)),
            seed=int(jax.random.bits(stream_key(job.key, Stream.SCENARIO), dtype=jnp.uint32)),
        )
        return execute(job, log, watch)


def execute(job: Job, log: Sequence[Event], watch: Watch) -> Result:
    """Run the events of `log` in their order."""
    kinds = sorted({event.kind for event in log})
    columns = Columns(*(np.array([getattr(event, name) for event in log], np.int32) for name in Columns._fields))

    def begin(key: jax.Array, starts: Params) -> Carry:
        return _open(dataclasses.replace(job, key=key, starts=starts), num_boxes(log), Kind.RESTORE in kinds)

    def program(carry: Carry, key: jax.Array, data: Any, events: Columns, count: Any) -> Carry:
        return _run(dataclasses.replace(job, key=key), kinds, carry, data, events, count)

    carry = jax.jit(begin)(job.key, job.starts)
    compiled = jax.jit(program, donate_argnums=0)
    done, at_once = 0, 1
    while done < len(log):
        count = min(at_once, len(log) - done)
        piece = Columns(*(np.resize(column[done : done + count], MOST_AT_ONCE) for column in columns))
        began = time.perf_counter()
        carry = compiled(carry, job.key, job.target.data, piece, count)
        error = broken(job, carry.workers, carry.centre, carry.seen)
        if error is not None:
            error.run = _without_empty_end(_result(job, carry, log[: done + count]))
            raise error
        if done > 0:  # the first call is mostly compilation
            pace = count / max(time.perf_counter() - began, 1e-9)
            at_once = max(1, min(4 * at_once, math.ceil(pace * SECONDS_BETWEEN_LOOKS), MOST_AT_ONCE))
        done += count
        potential = float(jnp.nanmean(carry.seen.potential))
        watch(Progress(int(jnp.mean(carry.steps)), potential, temperature(job, carry.workers, carry.centre)))
    return _result(job, carry, log)


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
    return Carry(workers, steps, centre, reports, copies, answer, saved, new_seen(job.chains), *job.empty_draws())


def _run(job: Job, kinds: Sequence[Kind], carry: Carry, data: Any, events: Columns, count: Any) -> Carry:
    """The first `count` of `events`, which are of the kinds `kinds`. Once a chain is broken nothing more happens."""

    def one(index: Any, carry: Carry) -> Carry:
        event = row(events, index)
        unbroken = jnp.all(carry.seen.broken_at < 0)

        def act(kind: Kind, action: Callable[..., Any], on: Any) -> Any:
            due = unbroken & (event.kind == kind)
            return jax.lax.cond(due, lambda on: action(job, on, data, event), lambda on: on, on)

        everything = carry._replace(draws=None, stats={})
        for kind in kinds:
            if kind in _OF_ALL:
                everything = act(kind, _OF_ALL[kind], everything)
        desk = jax.lax.optimization_barrier(_take(everything, event))  # taken now, so that it can be written over
        for kind in kinds:
            if kind in _OF_ONE:
                desk = act(kind, _OF_ONE[kind], desk)
        everything = _put_back(everything, desk, event)
        kept = (event.draw >= 0) & jnp.all(everything.seen.broken_at < 0)
        position, measured, chain = _draw(job, desk, everything.seen, event)

        def write(room: jax.Array, value: jax.Array) -> jax.Array:
            old = room[chain, event.draw]
            return room.at[chain, event.draw].set(jnp.where(kept, value, old))

        draws, stats = tree_map(write, carry.draws, position), tree_map(write, carry.stats, measured)
        return everything._replace(draws=draws, stats=stats)

    return jax.lax.fori_loop(0, count, one, carry)


def _take(carry: Carry, event: Columns) -> Desk:
    """Of the whole, what `event` can touch. (Where it names no worker or box, the last, which is put back as it is.)"""
    who = row((carry.workers, carry.steps, carry.seen, carry.saved), event.worker)
    return Desk(*who, carry.centre, *row((carry.reports, carry.copies), event.box))


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


def _draw(job: Job, desk: Desk, all_seen: Seen, event: Columns) -> tuple[Params, dict[str, jax.Array], Any]:
    """What would be kept after this event."""
    if job.coupling.server_owns_chain:
        if_all = tree_map(lambda x: jnp.mean(x, 0), all_seen)
        seen = tree_map(lambda one, mean: jnp.where(event.worker < 0, mean, one), desk.seen, if_all)
        return desk.centre.state.position, job.measure_server(desk.centre, seen), 0
    return desk.worker.state.position, job.measure(desk.worker, desk.seen, desk.step), event.worker


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


def _without_empty_end(result: Result) -> Result:
    """Only as many draws as the fastest worker has kept; those that others still lack are NaN."""
    filled = np.any(np.isfinite(np.asarray(result.stats["potential"])), 0)
    draws, stats = tree_map(lambda leaf: leaf[:, : int(filled.sum())], (result.draws, result.stats))
    return result._replace(draws=draws, stats=stats)


def _result(job: Job, carry: Carry, log: Sequence[Event]) -> Result:
    info: dict[str, Any] = {
        "steps": int(jnp.max(carry.steps)),
        "final": (carry.workers, carry.centre),
        "log": list(log),
        # Not of leaves: the lease of a lost worker may end long after all others are done.
        "seconds": max((event.time for event in log if event.kind is not Kind.LEAVE), default=0.0),
    }
    return Result(carry.draws, carry.stats, info)
