"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin 2014), in three orders of the same step.

    explicit        theta' = theta + eps p / M,    p' = p - eps g - eps V p / M + N(0, 2 eps T V)   (as printed)
    semi_implicit   the same p', then              theta' = theta + eps p' / M
    obabo           half kick, exact Ornstein-Uhlenbeck over eps, half kick, drift

The last is the symmetric splitting OBABO cut at another place of its cycle (B O B A), so that it needs one gradient a
step: it visits the same positions. With `refresh_every=m` its O step is taken once every m steps, exact over m eps.

Targets exp(-(U + p^2 / 2M) / T). Recipe: D = diag(0, V T), Q = [[0, -T], [T, 0]], H = U + p^2 / 2M.

The explicit order inflates the variance by about 1 / (1 - eps h / V) at curvature h and is unstable at eps h >= V.
A known variance B of the stochastic gradient can be taken off the injected noise: 2 eps T V - eps^2 B, not below 0.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from hookean import schedules
from hookean.dynamics.base import Curvature, Dynamics, LinearMap, Recipe, num_examples, pack
from hookean.random import Noise
from hookean.schedules import Derived, value_at
from hookean.tree import dot, like, size, tree_map
from hookean.types import ArgumentError, HookeanWarning, Params, Scheduled, check_count

Integrator = Literal["explicit", "semi_implicit", "obabo"]
INTEGRATORS: tuple[Integrator, ...] = ("explicit", "semi_implicit", "obabo")


class SGHMCState(NamedTuple):
    """Position and momentum."""

    position: Params
    momentum: Params


