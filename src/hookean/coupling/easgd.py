"""Elastic averaging SGD (Zhang, Choromanska and LeCun 2015). An optimiser: run it at temperature 0.

    at an exchange, every `every` steps:   theta_i <- theta_i - rho (theta_i - c),   c <- c + rho (theta_i - c)

with rho = moving_rate / K. The chain is displaced, in the first step after the exchange, beside that step's gradient
move. Over `SGLD(eps, temperature=0)` with every=1 it is elastic SGLD at T = 0 with moving_rate = eps alpha.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax

from hookean import schedules
from hookean.coupling.base import Centre, Copy, Coupling, check_every, open_centre
from hookean.random import Noise
from hookean.schedules import value_at
from hookean.tree import set_row, tree_map
from hookean.types import ArgumentError, Params, Scheduled


@dataclasses.dataclass(frozen=True)
class EASGD(Coupling):
    """Elastic averaging; `moving_rate` is the share of the way to the mean that the centre goes in one round."""

    moving_rate: Scheduled = 0.9
    every: int = 1

    law: ClassVar[str] = "an optimiser: no law"
    optimises: ClassVar[bool] = True

    @property
    def period(self) -> int:
        """Exchange every so many steps."""
        return self.every

    @property
    def couples_draws(self) -> bool:
        """Always."""
        return True

    @classmethod
    def variants(cls) -> Sequence[Self]:
        """Often and seldom."""
        return [cls(0.3, 1), cls(0.9, 4)]

    def check(self, dynamics: Any, chains: int, num_steps: int) -> None:
        """Refuse what cannot work."""
        check_every(self.every)
        schedules.check("moving_rate", self.moving_rate, num_steps, 0.0)

    def roles(self, dynamics: Any, chains: int) -> tuple[Any, Any]:
        """The centre has no motion of its own; its dynamics only makes a state with a position."""
        return dynamics, dynamics

    def _pull(self, position: Params, centre: Params, step: Any, live: Any) -> Params:
        rate = value_at(self.moving_rate, step) / live
        return tree_map(lambda x, c: rate * (x - c), position, centre)

    def displace(self, state: Any, before: Params, copy: Copy, step: Any) -> Any:
        """Towards the centre, once after every exchange."""
        pull = self._pull(before, copy.position, step, copy.live)
        due = step % self.every == 0
        position = tree_map(lambda x, d: (x - due * d).astype(x.dtype), state.position, pull)
        return state._replace(position=position)

    def open(self, dynamics: Any, positions: Params, live: jax.Array, noise: Noise) -> Centre:
        """Start at the mean and count the pull of the workers' first step, which they take with that centre."""
        return open_centre(dynamics, positions, live, noise)

    def _move(self, centre: Centre, pulls: Params, steps: Any) -> Centre:
        position = tree_map(lambda c, d: (c + d).astype(c.dtype), centre.state.position, pulls)
        return centre._replace(
            state=centre.state._replace(position=position), clock=centre.clock + steps, version=centre.version + 1
        )

    def receive(
        self, dynamics: Any, centre: Centre, worker: Any, payload: Params, base_version: Any, steps: Any, key: jax.Array
    ) -> tuple[Centre, Copy]:
        """Answer with the centre as it is, then move it: both sides use the same difference."""
        raise NotImplementedError

    def receive_all(
        self, dynamics: Any, centre: Centre, payloads: Params, base_versions: Any, steps: Any, key: jax.Array
    ) -> tuple[Centre, Copy]:
        """The same for all at once."""
        raise NotImplementedError
