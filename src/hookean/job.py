"""What a run is: a checked `Job`, the step of a worker that all engines share, and the `Result`."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling import Coupling, Worker
from hookean.dynamics import Dynamics
from hookean.exchange import Copy, Report
from hookean.random import Noise, Stream, stream_key
from hookean.targets import Target
from hookean.tree import dot, num_bytes, select, size, tree_map
from hookean.types import Params

STATISTICS = ("potential", "kinetic_temperature", "configurational_temperature", "distance", "staleness", "live")

SHARED_COPY: Any = Worker(state=0, copy=None, asked=None, fresh=None)  # type: ignore[arg-type]
"""Axes of workers that exchange together, so that one copy of the centre serves all."""


class Seen(NamedTuple):
    """What a worker last saw: potential, theta . grad U / n, and after which step it was first not finite (or -1)."""

    potential: jax.Array
    configurational: jax.Array
    broken_at: jax.Array


class Progress(NamedTuple):
    """How far a run is."""

    step: int
    potential: float
    temperature: float


class Result(NamedTuple):
    """Draws [chain, draw, ...], statistics [chain, draw], and what describes the run as a whole."""

    draws: Params
    stats: dict[str, jax.Array]
    info: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked run. Everything an engine needs, and no engine's own."""

    target: Target
    dynamics: Dynamics
    coupling: Coupling
    starts: Params
    chains: int
    num_steps: int
    warmup: int
    thin: int
    key: jax.Array

    @cached_property
    def roles(self) -> tuple[Dynamics, Any]:
        """Dynamics of the chains and of the centre."""
        return self.coupling.roles(self.dynamics, self.chains)

    @property
    def num_sampled(self) -> int:
        """Chains that give draws."""
        return 1 if self.coupling.server_owns_chain else self.chains

    def keeps(self, step: Any) -> Any:
        """Whether the state after `step` steps becomes a draw."""
        after = step - self.warmup
        return (after > 0) & (after % self.thin == 0) & self.coupling.schedule.keeps(step)

    @cached_property
    def kept_steps(self) -> np.ndarray:
        """The steps after which a draw is kept."""
        return self.coupling.schedule.kept_steps(self.num_steps, self.warmup, self.thin)

    def open(self) -> tuple[Worker, Any]:
        """All workers at the start, their states stacked and their copy of the centre shared, and the centre."""
        chain_dynamics, centre_dynamics = self.roles
        centre_noise = Noise(
            stream_key(self.key, Stream.MOMENTUM, 0)
            if self.coupling.server_owns_chain
            else stream_key(self.key, Stream.CENTRE, 1)
        )
        centre = self.coupling.open(centre_dynamics, self.starts, centre_noise)
        copy = None if centre is None else centre.copy()

        def one(start: Params, chain: Any) -> Worker:
            noise = Noise(stream_key(self.key, Stream.MOMENTUM, chain))
            return self.coupling.init(chain_dynamics, start, copy, noise)

        return jax.vmap(one, out_axes=SHARED_COPY)(self.starts, jnp.arange(self.chains)), centre

    def advance(self, data: Any, worker: Worker, seen: Seen, chain: Any, step: Any, wanted: Any) -> tuple[Worker, Seen]:
        """One step of one worker; the costlier statistics only where `wanted`."""
        batch = self.target.batch(data, stream_key(self.key, Stream.BATCH, chain), chain, step)

        def evaluate(position: Params) -> tuple[jax.Array, Params]:
            return jax.value_and_grad(self.target.potential)(position, batch)

        noise = Noise(stream_key(self.key, Stream.NOISE, chain), step)
        before = worker.state
        worker, evaluation = self.coupling.advance(self.roles[0], evaluate, worker, noise, step)
        configurational = jax.lax.cond(
            wanted,
            lambda x, g: dot(x, g) / size(x),
            lambda x, g: jnp.full_like(evaluation.potential, jnp.nan),
            evaluation.position,
            evaluation.gradient,
        )
        finite = jnp.isfinite(evaluation.potential)
        # A broken chain stands still, so that what broke is still there to be seen when the run stops.
        worker = worker._replace(state=select(finite, worker.state, before))
        bad = (seen.broken_at < 0) & ~finite
        return worker, Seen(
            evaluation.potential.astype(jnp.float32),
            configurational.astype(jnp.float32),
            jnp.where(bad, jnp.asarray(step, jnp.int32), seen.broken_at),
        )

    def inspect(self, worker: Worker, seen: Seen, step: Any) -> Seen:
        """Note a value that is not finite in what a worker has to report after `step` steps."""
        finite = jax.tree.reduce(
            jnp.logical_and, tree_map(lambda x: jnp.all(jnp.isfinite(x)), self.coupling.payload(worker))
        )
        bad = (seen.broken_at < 0) & ~finite
        return seen._replace(broken_at=jnp.where(bad, jnp.asarray(step, jnp.int32), seen.broken_at))

    def report(self, worker: Worker, chain: Any, steps: Any) -> Report:
        """The message of a worker to the centre."""
        assert worker.copy is not None
        return Report(
            jnp.asarray(chain, jnp.int32),
            self.coupling.payload(worker),
            jnp.asarray(steps, jnp.int32),
            worker.copy.version,
        )

    def measure(self, worker: Worker, seen: Seen, step: Any) -> dict[str, jax.Array]:
        """Statistics of a chain that is about to give a draw after `step` steps."""
        nan = jnp.asarray(jnp.nan)
        copy: Copy | None = worker.copy
        if copy is None:
            distance, staleness, live = nan, nan, nan
        else:
            offset = tree_map(jnp.subtract, worker.state.position, copy.position)
            distance, live = jnp.sqrt(dot(offset, offset)), copy.live
            staleness = step - 1 - worker.asked  # how old the copy was when the last step was taken with it
        kinetic = self.roles[0].kinetic_temperature(worker.state)
        values = (seen.potential, kinetic, seen.configurational, distance, staleness, live)
        return {name: jnp.asarray(v, jnp.float32) for name, v in zip(STATISTICS, values, strict=True)}

    def measure_server(self, centre: Any, seen: Seen) -> dict[str, jax.Array]:
        """The same for the chain that the server owns."""
        values = (
            seen.potential,
            self.roles[1].kinetic_temperature(centre.state),
            seen.configurational,
            jnp.asarray(jnp.nan),
            centre.staleness,
            jnp.sum(centre.live),
        )
        return {name: jnp.asarray(v, jnp.float32) for name, v in zip(STATISTICS, values, strict=True)}

    def empty_draws(self, count: int | None = None) -> tuple[Params, dict[str, jax.Array]]:
        """Room for `count` draws (None: all that are kept) and their statistics, NaN until filled."""
        shape = (self.num_sampled, len(self.kept_steps) if count is None else count)
        draws = tree_map(lambda x: jnp.full(shape + x.shape[1:], jnp.nan, x.dtype), self.starts)
        return draws, {name: jnp.full(shape, jnp.nan, jnp.float32) for name in STATISTICS}

    def forecast_bytes(self) -> tuple[int, int]:
        """Bytes of all kept draws, and of workers and centre together with one gradient each."""
        draws = num_bytes(jax.eval_shape(self.empty_draws))
        state = num_bytes(jax.eval_shape(self.open)) + num_bytes(self.starts)
        return draws, state


def new_seen(chains: int) -> Seen:
    """Nothing seen yet."""
    nan = jnp.full(chains, jnp.nan, jnp.float32)
    return Seen(nan, nan, jnp.full(chains, -1, jnp.int32))
