"""Asynchronous workers, simulated: a deterministic clock in one thread. The reference for every other engine.

A scenario gives the log of the run beforehand (`hookean.exchange.timeline`); here the log is executed, event by event,
in one compiled loop. The same log and seed give the same bits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling import Worker
from hookean.engines.base import Engine, broken
from hookean.exchange import Copy, Event, Kind, Report, Scenario, num_boxes, timeline
from hookean.job import Job, Progress, Result, Seen, Watch, new_seen
from hookean.tree import num_bytes, row, set_row, tree_map
from hookean.types import Params

CHUNK = 512
"""Events in one call of the compiled loop."""
SMALL_CHUNK = 32


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
            seed=int(jax.random.bits(job.key, dtype=jnp.uint32)),
        )
        return execute(job, log, watch)


def execute(job: Job, log: Sequence[Event], watch: Watch) -> Result:
    """Run the events of `log` in their order."""
    restores = any(event.kind is Kind.RESTORE for event in log)
    carry = jax.jit(lambda key: _open(dataclasses.replace(job, key=key), num_boxes(log), restores))(job.key)

    def program(carry: Carry, key: jax.Array, data: Any, events: Columns) -> Carry:
        return _run(dataclasses.replace(job, key=key), carry, data, events)

    compiled = jax.jit(program, donate_argnums=0)
    columns = Columns(*(np.array([getattr(event, name) for event in log], np.int32) for name in Columns._fields))
    done, chunk = 0, SMALL_CHUNK
    while done < len(log):
        began = time.perf_counter()
        piece = Columns(*(column[done : done + chunk] for column in columns))
        missing = chunk - len(piece.kind)
        # A run of no steps without a draw changes nothing.
        piece = Columns(*(np.pad(c, (0, missing), constant_values=-1 if c is piece.draw else 0) for c in piece))
        carry = compiled(carry, job.key, job.target.data, piece)
        done = min(done + chunk, len(log))
        error = broken(job, carry.workers, carry.centre, carry.seen)
        if error is not None:
            error.run = _result(job, carry, log[:done])
            raise error
        steps = int(jnp.mean(carry.steps))
        watch(Progress(steps, float(jnp.nanmean(carry.seen.potential)), float("nan")))
        if done == SMALL_CHUNK or time.perf_counter() - began < 0.25:
            chunk = CHUNK
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


def _run(job: Job, carry: Carry, data: Any, events: Columns) -> Carry:
    def one(carry: Carry, event: Columns) -> tuple[Carry, None]:
        event = event._replace(kind=jnp.where(jnp.all(carry.seen.broken_at < 0), event.kind, len(Kind)))
        draws, stats = carry.draws, carry.stats  # kept out of the switch, to be written in place
        rest = carry._replace(draws=None, stats={})
        branches = [lambda c, act=act: act(job, c, data, event) for act in _ACTIONS]
        rest = jax.lax.switch(event.kind, branches if rest.centre is not None else [branches[0], _idle], rest)
        kept = (event.draw >= 0) & jnp.all(rest.seen.broken_at < 0)
        position, measured, chain = _draw(job, rest, event)

        def write(room: jax.Array, value: jax.Array) -> jax.Array:
            old = room[chain, event.draw]
            return room.at[chain, event.draw].set(jnp.where(kept, value, old))

        draws, stats = tree_map(write, draws, position), tree_map(write, stats, measured)
        return rest._replace(draws=draws, stats=stats), None

    return jax.lax.scan(one, carry, events)[0]


def _draw(job: Job, carry: Carry, event: Columns) -> tuple[Params, dict[str, jax.Array], Any]:
    """What would be kept after this event."""
    seen = row(carry.seen, event.worker)
    if job.coupling.server_owns_chain:
        if_all = tree_map(lambda x: jnp.mean(x, 0), carry.seen)
        seen = tree_map(lambda one, mean: jnp.where(event.worker < 0, mean, one), seen, if_all)
        return carry.centre.state.position, job.measure_server(carry.centre, seen), 0
    worker = row(carry.workers, event.worker)
    return worker.state.position, job.measure(worker, seen, carry.steps[event.worker]), event.worker


def _advance(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    i, start = event.worker, carry.steps[event.worker]

    def one(j: Any, state: tuple[Worker, Seen]) -> tuple[Worker, Seen]:
        return job.advance(data, *state, i, start + j, j == event.steps - 1)

    worker, seen = jax.lax.fori_loop(0, event.steps, one, (row(carry.workers, i), row(carry.seen, i)))
    end = start + event.steps
    seen = job.inspect(worker, seen, end)
    return carry._replace(
        workers=set_row(carry.workers, i, worker),
        seen=set_row(carry.seen, i, seen),
        steps=carry.steps.at[i].set(end),
    )


def _send(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    worker = row(carry.workers, event.worker)
    carry = carry._replace(reports=set_row(carry.reports, event.box, job.report(worker, event.worker, event.steps)))
    return carry if carry.saved is None else carry._replace(saved=set_row(carry.saved, event.worker, worker))


def _receive(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    report = row(carry.reports, event.box)._replace(steps=event.steps)
    centre, copy = job.coupling.receive(job.roles[1], carry.centre, report, job.key)
    return carry._replace(centre=centre, copies=set_row(carry.copies, event.box, copy))


def _adopt(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    i = event.worker
    asked = carry.steps[i] - event.steps
    worker = job.coupling.adopt(row(carry.workers, i), row(carry.copies, event.box), asked)
    return carry._replace(workers=set_row(carry.workers, i, worker))


def _leave(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    return carry._replace(centre=job.coupling.leave(carry.centre, event.worker))


def _join(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    i = event.worker
    worker = row(carry.workers, i)
    centre = job.coupling.join(carry.centre, i, job.coupling.payload(worker))
    worker = job.coupling.adopt(worker, centre.copy(), carry.steps[i])
    return carry._replace(centre=centre, workers=set_row(carry.workers, i, worker))


def _restore(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    if carry.saved is None:
        return carry
    i = event.worker
    return carry._replace(
        workers=set_row(carry.workers, i, row(carry.saved, i)), steps=carry.steps.at[i].add(-event.steps)
    )


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


def _nothing(job: Job, carry: Carry, data: Any, event: Columns) -> Carry:
    return carry


def _idle(carry: Carry) -> Carry:
    return carry


_ACTIONS = (_advance, _send, _receive, _adopt, _leave, _join, _restore, _barrier, _refresh, _nothing)
"""In the order of `Kind`, and last what is done once a chain is broken."""


def _result(job: Job, carry: Carry, log: Sequence[Event]) -> Result:
    info: dict[str, Any] = {
        "steps": int(jnp.max(carry.steps)),
        "final": (carry.workers, carry.centre),
        "log": list(log),
        "seconds": log[-1].time if log else 0.0,
    }
    return Result(carry.draws, carry.stats, info)
