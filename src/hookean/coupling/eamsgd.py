"""Elastic averaging SGD with momentum (Eq. 8 of Springenberg et al. 2016; after Zhang, Choromanska and LeCun 2015).

    v_i' = (1 - eps V / M) v_i - eps g_i,   theta_i' = theta_i + eps v_i' / M - rho (theta_i - c),   c as in EASGD

EASGD over SGHMC at temperature 0. The springs displace positions and leave velocities alone, and the centre has no
velocity; in the deterministic limit of elastic SGHMC (Eq. 7; `Elastic` over `SGHMC(temperature=0)`) they kick the
velocities, and the centre has one. Momentum is the heavy ball's; Zhang et al. look ahead as Nesterov does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hookean.coupling.easgd import EASGD
from hookean.types import ArgumentError


@dataclasses.dataclass(frozen=True)
class EAMSGD(EASGD):
    """EASGD of chains that have momentum."""

    def check(self, dynamics: Any, chains: int, num_steps: int) -> None:
        """Momentum must exist."""
        super().check(dynamics, chains, num_steps)
        if "momentum" not in dynamics.phase:
            raise ArgumentError(
                "coupling",
                f"EAMSGD needs momentum, {type(dynamics).__name__} has none",
                "Use SGHMC(..., temperature=0), or EASGD",
            )
