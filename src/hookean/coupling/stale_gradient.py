"""Naive asynchronous SG-MCMC (scheme I of Springenberg et al. 2016): one chain, gradients from many workers.

    worker   g = grad U~(copy of theta); after `every` of its gradients it takes a fresh copy
    server   after `wait_for` gradients it takes one step of the dynamics with their mean

Gradients are stale: by the time one is used, theta has moved on. `every=1, wait_for=K` with a barrier is synchronous
parallel sampling and targets the law of the dynamics; otherwise staleness biases it, and may make it diverge.
A gradient is an increment: it must reach the server once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling.base import Coupling, Evaluate, Evaluation, Worker
from hookean.exchange import Copy, Report, Rhythm
from hookean.random import Noise, Stream, stream_key
from hookean.tree import row, select, tree_map
from hookean.types import ArgumentError, Params, check_count

HISTOGRAM = 64
"""Staleness is counted in so many bins; the last takes all that is longer."""


class Server(NamedTuple):
    """The chain, the gradients that wait for the next step, and how stale those were that have been used."""

    state: Any
    gradient: Params
    waiting: jax.Array
    waiting_staleness: jax.Array
    staleness: jax.Array
    histogram: jax.Array
    live: jax.Array
    version: jax.Array

    def copy(self) -> Copy:
        """What a worker is told; the version counts the steps of the chain."""
        return Copy(self.state.position, self.version, jnp.sum(self.live, dtype=jnp.int32))


@dataclasses.dataclass(frozen=True)
class StaleGradient(Coupling):
    """Workers refresh their copy after `every` gradients; the server steps after `wait_for`."""

    every: int = 1
    wait_for: int = 1

    law: ClassVar[str] = "the law of the dynamics if gradients are fresh (every=1, wait_for=K, a barrier); else biased"
    server_owns_chain: ClassVar[bool] = True

    @property
    def rhythm(self) -> Rhythm:
        """Every gradient is reported."""
        return Rhythm(1, self.every)

    @classmethod
    def variants(cls) -> Sequence[Self]:
        """Fresh and averaged, as in the paper, and between."""
        return [cls(1, 3), cls(4, 1), cls(2, 2)]

    def check(self, dynamics: Any, chains: int, num_steps: int) -> None:
        """Refuse what cannot work."""
        check_count("every", self.every)
        check_count("wait_for", self.wait_for)
        if self.wait_for > chains:
            raise ArgumentError(
                "wait_for", f"is {self.wait_for}, with {chains} chains", "The server waits for at most one from each"
            )
        if dynamics.uses_curvature:
            raise ArgumentError(
                "coupling",
                f"StaleGradient sends gradients, and this {type(dynamics).__name__} needs curvature at the server too",
                "Use PSGLD(..., gamma=False), or Elastic",
            )

    def roles(self, dynamics: Any, chains: int) -> tuple[Any, Any]:
        """All motion is the server's."""
        return dynamics, dynamics

    def covariance(self, stiffness: float, chains: int, temperature: float) -> np.ndarray:
        """Of one chain."""
        return np.array([[temperature / stiffness]])

    def init(self, dynamics: Any, position: Params, copy: Copy | None, noise: Noise) -> Worker:
        """A worker with no gradient yet."""
        zeros = tree_map(jnp.zeros_like, position)
        return Worker(zeros, copy, jnp.zeros((), jnp.int32), jnp.ones((), bool))

    def advance(
        self, dynamics: Any, evaluate: Evaluate, worker: Worker, noise: Noise, step: Any
    ) -> tuple[Worker, Evaluation]:
        """One gradient at the copy."""
        assert worker.copy is not None
        position = worker.copy.position
        potential, gradient = evaluate(position)
        worker = worker._replace(state=gradient, fresh=jnp.zeros_like(worker.fresh))
        return worker, Evaluation(position, potential, gradient)

    def payload(self, worker: Worker) -> Params:
        """The gradient."""
        return worker.state

    def open(self, dynamics: Any, positions: Params, noise: Noise) -> Server:
        """The chain starts where worker 0 would."""
        state = dynamics.init(row(positions, 0), noise)
        zero = jnp.zeros((), jnp.int32)
        return Server(
            state,
            tree_map(jnp.zeros_like, state.position),
            waiting=zero,
            waiting_staleness=zero,
            staleness=jnp.zeros(()),
            histogram=jnp.zeros(HISTOGRAM, jnp.int32),
            live=jnp.ones(len(jax.tree.leaves(positions)[0]), bool),
            version=zero,
        )

    def receive(self, dynamics: Any, centre: Server, report: Report, key: jax.Array) -> tuple[Server, Copy]:
        """Add a gradient; step when enough wait."""
        centre = centre._replace(live=centre.live.at[report.worker].set(True))
        centre = self._take(dynamics, centre, report.payload, report.base_version, key)
        return centre, centre.copy()

    def receive_all(self, dynamics: Any, centre: Server, reports: Report, key: jax.Array) -> tuple[Server, Copy]:
        """One after the other, in the order of the workers; all are told the last state."""

        def one(centre: Server, i: Any) -> tuple[Server, None]:
            report = row(reports, i)
            taken = self._take(dynamics, centre, report.payload, report.base_version, key)
            return select(centre.live[i], taken, centre), None

        centre, _ = jax.lax.scan(one, centre, jnp.arange(len(centre.live)))
        return centre, centre.copy()

    def _take(self, dynamics: Any, centre: Server, gradient: Params, base_version: Any, key: jax.Array) -> Server:
        age = centre.version - base_version
        centre = centre._replace(
            gradient=tree_map(jnp.add, centre.gradient, gradient),
            waiting=centre.waiting + 1,
            waiting_staleness=centre.waiting_staleness + age,
            histogram=centre.histogram.at[jnp.minimum(age, HISTOGRAM - 1)].add(1),
        )

        def step(centre: Server) -> Server:
            mean = tree_map(lambda g: g / self.wait_for, centre.gradient)
            noise = Noise(stream_key(key, Stream.NOISE), centre.version)
            return centre._replace(
                state=dynamics.step(centre.state, mean, noise, centre.version),
                gradient=tree_map(jnp.zeros_like, centre.gradient),
                waiting=jnp.zeros_like(centre.waiting),
                waiting_staleness=jnp.zeros_like(centre.waiting_staleness),
                staleness=(centre.waiting_staleness / self.wait_for).astype(centre.staleness.dtype),
                version=centre.version + 1,
            )

        return jax.lax.cond(centre.waiting >= self.wait_for, step, lambda centre: centre, centre)

    def join(self, centre: Server, worker: Any, payload: Params) -> Server:
        """A worker begins to count; the chain does not notice."""
        return centre._replace(live=centre.live.at[worker].set(True))

    def leave(self, centre: Server, worker: Any) -> Server:
        """A worker stops counting; its gradients that wait are still good."""
        return centre._replace(live=centre.live.at[worker].set(False))
