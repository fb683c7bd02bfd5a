"""Many runs of one kind in one compiled program, looked at after chosen steps: what learning curves are made of.

Runs differ by seed, by numbers such as the step size or the strength of the springs, and by their data if wanted; a
sweep and its repetitions are one program. What is looked at goes to the host at once, so that no draws pile up. Chains
move and exchange exactly as under the engine `Vectorised`, with the same random numbers; but a run that breaks does not
end the others: it stands still, and `broken` says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling import Worker
from hookean.job import SHARED_COPY, Job, Seen, new_seen
from hookean.random import Stream, stream_key
from hookean.tree import select, tree_map
from hookean.types import Params

Vary = Callable[[Job, Any], Job]
"""(job, settings of one run) -> the job with these settings, which may be traced numbers."""


class State(NamedTuple):
    """One run."""

    workers: Worker
    centre: Any
    seen: Seen


class Followed(NamedTuple):
    """What was seen after `steps`: arrays [look, run, chain, ...]; `broken` [run]: the first bad step, or -1."""

    steps: np.ndarray
    seen: Any
    broken: np.ndarray


class Follower:
    """Compiled once, used for as many sets of runs as wanted; sets of one size share the program.

    Args:
        job: what all runs have in common, as `hookean.api.prepare` makes it. Its seed and starts are not used.
        init: key -> parameters, the start of a chain.
        look: (position of one chain, `given`) -> a pytree of arrays.
        steps: when to look, increasing.
        vary: makes each run's own job.
        each_has_data: whether `data` and `given` of a call have an axis of runs.
    """

    def __init__(
        self,
        job: Job,
        init: Callable[[jax.Array], Params],
        look: Callable[[Params, Any], Any],
        steps: Sequence[int],
        vary: Vary | None = None,
        each_has_data: bool = False,
    ) -> None:
        """Nothing is compiled yet."""
        self.job, self.steps = job, [int(step) for step in steps]
        rhythm = job.coupling.rhythm
        report = None if rhythm is None else rhythm.report
        self._length = math.gcd(*self.steps, 0 if report is None else report)

        def of(key: jax.Array, setting: Any) -> Job:
            return dataclasses.replace(job if vary is None else vary(job, setting), key=key)

        def begin(key: jax.Array, setting: Any) -> State:
            starts = jax.vmap(lambda chain: init(stream_key(key, Stream.START, chain)))(jnp.arange(job.chains))
            return State(*dataclasses.replace(of(key, setting), starts=starts).open(), new_seen(job.chains))

        def stretch(step: Any, state: State, key: jax.Array, setting: Any, data: Any, count: Any) -> tuple[Any, State]:
            own = of(key, setting)

            def one(_: Any, loop: tuple[Any, State]) -> tuple[Any, State]:
                return _advance(own, *loop, data, self._length, report)

            return jax.lax.fori_loop(0, count, one, (step, state))

        axis = 0 if each_has_data else None
        self._begin = jax.jit(jax.vmap(begin))
        self._stretch = jax.jit(jax.vmap(stretch, (None, 0, 0, 0, axis, None), (None, 0)), donate_argnums=1)
        self._look = jax.jit(jax.vmap(jax.vmap(look, (0, None)), (0, axis)))

    def __call__(
        self,
        seeds: Sequence[int],
        settings: Any = None,
        data: Any = None,
        given: Any = None,
        until: int | None = None,
    ) -> Followed:
        """Run `len(seeds)` runs side by side and look at every chain after each of the steps.

        Args:
            seeds: one for each run.
            settings: a pytree of arrays [run], for `vary`.
            data: the examples; None for the target's.
            given: what `look` gets besides a position.
            until: the last step at which to look; None for the last of all.
        """
        keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
        settings = tree_map(jnp.asarray, {} if settings is None else settings)
        data = self.job.target.data if data is None else data
        step, state = jnp.zeros((), jnp.int32), self._begin(keys, settings)
        found, done = [], 0
        wanted = [now for now in self.steps if until is None or now <= until]
        for now in wanted:
            step, state = self._stretch(step, state, keys, settings, data, (now - done) // self._length)
            done = now
            if self.job.coupling.server_owns_chain:
                positions = tree_map(lambda x: x[:, None], state.centre.state.position)
            else:
                positions = state.workers.state.position
            found.append(jax.device_get(self._look(positions, given)))
        broken = np.asarray(state.seen.broken_at)
        first = np.where(broken < 0, np.iinfo(np.int32).max, broken).min(1)
        seen = tree_map(lambda *looks: np.stack(looks), *found)
        return Followed(np.asarray(wanted), seen, np.where(np.all(broken < 0, 1), -1, first))


def _advance(job: Job, step: Any, state: State, data: Any, length: int, report: int | None) -> tuple[Any, State]:
    """`length` steps of all chains of one run, and an exchange if it is time. As in `hookean.engines.vectorised`."""
    chains = jnp.arange(job.chains)
    advance = jax.vmap(job.advance, (None, SHARED_COPY, 0, 0, None, None), (SHARED_COPY, 0))

    def one(j: Any, now: tuple[Worker, Seen]) -> tuple[Worker, Seen]:
        return advance(data, *now, chains, step + j, False)

    workers, seen = jax.lax.fori_loop(0, length, one, (state.workers, state.seen))
    step = step + length
    state = State(workers, state.centre, jax.vmap(job.inspect, (SHARED_COPY, 0, None))(workers, seen, step))
    if report is None:
        return step, state

    def heard(state: State) -> State:
        healthy = jnp.all(state.seen.broken_at < 0)
        return select(healthy, _exchange(job, state, step), state)

    if length == report:
        return step, heard(state)
    return step, jax.lax.cond(step % report == 0, heard, lambda state: state, state)


def _exchange(job: Job, state: State, step: Any) -> State:
    """All report, the centre answers, and all take the answer if it is time."""
    rhythm = job.coupling.rhythm
    assert rhythm is not None
    reports = jax.vmap(job.report, (SHARED_COPY, 0, None))(state.workers, jnp.arange(job.chains), rhythm.report)
    centre, copy = job.coupling.receive_all(job.roles[1], state.centre, reports, job.key)
    adopted = jax.vmap(job.coupling.adopt, (SHARED_COPY, None, None), SHARED_COPY)(state.workers, copy, step)
    if rhythm.refresh != rhythm.report:
        adopted = select(step % rhythm.refresh == 0, adopted, state.workers)
    return state._replace(workers=adopted, centre=centre)
