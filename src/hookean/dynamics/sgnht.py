"""Stochastic gradient Nose-Hoover thermostat (Ding et al. 2014).

    p' = p - eps g - eps xi p + N(0, 2 eps A T),    theta' = theta + eps p',    xi' = xi + eps (p'.p' / n - T) / mu

One thermostat xi for a chain of n parameters: its friction rises where the momenta are too hot, so that gradient noise
of unknown size is absorbed. `friction` is A, `inertia` is mu (1 in the paper); the mass is 1.

Targets exp(-(U + p^2/2 + n mu (xi - A)^2 / 2) / T), so theta from exp(-U/T).
Recipe: D = A T on p; Q couples theta with p as in SGHMC and p with xi by p T / (n mu).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from hookean import schedules
from hookean.dynamics.base import Curvature, Dynamics, Recipe, pack
from hookean.random import Noise
from hookean.schedules import value_at
from hookean.tree import dot, size, tree_map
from hookean.types import Params, Scheduled


class SGNHTState(NamedTuple):
    """Position, momentum and the thermostat's friction."""

    position: Params
    momentum: Params
    thermostat: jax.Array


@dataclasses.dataclass(frozen=True)
class SGNHT(Dynamics):
    """SGHMC with a friction that finds itself."""

    step_size: Scheduled
    friction: Scheduled = 1.0
    inertia: float = 1.0

    law: ClassVar[str] = "exp(-(U + p^2/2 + n mu (xi - A)^2/2)/T), theta from exp(-U/T)"
    phase: ClassVar[tuple[str, ...]] = ("position", "momentum", "thermostat")

    def check(self, num_steps: int) -> None:
        """Refuse a step or an inertia that is not positive, or a negative friction."""
        super().check(num_steps)
        schedules.check("step_size", self.step_size, num_steps, 0.0, exclusive=True)
        schedules.check("friction", self.friction, num_steps, 0.0)
        schedules.check_number("inertia", self.inertia, 0.0, exclusive=True)

    def init(self, position: Params, noise: Noise) -> SGNHTState:
        """Momenta from N(0, T), the thermostat at its mean A."""
        scale = jnp.sqrt(value_at(self.temperature, 0))
        momentum = tree_map(lambda z: (scale * z).astype(z.dtype), noise.normal(position))
        dtype = jax.tree.leaves(position)[0].dtype
        return SGNHTState(position, momentum, jnp.asarray(value_at(self.friction, 0), dtype))

    def step(
        self, state: SGNHTState, gradient: Params, noise: Noise, step: jax.Array, curvature: Curvature | None = None
    ) -> SGNHTState:
        """Momentum, then position, then thermostat, each from the newest values."""
        eps, A, T = (value_at(x, step) for x in (self.step_size, self.friction, self.temperature))
        scale, xi = jnp.sqrt(2 * eps * A * T), state.thermostat
        momentum = tree_map(
            lambda p, g, z: (p - eps * g - eps * xi * p + scale * z).astype(p.dtype),
            state.momentum,
            gradient,
            noise.normal(state.momentum),
        )
        position = tree_map(lambda x, p: (x + eps * p).astype(x.dtype), state.position, momentum)
        heat = dot(momentum, momentum) / size(momentum) - T
        return SGNHTState(position, momentum, (xi + eps * heat / self.inertia).astype(xi.dtype))

    def kinetic_temperature(self, state: SGNHTState) -> jax.Array:
        """Mean of p^2."""
        return dot(state.momentum, state.momentum) / size(state.momentum)

    def recipe(self, potential: Callable[[Params], jax.Array], state: SGNHTState) -> Recipe:
        """State-dependent Q; its divergence gives the -T of the thermostat."""
        z, unpack = pack(self, state)
        A, T, n = value_at(self.friction, 0), value_at(self.temperature, 0), (z.size - 1) // 2
        momenta = slice(n, 2 * n)

        def diffusion(z: jax.Array) -> jax.Array:
            return jnp.diag(jnp.zeros(2 * n + 1).at[momenta].set(A * T))

        def curl(z: jax.Array) -> jax.Array:
            upper = jnp.zeros((2 * n + 1, 2 * n + 1))
            upper = upper.at[:n, momenta].set(-T * jnp.eye(n))
            upper = upper.at[momenta, -1].set(z[momenta] * T / (n * self.inertia))
            return upper - upper.T

        def energy(z: jax.Array) -> jax.Array:
            xi = z[-1]
            kinetic = jnp.sum(z[momenta] ** 2) / 2
            return (potential(unpack(z).position) + kinetic + n * self.inertia * (xi - A) ** 2 / 2) / T

        return Recipe(diffusion, curl, energy)

    @classmethod
    def variants(cls, step_size: float, temperature: float = 1.0) -> Sequence[Self]:
        """The paper's, and a heavy thermostat."""
        return [
            cls(step_size, 1.5, temperature=temperature),
            cls(step_size, 1.0, inertia=3.0, temperature=temperature),
        ]
