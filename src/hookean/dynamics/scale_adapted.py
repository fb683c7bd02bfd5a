"""Scale-adapted SGHMC (Springenberg, Klein, Falkner and Hutter 2016, on robust Bayesian neural networks).

During the warm-up, per parameter, with a window tau that starts at 0 and adapts itself:

    m' = m + (g - m) / (tau + 1),   v' = v + (g^2 - v) / (tau + 1),   tau' = tau (1 - m'^2 / v') + 1

and throughout SGHMC with mass M = sqrt(v) and friction V = d M / eps, d the `momentum_decay`:

    p' = (1 - d) p - eps g + N(0, 2 d M T),   theta' = theta + eps p' / M

After the warm-up the estimates are frozen, so that the chain is plain SGHMC with a diagonal mass and
targets exp(-(U + p^2 / 2M) / T), theta from exp(-U/T). `subtract_noise=True` takes eps^2 v off the injected variance as
the paper does; v there stands for the variance of the gradient noise, of which it is an upper bound only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from hookean import schedules
from hookean.dynamics.base import Curvature, Dynamics, Recipe, pack
from hookean.dynamics.sghmc import SGHMC, SGHMCState
from hookean.random import Noise
from hookean.schedules import value_at
from hookean.tree import tree_map
from hookean.types import Params, Scheduled, check_count


class ScaleAdaptedState(NamedTuple):
    """Position, momentum, and the estimates: window, mean gradient, mean squared gradient."""

    position: Params
    momentum: Params
    window: Params
    mean: Params
    square: Params


@dataclasses.dataclass(frozen=True)
class ScaleAdaptedSGHMC(Dynamics):
    """SGHMC that finds the mass of each parameter in the warm-up. `step_size` squared is a learning rate as Adam's."""

    step_size: Scheduled
    momentum_decay: float = 0.05
    damping: float = 1e-3
    subtract_noise: bool = False
    adapt_steps: int | None = None

    law: ClassVar[str] = "exp(-(U + p^2/2M)/T) with M frozen after the warm-up, theta from exp(-U/T)"
    phase: ClassVar[tuple[str, ...]] = ("position", "momentum")

    def bind(self, warmup: int, num_examples: int) -> Self:
        """Adapt during the whole warm-up unless told otherwise."""
        return self if self.adapt_steps is not None else dataclasses.replace(self, adapt_steps=warmup)

    def check(self, num_steps: int) -> None:
        """Refuse what cannot work."""
        super().check(num_steps)
        schedules.check("step_size", self.step_size, num_steps, 0.0, exclusive=True)
        schedules.check_number("damping", self.damping, 0.0, exclusive=True)
        schedules.check_number("momentum_decay", self.momentum_decay, 0.0, exclusive=True, below=1.0)
        check_count("adapt_steps", self.adapt_steps or 0, 0)

    def init(self, position: Params, noise: Noise) -> ScaleAdaptedState:
        """Empty windows, so that the first gradient sets the scale."""
        ones = tree_map(jnp.ones_like, position)
        zeros = tree_map(jnp.zeros_like, position)
        scale = jnp.sqrt(value_at(self.temperature, 0))
        momentum = tree_map(lambda z: (scale * z).astype(z.dtype), noise.normal(position))
        return ScaleAdaptedState(position, momentum, zeros, zeros, ones)

    def _mass(self, state: ScaleAdaptedState) -> Params:
        return tree_map(lambda v: jnp.sqrt(v) + self.damping, state.square)

    def step(
        self,
        state: ScaleAdaptedState,
        gradient: Params,
        noise: Noise,
        step: jax.Array,
        curvature: Curvature | None = None,
    ) -> ScaleAdaptedState:
        """Adapt if it is time, then a semi-implicit SGHMC step."""
        eps, T, d = value_at(self.step_size, step), value_at(self.temperature, step), self.momentum_decay
        adapting = step < (self.adapt_steps or 0)

        def keep(new: Any, old: Any) -> Any:
            return jnp.where(adapting, new, old).astype(old.dtype)

        mean = tree_map(lambda m, g, w: keep(m + (g - m) / (w + 1), m), state.mean, gradient, state.window)
        square = tree_map(lambda v, g, w: keep(v + (g**2 - v) / (w + 1), v), state.square, gradient, state.window)
        window = tree_map(
            lambda w, m, v: keep(w * (1 - m**2 / jnp.maximum(v, self.damping**2)) + 1, w), state.window, mean, square
        )
        state = state._replace(window=window, mean=mean, square=square)
        mass = self._mass(state)

        def kick(p: Any, g: Any, M: Any, v: Any, z: Any) -> Any:
            variance = 2 * d * M * T - (eps**2 * v if self.subtract_noise else 0.0)
            return ((1 - d) * p - eps * g + jnp.sqrt(jnp.maximum(variance, 0.0)) * z).astype(p.dtype)

        momentum = tree_map(kick, state.momentum, gradient, mass, square, noise.normal(state.momentum))
        position = tree_map(lambda x, p, M: (x + eps / M * p).astype(x.dtype), state.position, momentum, mass)
        return state._replace(position=position, momentum=momentum)

    def kinetic_temperature(self, state: ScaleAdaptedState) -> jax.Array:
        """Mean of p^2 / M."""
        plain = SGHMC(1.0, mass=self._mass(state))
        return plain.kinetic_temperature(SGHMCState(state.position, state.momentum))

    def recipe(self, potential: Callable[[Params], jax.Array], state: ScaleAdaptedState) -> Recipe:
        """As SGHMC, with the friction d M / eps and the mass of the frozen estimates."""
        z, unpack = pack(self, state)
        T, n = value_at(self.temperature, 0), z.size // 2
        M = jax.flatten_util.ravel_pytree(self._mass(state))[0]
        V = self.momentum_decay * M / value_at(self.step_size, 0)
        zero, eye = jnp.zeros((n, n)), jnp.eye(n)

        def energy(z: jax.Array) -> jax.Array:
            return (potential(unpack(z).position) + jnp.sum(z[n:] ** 2 / M) / 2) / T

        return Recipe(
            diffusion=lambda z: T * jnp.block([[zero, zero], [zero, jnp.diag(V)]]),
            curl=lambda z: T * jnp.block([[zero, -eye], [eye, zero]]),
            energy=energy,
        )

    @classmethod
    def variants(cls, step_size: float, temperature: float = 1.0) -> Sequence[Self]:
        """Frozen from the start, with a friction that stays as the step shrinks."""
        return [cls(step_size, 1.5 * step_size, temperature=temperature, adapt_steps=0)]