@dataclasses.dataclass(frozen=True)
class SGHMC(Dynamics):
    """Langevin dynamics with momentum. `mass` is a number, or a pytree like the parameters."""

    step_size: Scheduled
    friction: Scheduled = 1.0
    mass: Any = 1.0
    integrator: Integrator = "semi_implicit"
    noise_estimate: Any = 0.0
    refresh_every: int = 1

    law: ClassVar[str] = "exp(-(U + p^2/2M)/T), theta from exp(-U/T)"
    phase: ClassVar[tuple[str, ...]] = ("position", "momentum")

    @classmethod
    def from_learning_rate(
        cls, learning_rate: Scheduled, momentum: Scheduled = 0.9, *, target: Any, mass: float = 1.0, **others: Any
    ) -> Self:
        """In the units of SGD with momentum on the mean loss: lr = eps^2 N / M, 1 - momentum = eps V / M."""
        count = num_examples(target)
        schedules.check_number("mass", mass, 0.0, exclusive=True)

        def check(num_steps: int) -> None:
            schedules.check("learning_rate", learning_rate, num_steps, 0.0, exclusive=True)
            schedules.check("momentum", momentum, num_steps, 0.0, below=1.0)

        def step_size(step: Any) -> Any:
            return (value_at(learning_rate, step) * mass / count) ** 0.5

        if callable(learning_rate) or callable(momentum):

            def friction(step: Any) -> Any:
                eps = step_size(step)  # may touch 0, where nothing moves
                return (1 - value_at(momentum, step)) * mass * jnp.where(eps > 0, 1 / jnp.where(eps > 0, eps, 1), 0)

            return cls(Derived(step_size, check), Derived(friction, check), mass, **others)
        check(1)
        eps = step_size(0)
        return cls(eps, (1 - momentum) * mass / eps, mass, **others)

    @property
    def cycle(self) -> int:
        """With the O step taken now and then, as many steps as from one to the next."""
        return self.refresh_every

    def check(self, num_steps: int) -> None:
        """Refuse what cannot work; warn where the noise estimate exceeds the noise."""
        super().check(num_steps)
        schedules.check("step_size", self.step_size, num_steps, 0.0, exclusive=True)
        schedules.check("friction", self.friction, num_steps, 0.0)
        schedules.check_number("mass", self.mass, 0.0, exclusive=True, tree=True)
        schedules.check_number("noise_estimate", self.noise_estimate, 0.0, tree=True)
        check_count("refresh_every", self.refresh_every)
        if self.integrator not in INTEGRATORS:
            raise ArgumentError("integrator", f"is {self.integrator!r}", f"Choose one of {', '.join(INTEGRATORS)}")
        if self.refresh_every > 1 and self.integrator != "obabo":
            raise ArgumentError(
                "refresh_every", f"is {self.refresh_every}", 'It must be 1, or more with integrator="obabo"'
            )
        largest = max(float(np.max(np.asarray(b))) for b in jax.tree.leaves(self.noise_estimate))
        if largest > 0 and self.integrator == "obabo":
            raise ArgumentError("noise_estimate", "has no place in the exact O step", 'Use integrator="semi_implicit"')
        for step in np.unique(np.linspace(0, max(num_steps - 1, 0), 33).astype(int)) if largest > 0 else ():
            eps, V, T = (float(value_at(x, step)) for x in (self.step_size, self.friction, self.temperature))
            if eps**2 * largest > 2 * eps * T * V:
                warnings.warn(
                    f"noise_estimate: at step {step} the gradient noise eps^2 B = {eps**2 * largest:.3g} exceeds the "
                    f"noise that belongs there, 2 eps T V = {2 * eps * T * V:.3g}; the injected noise is clipped to 0 "
                    "and the chain runs too hot. Take a smaller step, a larger batch or more friction.",
                    HookeanWarning,
                    stacklevel=4,
                )
                break

    def stability_limit(self) -> float | None:
        """The explicit order explodes at eps h >= V."""
        if self.integrator != "explicit":
            return None
        eps = float(value_at(self.step_size, 0))
        return float(value_at(self.friction, 0)) / eps if eps > 0 else None

    def init(self, position: Params, noise: Noise) -> SGHMCState:
        """Momenta from their own law N(0, M T)."""
        temperature = value_at(self.temperature, 0)
        momentum = tree_map(
            lambda z, M: (jnp.sqrt(M * temperature) * z).astype(z.dtype),
            noise.normal(position),
            like(self.mass, position),
        )
        return SGHMCState(position, momentum)

    def step(
        self, state: SGHMCState, gradient: Params, noise: Noise, step: jax.Array, curvature: Curvature | None = None
    ) -> SGHMCState:
        """One step in the chosen order."""
        eps = value_at(self.step_size, step)
        mass = like(self.mass, state.position)
        if self.integrator == "obabo":
            half = tree_map(lambda p, g: p - eps / 2 * g, state.momentum, gradient)
            half = self._refresh(half, mass, noise, step)
            momentum = tree_map(lambda p, g: (p - eps / 2 * g).astype(p.dtype), half, gradient)
        else:
            V, T = value_at(self.friction, step), value_at(self.temperature, step)

            def kick(p: Any, g: Any, M: Any, B: Any, z: Any) -> Any:
                scale = jnp.sqrt(jnp.maximum(2 * eps * T * V - eps**2 * B, 0.0))
                return (p - eps * g - eps * V / M * p + scale * z).astype(p.dtype)

            estimate = like(self.noise_estimate, state.position)
            momentum = tree_map(kick, state.momentum, gradient, mass, estimate, noise.normal(state.momentum))
        driver = state.momentum if self.integrator == "explicit" else momentum
        position = tree_map(lambda x, p, M: (x + eps / M * p).astype(x.dtype), state.position, driver, mass)
        return SGHMCState(position, momentum)

    def _refresh(self, momentum: Params, mass: Params, noise: Noise, step: jax.Array) -> Params:
        """The exact Ornstein-Uhlenbeck flow over `refresh_every` steps, at every `refresh_every`-th step."""
        span = self.refresh_every * value_at(self.step_size, step)
        V, T = value_at(self.friction, step), value_at(self.temperature, step)

        def flow(momentum: Params) -> Params:
            return tree_map(
                lambda p, M, z: (
                    jnp.exp(-V * span / M) * p + jnp.sqrt(-M * T * jnp.expm1(-2 * V * span / M)) * z
                ).astype(p.dtype),
                momentum,
                mass,
                noise.normal(momentum),
            )

        if self.refresh_every == 1:
            return flow(momentum)
        return jax.lax.cond(step % self.refresh_every == 0, flow, lambda p: p, momentum)

    def kinetic_temperature(self, state: SGHMCState) -> jax.Array:
        """Mean of p^2 / M."""
        scaled = tree_map(lambda p, M: p / M, state.momentum, like(self.mass, state.momentum))
        return dot(state.momentum, scaled) / size(state.momentum)

    def linear_map(self, stiffness: jax.Array, step: jax.Array) -> LinearMap | None:
        """The step on (x, p) as a product of kick, friction and drift."""
        estimate = self.noise_estimate
        if not (_is_number(self.mass) and _is_number(estimate)):
            return None  # every coordinate would have its own map
        eps, V, T = (value_at(x, step) for x in (self.step_size, self.friction, self.temperature))
        M = self.mass
        one = jnp.ones(())

        def matrix(a: Any, b: Any, c: Any, d: Any) -> jax.Array:
            return jnp.array([[a * one, b * one], [c * one, d * one]])

        drift = matrix(1, eps / M, 0, 1)
        if self.integrator == "obabo":
            due = step % self.refresh_every == 0
            decay = jnp.where(due, jnp.exp(-V * eps * self.refresh_every / M), 1.0)
            half = matrix(1, 0, -eps / 2 * stiffness, 1)
            after = drift @ half
            spread = matrix(0, 0, 0, M * T * (1 - decay**2))
            return LinearMap(after @ matrix(1, 0, 0, decay) @ half, after @ spread @ after.T)
        spread = matrix(0, 0, 0, jnp.maximum(2 * eps * T * V - eps**2 * estimate, 0.0))
        if self.integrator == "explicit":
            return LinearMap(matrix(1, eps / M, -eps * stiffness, 1 - eps * V / M), spread)
        kick = matrix(1, 0, -eps * stiffness, 1 - eps * V / M)
        return LinearMap(drift @ kick, drift @ spread @ drift.T)

    def recipe(self, potential: Callable[[Params], jax.Array], state: SGHMCState) -> Recipe:
        """D = diag(0, V T), Q = T [[0, -1], [1, 0]]."""
        z, unpack = pack(self, state)
        V, T = value_at(self.friction, 0), value_at(self.temperature, 0)
        zero, eye = jnp.zeros((z.size // 2, z.size // 2)), jnp.eye(z.size // 2)

        def energy(z: jax.Array) -> jax.Array:
            s = unpack(z)
            kinetic = tree_map(lambda p, M: jnp.sum(p**2 / M) / 2, s.momentum, like(self.mass, s.momentum))
            return (potential(s.position) + jax.tree.reduce(jnp.add, kinetic)) / T

        return Recipe(
            diffusion=lambda z: V * T * jnp.block([[zero, zero], [zero, eye]]),
            curl=lambda z: T * jnp.block([[zero, -eye], [eye, zero]]),
            energy=energy,
        )

    @classmethod
    def variants(cls, step_size: float, temperature: float = 1.0) -> Sequence[Self]:
        """Each integrator, another mass, and the O step taken every fourth step."""
        same: dict[str, Any] = {"step_size": step_size, "friction": 1.5, "temperature": temperature}
        orders = [cls(**same, integrator=order) for order in INTEGRATORS]
        return [*orders, cls(**same, mass=2.0), cls(**same, integrator="obabo", refresh_every=4)]


def _is_number(value: Any) -> bool:
    return len(jax.tree.leaves(value)) == 1 and not isinstance(value, dict | list | tuple) and np.ndim(value) == 0
