"""Elastic coupling (scheme IIa; Springenberg, Klein, Falkner and Hutter 2016), as it follows from the Hamiltonian.

    H = sum_i [ U(theta_i) + kinetic_i ] + (alpha / 2K) sum_i |theta_i - c|^2 + kinetic of c

    gradient on theta_i:  grad U~(theta_i) + (alpha / K) (theta_i - c)        with c the worker's copy
    gradient on c:        alpha (c - mean theta)                              with the last reported theta

The centre is one more chain of the same dynamics whose potential is only elastic.

Targets exp(-H / T). With c integrated out, the chains together follow
exp(-(sum_i U(theta_i) + (alpha/2K) sum_i |theta_i - mean|^2) / T): on a Gaussian of curvature h,
Var(theta_i) = T [(1/K)/h + (1 - 1/K)/(h + alpha/K)], which is less than T/h for K > 1. Schedules `release` and `cycle`
give the marginals of the posterior back.

The centre's clock: a report of d new steps earns d / K_live steps of the centre, and once it is owed `leap` of them it
takes the whole part at once. With the reported positions fixed, those steps are a leap: a linear map and Gaussian
noise, alike for all coordinates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from hookean import schedules
from hookean.coupling.base import Centre, Coupling, open_centre
from hookean.exchange import Copy, Report, Rhythm
from hookean.random import Noise, Stream, stream_key
from hookean.schedules import value_at
from hookean.tree import set_row, tree_map
from hookean.types import ArgumentError, Params, Scheduled, check_count


@dataclasses.dataclass(frozen=True)
class Elastic(Coupling):
    """Springs of strength alpha / K between K chains and their centre.

    `friction` and `mass` are the centre's (None: the chains'). By default the centre integrates against the positions
    just reported; with `simultaneous=True` against those before, so that with every=1 chains and centre step at once.
    It takes its steps once it owes `leap` of them (None: `every`, which is a round of all chains), for a leap costs the
    same however long it is.
    """

    alpha: Scheduled = 1.0
    every: int = 1
    friction: Scheduled | None = None
    mass: float | None = None
    simultaneous: bool = False
    leap: int | None = None

    law: ClassVar[str] = "exp(-(sum U(theta_i) + (alpha/2K) sum |theta_i - mean|^2)/T): narrower than the posterior"

    @property
    def rhythm(self) -> Rhythm:
        """Every report is answered."""
        return Rhythm(self.every, self.every)

    @property
    def couples_draws(self) -> bool:
        """Only `hold` keeps draws that feel the springs, and only if there are any."""
        return self.schedule.draws_are_coupled and not (not callable(self.alpha) and self.alpha == 0)

    @classmethod
    def variants(cls) -> Sequence[Self]:
        """Fresh and simultaneous, with a centre of its own friction, exchanging often and seldom."""
        return [
            cls(1.0, 1, simultaneous=True),
            cls(2.0, 4, friction=0.7),
            cls(2.0, 3, mass=3.0, schedule=schedules.release(over=40)),
            cls(1.0, 2, leap=1),
        ]

    def check(self, dynamics: Any, chains: int, num_steps: int) -> None:
        """Refuse what cannot work."""
        check_count("every", self.every)
        check_count("leap", self.every if self.leap is None else self.leap)
        schedules.check("alpha", self.alpha, num_steps, 0.0)
        if self.friction is not None:
            schedules.check("friction", self.friction, num_steps, 0.0)
        if self.mass is not None:
            schedules.check_number("mass", self.mass, 0.0, exclusive=True)
        _, centre = self.roles(dynamics, chains)
        for step in {0, num_steps - 1}:
            alpha = float(self.stiffness(step))
            growth = centre.growth(alpha, step)
            if growth is not None and growth > 1 + 1e-6:
                raise ArgumentError(
                    "alpha",
                    f"is {alpha:g}, at which the centre explodes (it grows {growth:.3g}-fold each step)",
                    "Take a smaller alpha or step_size, or more friction= or mass= for the centre",
                )

    def roles(self, dynamics: Any, chains: int) -> tuple[Any, Any]:
        """The centre is one more chain, with its own friction and mass where given."""
        own = {"friction": self.friction, "mass": self.mass}
        return dynamics, dynamics.as_centre(**{name: value for name, value in own.items() if value is not None})

    def stiffness(self, step: Any) -> Any:
        """Curvature of the centre's potential; a chain feels 1/K of it."""
        return value_at(self.alpha, step)

    def force(self, position: Params, copy: Copy, step: Any) -> Params:
        """The pull of one spring."""
        strength = self.spring(step, copy.live) * self.schedule.factor(step)
        return tree_map(lambda x, c: (strength * (x - c)).astype(x.dtype), position, copy.position)

    def spring(self, step: Any, live: Any) -> Any:
        """alpha / K."""
        return self.stiffness(step) / live

    def covariance(self, stiffness: float, chains: int, temperature: float) -> np.ndarray | None:
        """Of the Hamiltonian above, or of uncoupled chains where only free draws are kept."""
        if not self.couples_draws:
            return super().covariance(stiffness, chains, temperature)
        if callable(self.alpha) or self.schedule.kind != "hold":
            return None
        deviations = np.eye(chains) - np.ones((chains, chains)) / chains
        return temperature * np.linalg.inv(stiffness * np.eye(chains) + self.alpha / chains * deviations)

    def open(self, dynamics: Any, positions: Params, noise: Noise) -> Centre:
        """Start at the mean of the chains."""
        return open_centre(dynamics, positions, noise)

    def receive(self, dynamics: Any, centre: Centre, report: Report, key: jax.Array) -> tuple[Centre, Copy]:
        """Store, take the steps that the report has earned, answer."""
        stored = set_row(centre.positions, report.worker, report.payload)
        centre, earned = centre.earn(report.worker, report.steps)
        return self._exchange(dynamics, centre, stored, earned, key)

    def receive_all(self, dynamics: Any, centre: Centre, reports: Report, key: jax.Array) -> tuple[Centre, Copy]:
        """The same for all at once."""
        earned = jnp.sum(jnp.where(centre.live, reports.steps, 0), dtype=jnp.int32)
        return self._exchange(dynamics, centre, reports.payload, earned, key)

    def _exchange(
        self, dynamics: Any, centre: Centre, stored: Params, earned: Any, key: jax.Array
    ) -> tuple[Centre, Copy]:
        credit = centre.credit + earned
        whole = credit // centre.num_live
        num_steps = jnp.where(whole >= (self.every if self.leap is None else self.leap), whole, 0)
        heard = centre._replace(positions=stored)

        def leap() -> Any:
            mean = (centre if self.simultaneous else heard).mean()
            noise = Noise(stream_key(key, Stream.CENTRE), centre.version)
            return self._leap(dynamics, centre.state, mean, centre.clock, num_steps, noise)

        moved = heard._replace(
            state=jax.lax.cond(num_steps > 0, leap, lambda: centre.state),
            credit=credit - num_steps * centre.num_live,
            clock=centre.clock + num_steps,
            version=centre.version + 1,
        )
        return moved, moved.copy()

    def _leap(self, dynamics: Any, state: Any, mean: Params, clock: Any, num_steps: Any, noise: Noise) -> Any:
        """`num_steps` steps of the centre against fixed chains."""
        if dynamics.linear_map(jnp.ones(()), clock) is None:
            return self._walk(dynamics, state, mean, clock, num_steps, noise)
        dtype = jnp.result_type(*jax.tree.leaves(mean))
        order = len(dynamics.phase)

        def compose(j: Any, whole: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            one = dynamics.linear_map(jnp.asarray(self.stiffness(clock + j), dtype), clock + j)
            matrix, covariance = one.matrix.astype(dtype), one.covariance.astype(dtype)
            return matrix @ whole[0], matrix @ whole[1] @ matrix.T + covariance

        start = (jnp.eye(order, dtype=dtype), jnp.zeros((order, order), dtype))
        matrix, covariance = jax.lax.fori_loop(0, num_steps, compose, start)
        root = _root(covariance)
        offset = tree_map(jnp.subtract, state.position, mean)
        old = [offset, *(getattr(state, name) for name in dynamics.phase[1:])]
        normals = [noise.normal(mean) for _ in range(order)]

        def combine(i: int) -> Params:
            terms = [tree_map(lambda x, a=matrix[i, j]: a * x, old[j]) for j in range(order)]
            terms += [tree_map(lambda z, a=root[i, j]: a * z, normals[j]) for j in range(i + 1)]
            return tree_map(lambda like, *parts: sum(parts).astype(like.dtype), mean, *terms)

        new = [combine(i) for i in range(order)]
        new[0] = tree_map(jnp.add, new[0], mean)
        return state._replace(**dict(zip(dynamics.phase, new, strict=True)))

    def _walk(self, dynamics: Any, state: Any, mean: Params, clock: Any, num_steps: Any, noise: Noise) -> Any:
        """The same step by step, for dynamics that are no linear map."""

        def one(j: Any, state: Any) -> Any:
            stiffness = self.stiffness(clock + j)
            gradient = tree_map(lambda c, m: (stiffness * (c - m)).astype(c.dtype), state.position, mean)
            return dynamics.step(
                state, gradient, noise.substep(j), clock + j, lambda v: tree_map(lambda x: stiffness * x, v)
            )

        return jax.lax.fori_loop(0, num_steps, one, state)


def _root(covariance: jax.Array) -> jax.Array:
    """Lower Cholesky factor of a 1x1 or 2x2 matrix that may be singular."""
    first = jnp.sqrt(jnp.maximum(covariance[0, 0], 0))
    if covariance.shape == (1, 1):
        return first[None, None]
    slope = jnp.where(first > 0, covariance[1, 0] / jnp.where(first > 0, first, 1), 0)
    second = jnp.sqrt(jnp.maximum(covariance[1, 1] - slope**2, 0))
    return jnp.array([[first, jnp.zeros_like(first)], [slope, second]])
