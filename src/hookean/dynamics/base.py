"""What a dynamics is: a pure step of one chain, and the law it leaves invariant.

A dynamics sees one gradient, that of the whole potential its chain feels; it never knows which part of it came from
data, prior or springs. `position` is the only field of a state that the rest of the library reads.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from hookean import schedules
from hookean.random import Noise
from hookean.types import ArgumentError, Params, Scheduled

Curvature = Callable[[Params], Params]
"""Product of the Hessian of the whole potential, at the present position, with a vector."""


class LinearMap(NamedTuple):
    """One step on a quadratic potential, for one coordinate: z' = matrix z + N(0, covariance), z = (x, ...)."""

    matrix: jax.Array
    covariance: jax.Array


class Recipe(NamedTuple):
    """The general form of Ma, Chen and Fox (2015): dz = f dt + sqrt(2 D) dw, f = -(D + Q) grad E + Gamma.

    `energy` is H / T, so that exp(-energy) is the stationary density of z.
    """

    diffusion: Callable[[jax.Array], jax.Array]
    curl: Callable[[jax.Array], jax.Array]
    energy: Callable[[jax.Array], jax.Array]

    def drift(self, z: jax.Array) -> jax.Array:
        """The drift f that makes exp(-energy) stationary."""

        def total(z: jax.Array) -> jax.Array:
            return self.diffusion(z) + self.curl(z)

        correction = jnp.einsum("ijj->i", jax.jacfwd(total)(z))
        return -total(z) @ jax.grad(self.energy)(z) + correction

    def residual(self, drift: Callable[[jax.Array], jax.Array], z: jax.Array) -> jax.Array:
        """Fokker-Planck residual of exp(-energy) under `drift` and this diffusion, over the density; 0: stationary."""

        def current(z: jax.Array) -> jax.Array:  # probability current over density
            spread = jnp.einsum("ijj->i", jax.jacfwd(self.diffusion)(z))
            return drift(z) - spread + self.diffusion(z) @ jax.grad(self.energy)(z)

        return jnp.trace(jax.jacfwd(current)(z)) - current(z) @ jax.grad(self.energy)(z)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamics(abc.ABC):
    """One chain's rule of motion. Subclasses are final; each lives in its own file."""

    temperature: Scheduled = 1.0

    law: ClassVar[str]
    """The stationary law, in words for a person."""
    phase: ClassVar[tuple[str, ...]] = ("position",)
    """Fields of the state that `recipe` speaks of, in order."""

    @abc.abstractmethod
    def init(self, position: Params, noise: Noise) -> Any:
        """State of a chain that starts at `position`."""

    @abc.abstractmethod
    def step(
        self, state: Any, gradient: Params, noise: Noise, step: jax.Array, curvature: Curvature | None = None
    ) -> Any:
        """State after one step; `gradient` was taken at `state.position`."""

    @abc.abstractmethod
    def recipe(self, potential: Callable[[Params], jax.Array], state: Any) -> Recipe:
        """D, Q and H on the flattened `phase` of `state`, at step 0."""

    @classmethod
    @abc.abstractmethod
    def variants(cls, step_size: float, temperature: float = 1.0) -> Sequence[Self]:
        """One instance for each way of running it, for the law suites."""

    @property
    def uses_curvature(self) -> bool:
        """Whether `step` needs Hessian-vector products."""
        return False

    @property
    def cycle(self) -> int:
        """Steps after which the rule repeats itself."""
        return 1

    @property
    def is_exact(self) -> bool:
        """Whether the law is reached exactly as the step goes to 0."""
        return True

    def kinetic_temperature(self, state: Any) -> jax.Array:
        """Mean of p^2 / M, which is T in equilibrium; NaN without momenta."""
        return jnp.asarray(jnp.nan)

    def linear_map(self, stiffness: jax.Array, step: jax.Array) -> LinearMap | None:
        """The step on the potential stiffness x^2 / 2, or None where it is no such map."""
        return None

    def bind(self, warmup: int, num_examples: int) -> Self:
        """Fill in what only the run knows: the length of its warm-up and N."""
        return self

    def check(self, num_steps: int) -> None:
        """Refuse hyper-parameters that cannot work and warn of those that hardly can."""
        schedules.check("temperature", self.temperature, num_steps, 0.0)

    def stability_limit(self) -> float | None:
        """Curvature at and above which the chain explodes, where that is known beforehand and near."""
        return None

    def growth(self, stiffness: float, step: int) -> float | None:
        """Factor by which a step enlarges a displacement on the potential stiffness x^2 / 2; None where unknown."""
        one = self.linear_map(jnp.asarray(float(stiffness)), jnp.asarray(step))
        return None if one is None else float(np.abs(np.linalg.eigvals(np.asarray(one.matrix))).max())

    def as_centre(self, **changes: Any) -> Self:
        """This dynamics for a centre, which feels springs only."""
        return self.replace(**changes)

    def replace(self, **changes: Any) -> Self:
        """The same dynamics with other hyper-parameters; refuses those it does not have."""
        fields = {field.name for field in dataclasses.fields(self)}
        for name in changes:
            if name not in fields:
                raise ArgumentError(
                    name,
                    f"{type(self).__name__} has none to set for the centre",
                    f"Leave it out, or use a dynamics that has one; {type(self).__name__} has {sorted(fields)}",
                )
        return dataclasses.replace(self, **changes)


def num_examples(target: Any) -> int:
    """N of a target, by which learning rates are translated."""
    count = getattr(target, "num_examples", None)
    if not isinstance(count, int):
        raise ArgumentError(
            "target", f"is {type(target).__name__} and has no number of examples", "Give the target to sample"
        )
    return count


def pack(dynamics: Dynamics, state: Any) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The phase of `state` as one vector, and the way back to a state."""
    vector, unravel = ravel_pytree([getattr(state, name) for name in dynamics.phase])

    def unpack(z: jax.Array) -> Any:
        return state._replace(**dict(zip(dynamics.phase, unravel(z), strict=True)))

    return vector, unpack
