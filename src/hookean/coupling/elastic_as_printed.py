"""Elastic coupling exactly as printed (Eq. 6 of Springenberg et al. 2016), kept for reproducing the paper.

    p_i' = p_i - eps grad U~ - eps V p_i / M - eps alpha (theta_i - c) + N(0, 2 eps^2 (V + C))
    r'   = r - eps C r / M - eps alpha mean(c - theta_i) + N(0, 2 eps^2 C)

Against the Hamiltonian the springs on the chains are K times too strong and the noise is short by a factor 1/eps, so
that it samples at a temperature of about eps (V + C) / V: some 60 times too cold at the paper's toy setting
(eps = 0.01, V = C = 1: variance 0.0150 where the target has 1). It targets nothing useful; use `Elastic`.

`noise` chooses the reading: "printed" as above; "sde" with 2 eps (V + C) and 2 eps C, as the continuous equation
says; "chain" with 2 eps V and 2 eps C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from hookean import schedules
from hookean.coupling.elastic import Elastic
from hookean.exchange import Copy
from hookean.schedules import value_at
from hookean.tree import tree_map
from hookean.types import ArgumentError, Params

NOISES = ("printed", "sde", "chain")


@dataclasses.dataclass(frozen=True)
class ElasticAsPrinted(Elastic):
    """Eq. 6. Chains and centre step at once (`simultaneous`), as printed."""

    simultaneous: bool = True
    noise: Literal["printed", "sde", "chain"] = "printed"

    law: ClassVar[str] = "no posterior: the paper's Eq. 6 samples at a temperature of about eps (V + C)/V"

    @property
    def couples_draws(self) -> bool:
        """Its noise is wrong whatever the springs do."""
        return True

    @classmethod
    def variants(cls) -> Sequence[Self]:
        """The three readings."""
        return [cls(1.0, 1), cls(1.0, 2, friction=0.7, noise="sde"), cls(1.0, 1, noise="chain")]

    def check(self, dynamics: Any, chains: int, num_steps: int) -> None:
        """Eq. 6 is written for SGHMC."""
        if self.noise not in NOISES:
            raise ArgumentError("noise", f"is {self.noise!r}", f"Choose one of {', '.join(NOISES)}")
        super().check(dynamics, chains, num_steps)
        schedules.check("friction", dynamics.friction, num_steps, 0.0, exclusive=True)

    def roles(self, dynamics: Any, chains: int) -> tuple[Any, Any]:
        """A noise variance 2 eps T V is set by the temperature T that gives it."""
        if not hasattr(dynamics, "friction"):
            raise ArgumentError(
                "coupling", f"Eq. 6 has a friction, {type(dynamics).__name__} has none", "Use SGHMC, or Elastic"
            )
        _, centre = super().roles(dynamics, chains)

        def chain_temperature(step: Any) -> Any:
            V, C = value_at(dynamics.friction, step), value_at(centre.friction, step)
            printed = value_at(dynamics.step_size, step) if self.noise == "printed" else 1.0
            return value_at(dynamics.temperature, step) * (1.0 if self.noise == "chain" else printed * (V + C) / V)

        def centre_temperature(step: Any) -> Any:
            printed = value_at(dynamics.step_size, step) if self.noise == "printed" else 1.0
            return value_at(dynamics.temperature, step) * printed

        return dynamics.replace(temperature=chain_temperature), centre.replace(temperature=centre_temperature)

    def force(self, position: Params, copy: Copy, step: Any) -> Params:
        """K times the pull of Eq. 5."""
        strength = self.spring(step, copy.live) * self.schedule.factor(step)
        return tree_map(lambda x, c: (strength * (x - c)).astype(x.dtype), position, copy.position)

    def spring(self, step: Any, live: Any) -> Any:
        """alpha, whatever the number of chains."""
        return self.stiffness(step)

    def covariance(self, stiffness: float, chains: int, temperature: float) -> None:
        """None is claimed; docs/math.md has the numbers."""
