"""Preconditioned SGLD (Li, Chen, Carlson and Carin 2016), with its Gamma term.

    v' = a v + (1 - a) (g/N)^2,   G = 1 / (lambda + sqrt(v')),   theta' = theta - eps (G g - T Gamma) + N(0, 2 eps T G)
    Gamma_i = dG_i/dtheta_i = -G_i^2 (1 - a) (g_i/N) (H_ii/N) / sqrt(v'_i)

(the step of the paper is 2 eps). H_ii is estimated without bias by s_i (H s)_i with random signs s (Hutchinson 1990),
exact for a diagonal Hessian; it costs one Hessian-vector product a step, and `gamma=False` drops the term as the
paper's authors did in their experiments.

Targets exp(-U/T) exactly (as eps -> 0) when v' depends on the present gradient only (a = 0), and for a > 0 to the
extent that v varies slowly. Recipe: D = G T with v as memory held fixed, Q = 0, H = U.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from hookean import schedules
from hookean.dynamics.base import Curvature, Dynamics, Recipe, pack
from hookean.random import Noise
from hookean.schedules import value_at
from hookean.tree import tree_map
from hookean.types import Params, Scheduled


class PSGLDState(NamedTuple):
    """Position, and the running mean of squared gradients."""

    position: Params
    square: Params


@dataclasses.dataclass(frozen=True)
class PSGLD(Dynamics):
    """SGLD with RMSprop's preconditioner, which sees gradients divided by `scale` (by default N, as in the paper)."""

    step_size: Scheduled
    decay: float = 0.99
    damping: float = 1e-5
    scale: float | None = None
    gamma: bool = True

    law: ClassVar[str] = "exp(-U/T), up to the variation of its preconditioner"

    @property
    def uses_curvature(self) -> bool:
        """The Gamma term needs the Hessian's diagonal."""
        return self.gamma

    @property
    def is_exact(self) -> bool:
        """Only without memory is Gamma the whole of the preconditioner's divergence."""
        return self.gamma and self.decay == 0

    def bind(self, warmup: int, num_examples: int) -> Self:
        """Divide gradients by N unless told otherwise."""
        return self if self.scale is not None else dataclasses.replace(self, scale=float(num_examples))

    def as_centre(self, **changes: Any) -> Self:
        """Springs have no N: their gradients are not divided."""
        return dataclasses.replace(self.replace(**changes), scale=1.0)

    def check(self, num_steps: int) -> None:
        """Refuse what cannot work."""
        super().check(num_steps)
        schedules.check("step_size", self.step_size, num_steps, 0.0, exclusive=True)
        schedules.check_number("damping", self.damping, 0.0, exclusive=True)
        schedules.check_number("scale", self._scale, 0.0, exclusive=True)
        schedules.check_number("decay", self.decay, 0.0, below=1.0)

    def init(self, position: Params, noise: Noise) -> PSGLDState:
        """Start with v = 1, so that the first steps are no larger than SGLD's."""
        return PSGLDState(position, tree_map(jnp.ones_like, position))

    @property
    def _scale(self) -> float:
        return 1.0 if self.scale is None else self.scale

    def _square(self, square: Any, g: Any) -> Any:
        return self.decay * square + (1 - self.decay) * (g / self._scale) ** 2

    def _metric(self, square: Any) -> Any:
        return 1 / (self.damping + jnp.sqrt(square))

    def step(
        self, state: PSGLDState, gradient: Params, noise: Noise, step: jax.Array, curvature: Curvature | None = None
    ) -> PSGLDState:
        """Update the preconditioner, then one Euler-Maruyama step in its metric."""
        eps, T = value_at(self.step_size, step), value_at(self.temperature, step)
        square = tree_map(self._square, state.square, gradient)
        if self.uses_curvature:
            assert curvature is not None
            signs = noise.signs(state.position)
            diagonal = tree_map(jnp.multiply, signs, curvature(signs))
        else:
            diagonal = tree_map(jnp.zeros_like, state.position)

        def move(x: Any, g: Any, v: Any, h: Any, z: Any) -> Any:
            G = self._metric(v)
            slope = (1 - self.decay) * (g / self._scale) * (h / self._scale)
            Gamma = -(G**2) * slope / jnp.sqrt(jnp.maximum(v, jnp.finfo(v.dtype).tiny))
            return (x - eps * (G * g - T * Gamma) + jnp.sqrt(2 * eps * T * G) * z).astype(x.dtype)

        position = tree_map(move, state.position, gradient, square, diagonal, noise.normal(state.position))
        return PSGLDState(position, square)

    def recipe(self, potential: Callable[[Params], jax.Array], state: PSGLDState) -> Recipe:
        """D = G(theta) T, where G sees theta through the present gradient."""
        z, unpack = pack(self, state)
        T, n = value_at(self.temperature, 0), z.size

        def diffusion(z: jax.Array) -> jax.Array:
            s = unpack(z)
            square = tree_map(self._square, s.square, jax.grad(potential)(s.position))
            return jnp.diag(T * self._metric(jax.flatten_util.ravel_pytree(square)[0]))

        return Recipe(diffusion, lambda z: jnp.zeros((n, n)), lambda z: potential(unpack(z).position) / T)

    @classmethod
    def variants(cls, step_size: float, temperature: float = 1.0) -> Sequence[Self]:
        """Slow memory, and none (where Gamma matters most)."""
        return [
            cls(step_size, temperature=temperature),
            cls(step_size, decay=0.0, damping=1.0, temperature=temperature),
        ]
