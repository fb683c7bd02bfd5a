"""A dynamics of your own: SGHMC with a speed limit, after relativistic Monte Carlo (Lu et al. 2017).

    python examples/own_dynamics.py
    hookean sample examples/own_dynamics.py:target --dynamics "Relativistic(0.05, friction=2)" --warmup 1000

    p' = p - eps g - eps V v(p) + N(0, 2 eps T V),   theta' = theta + eps v(p'),   v(p) = p / sqrt(1 + (p/c)^2)

No coordinate moves faster than c, however steep the potential. The kinetic energy of a coordinate is
c^2 sqrt(1 + (p/c)^2), and v is its derivative.

Targets exp(-(U + sum c^2 sqrt(1 + (p/c)^2)) / T), theta from exp(-U/T).
Recipe: D = diag(0, V T), Q = T [[0, -1], [1, 0]], as in SGHMC; only the energy is another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

import hookean as hk
from hookean.dynamics import Dynamics, Recipe, pack
from hookean.dynamics.base import Curvature
from hookean.random import Noise
from hookean.schedules import check, value_at
from hookean.tree import dot, size, tree_map
from hookean.types import Params, Scheduled


class RelativisticState(NamedTuple):
    position: Params
    momentum: Params


@dataclasses.dataclass(frozen=True)
class Relativistic(Dynamics):
    """SGHMC in which no coordinate exceeds `speed_limit`."""

    step_size: Scheduled
    friction: Scheduled = 1.0
    speed_limit: float = 1.0

    law: ClassVar[str] = "exp(-(U + sum c^2 sqrt(1 + (p/c)^2))/T), theta from exp(-U/T)"
    phase: ClassVar[tuple[str, ...]] = ("position", "momentum")

    def check(self, num_steps: int) -> None:
        super().check(num_steps)
        check("step_size", self.step_size, num_steps, 0.0, exclusive=True)
        check("friction", self.friction, num_steps, 0.0)
        check("speed_limit", self.speed_limit, num_steps, 0.0, exclusive=True)

    def init(self, position: Params, noise: Noise) -> RelativisticState:
        scale = jnp.sqrt(value_at(self.temperature, 0))  # near the law of the momenta, which forget it soon
        return RelativisticState(position, tree_map(lambda z: scale * z, noise.normal(position)))

    def _velocity(self, momentum: Params) -> Params:
        return tree_map(lambda p: p / jnp.sqrt(1 + (p / self.speed_limit) ** 2), momentum)

    def step(
        self, state: Any, gradient: Params, noise: Noise, step: jax.Array, curvature: Curvature | None = None
    ) -> RelativisticState:
        eps, V, T = (value_at(x, step) for x in (self.step_size, self.friction, self.temperature))
        scale = jnp.sqrt(2 * eps * T * V)

        def kick(p: Any, g: Any, v: Any, z: Any) -> Any:
            return (p - eps * g - eps * V * v + scale * z).astype(p.dtype)

        old = state.momentum
        momentum = tree_map(kick, old, gradient, self._velocity(old), noise.normal(old))
        drift = self._velocity(momentum)
        position = tree_map(lambda x, v: (x + eps * v).astype(x.dtype), state.position, drift)
        return RelativisticState(position, momentum)

    def kinetic_temperature(self, state: Any) -> jax.Array:
        """Mean of p v(p), which is T in equilibrium as p^2/M is for SGHMC."""
        return dot(state.momentum, self._velocity(state.momentum)) / size(state.momentum)

    def recipe(self, potential: Callable[[Params], jax.Array], state: Any) -> Recipe:
        z, unpack = pack(self, state)
        V, T, c = value_at(self.friction, 0), value_at(self.temperature, 0), self.speed_limit
        zero, eye = jnp.zeros((z.size // 2, z.size // 2)), jnp.eye(z.size // 2)

        def energy(z: jax.Array) -> jax.Array:
            kinetic = c**2 * jnp.sum(jnp.sqrt(1 + (z[z.size // 2 :] / c) ** 2))
            return (potential(unpack(z).position) + kinetic) / T

        return Recipe(
            diffusion=lambda z: V * T * jnp.block([[zero, zero], [zero, eye]]),
            curl=lambda z: T * jnp.block([[zero, -eye], [eye, zero]]),
            energy=energy,
        )

    @classmethod
    def variants(cls, step_size: float, temperature: float = 1.0) -> Sequence[Self]:
        """What the law suite runs."""
        return [cls(step_size, 1.5, temperature=temperature), cls(step_size, speed_limit=5.0, temperature=temperature)]


target = hk.Target.from_log_density(lambda theta: -jnp.sum(theta**4))  # far from Gaussian
init = jnp.full(3, 2.0)


def main(num_steps: int = 20_000) -> hk.Run:
    """Sample it with elastic chains that are let go in the warm-up."""
    run = hk.sample(
        target,
        init,
        dynamics=Relativistic(step_size=0.05, friction=2.0, speed_limit=2.0),
        coupling=hk.Elastic(alpha=1.0, every=4, schedule=hk.release()),
        chains=4,
        num_steps=num_steps,
        warmup=num_steps // 4,
        thin=4,
        progress=False,
    )
    print(run.summary())
    print(f"mean of theta^2: {float(jnp.mean(run.draws**2)):.3f}; exactly Gamma(3/4) / Gamma(1/4) = 0.338")
    return run


if __name__ == "__main__":
    main()
