"""K chains in one compiled program on one device. All step together and exchange together: no asynchrony.

The program runs segments: a few steps of all chains, then an exchange and a draw where they are due. Warm-up and
thinning happen inside, so that memory holds the kept draws only. The host asks for as many segments at a time as take
about a quarter of a second, and looks at the progress between.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from hookean.coupling import Worker
from hookean.engines.base import Engine, broken, temperature
from hookean.job import SHARED_COPY, Job, Progress, Result, Seen, Watch, new_seen
from hookean.tree import tree_map
from hookean.types import Params

LONGEST_SEGMENT = 50
SECONDS_BETWEEN_LOOKS = 0.25


class Carry(NamedTuple):
    """What the compiled loop hands on."""

    step: jax.Array
    workers: Worker
    centre: Any
    seen: Seen
    kept: jax.Array
    draws: Params
    stats: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Vectorised(Engine):
    """One compiled program for all chains. The fastest on one accelerator."""

    summary: ClassVar[str] = "all chains in one compiled program, exchanging together"

    def run(self, job: Job, watch: Watch) -> Result:
        """Segment after segment."""
        length = segment_length(job)

        def begin(key: jax.Array, starts: Params) -> Carry:
            return _open(dataclasses.replace(job, key=key, starts=starts))

        carry = jax.jit(begin)(job.key, job.starts)
        segments, rest = divmod(job.num_steps, length)
        carry = self._loop(job, carry, length, segments, watch)
        if rest:
            carry = self._loop(job, carry, 1, rest, watch)
        return _result(job, carry)

    def _loop(self, job: Job, carry: Carry, length: int, segments: int, watch: Watch) -> Carry:
        def program(carry: Carry, key: jax.Array, data: Any, count: Any) -> Carry:
            return _segments(dataclasses.replace(job, key=key), carry, data, length, count)

        # The buffers are handed over, so that draws are written in place.
        compiled = jax.jit(program, donate_argnums=0)
        done, at_once = 0, 1
        while done < segments:
            count = min(at_once, segments - done)
            began = time.perf_counter()
            carry = compiled(carry, job.key, job.target.data, count)
            error = broken(job, carry.workers, carry.centre, carry.seen)
            if error is not None:
                error.run = _result(job, carry)
                raise error
            if done > 0:  # the first call is mostly compilation
                pace = count / max(time.perf_counter() - began, 1e-9)
                at_once = max(1, min(2 * at_once, math.ceil(pace * SECONDS_BETWEEN_LOOKS)))
            done += count
            watch(
                Progress(
                    int(carry.step),
                    float(jnp.mean(carry.seen.potential)),
                    temperature(job, carry.workers, carry.centre),
                )
            )
        return carry


def segment_length(job: Job) -> int:
    """Steps between two moments at which something else may be due."""
    rhythm = job.coupling.rhythm
    common = math.gcd(job.thin, job.warmup, 0 if rhythm is None else rhythm.report)
    return max(d for d in range(1, min(common, LONGEST_SEGMENT, job.num_steps) + 1) if common % d == 0)


def _open(job: Job) -> Carry:
    workers, centre = job.open()
    zero = jnp.zeros((), jnp.int32)
    return Carry(zero, workers, centre, new_seen(job.chains), zero, *job.empty_draws())


def _segments(job: Job, carry: Carry, data: Any, length: int, count: Any) -> Carry:
    def unbroken(loop: tuple[Any, Carry]) -> Any:
        return (loop[0] < count) & jnp.all(loop[1].seen.broken_at < 0)

    def one(loop: tuple[Any, Carry]) -> tuple[Any, Carry]:
        return loop[0] + 1, _segment(job, loop[1], data, length)

    return jax.lax.while_loop(unbroken, one, (0, carry))[1]


def _segment(job: Job, carry: Carry, data: Any, length: int) -> Carry:
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
    if job.coupling.server_owns_chain:  # a draw is the state after the server has heard all
        carry = _when(healthy, lambda c: _exchange(job, c), carry)
        return _when(healthy & job.keeps(step), lambda c: _keep(job, c), carry)
    carry = _when(healthy & job.keeps(step), lambda c: _keep(job, c), carry)
    rhythm = job.coupling.rhythm
    if rhythm is None:
        return carry
    due = healthy if length % rhythm.report == 0 else healthy & (step % rhythm.report == 0)
    return _when(due, lambda c: _exchange(job, c), carry)


def _when(condition: Any, change: Any, carry: Carry) -> Carry:
    return jax.lax.cond(condition, change, lambda carry: carry, carry)


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


def _keep(job: Job, carry: Carry) -> Carry:
    """Write the states and their statistics where the next draw belongs."""
    if job.coupling.server_owns_chain:
        position = tree_map(lambda x: x[None], carry.centre.state.position)
        seen = tree_map(lambda x: jnp.mean(x, 0), carry.seen)
        stats = tree_map(lambda x: x[None], job.measure_server(carry.centre, seen))
    else:
        position = carry.workers.state.position
        stats = jax.vmap(job.measure, (SHARED_COPY, 0, None))(carry.workers, carry.seen, carry.step)

    def write(room: jax.Array, value: jax.Array) -> jax.Array:
        return room.at[:, carry.kept].set(value)

    draws, stats = tree_map(write, carry.draws, position), tree_map(write, carry.stats, stats)
    return carry._replace(kept=carry.kept + 1, draws=draws, stats=stats)


def _result(job: Job, carry: Carry) -> Result:
    """Draws so far."""
    kept = int(carry.kept)
    draws, stats = carry.draws, carry.stats
    if kept < len(job.kept_steps):  # not else, for this copies them
        draws, stats = tree_map(lambda x: x[:, :kept], (draws, stats))
    info: dict[str, Any] = {"steps": int(carry.step), "final": (carry.workers, carry.centre)}
    return Result(draws, stats, info)
