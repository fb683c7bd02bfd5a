"""Stochastic gradient Langevin dynamics (Welling and Teh 2011).

    theta' = theta - eps g + N(0, 2 eps T)

Targets exp(-U / T). Recipe: D = T, Q = 0, H = U. At T = 0 it is gradient descent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from hookean import schedules
from hookean.dynamics.base import Curvature, Dynamics, LinearMap, Recipe, num_examples, pack
from hookean.random import Noise
from hookean.schedules import Derived, value_at
from hookean.tree import tree_map
from hookean.types import Params, Scheduled


class SGLDState(NamedTuple):
    """A position is all there is."""

    position: Params


@dataclasses.dataclass(frozen=True)
class SGLD(Dynamics):
    """Langevin dynamics without momentum; `step_size` multiplies the gradient of the full-data potential."""

    step_size: Scheduled
    law: ClassVar[str] = "exp(-U/T)"

    @classmethod
    def from_learning_rate(cls, learning_rate: Scheduled, *, target: Any, temperature: Scheduled = 1.0) -> Self:
        """In units of the mean loss per example: learning rate = eps N."""
        count = num_examples(target)

        def check(num_steps: int) -> None:
            schedules.check("learning_rate", learning_rate, num_steps, 0.0, exclusive=True)

        if callable(learning_rate):
            return cls(Derived(lambda step: learning_rate(step) / count, check), temperature=temperature)
        check(1)
        return cls(learning_rate / count, temperature=temperature)

    def check(self, num_steps: int) -> None:
        """Refuse a step that is not positive."""
        super().check(num_steps)
        schedules.check("step_size", self.step_size, num_steps, 0.0, exclusive=True)

    def init(self, position: Params, noise: Noise) -> SGLDState:
        """Start at `position`."""
        return SGLDState(position)

    def step(
        self, state: SGLDState, gradient: Params, noise: Noise, step: jax.Array, curvature: Curvature | None = None
    ) -> SGLDState:
        """One Euler-Maruyama step."""
        eps, temperature = value_at(self.step_size, step), value_at(self.temperature, step)
        scale = jnp.sqrt(2 * eps * temperature)
        position = tree_map(
            lambda x, g, z: (x - eps * g + scale * z).astype(x.dtype),
            state.position,
            gradient,
            noise.normal(state.position),
        )
        return SGLDState(position)

    def linear_map(self, stiffness: jax.Array, step: jax.Array) -> LinearMap:
        """x' = (1 - eps h) x + N(0, 2 eps T)."""
        eps, temperature = value_at(self.step_size, step), value_at(self.temperature, step)
        return LinearMap(jnp.reshape(1 - eps * stiffness, (1, 1)), jnp.reshape(2 * eps * temperature, (1, 1)))

    def recipe(self, potential: Callable[[Params], jax.Array], state: SGLDState) -> Recipe:
        """D = T, Q = 0."""
        z, unpack = pack(self, state)
        temperature, n = value_at(self.temperature, 0), z.size
        return Recipe(
            diffusion=lambda z: temperature * jnp.eye(n),
            curl=lambda z: jnp.zeros((n, n)),
            energy=lambda z: potential(unpack(z).position) / temperature,
        )

    @classmethod
    def variants(cls, step_size: float, temperature: float = 1.0) -> Sequence[Self]:
        """There is one."""
        return [cls(step_size, temperature=temperature)]
