"""Elastic averaging SGD (Zhang, Choromanska and LeCun 2015). An optimiser: temperature 0.

    at an exchange, every `every` steps:  theta_i <- theta_i - rho (theta_i - c),   c <- c + rho (theta_i - c)

with rho = moving_rate / K. The chain is displaced in the first step after its exchange, beside that step's gradient
move (their Algorithm 1); the centre answers before it moves, so that both use the same c, and has no velocity. An
answer that comes late pulls the chain from where it is by then.

Over `SGLD(eps, temperature=0)` with every=1 it is elastic SGLD at T = 0, step by step, with moving_rate = eps alpha.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from hookean import schedules
from hookean.coupling.base import Centre, Coupling, Evaluate, Evaluation, Worker, open_centre
from hookean.exchange import Copy, Report, Rhythm
from hookean.random import Noise
from hookean.schedules import value_at
from hookean.tree import set_row, tree_map
from hookean.types import ArgumentError, Params, Scheduled, check_count


@dataclasses.dataclass(frozen=True)
class EASGD(Coupling):
    """Elastic averaging; `moving_rate` is the share of the way to the mean that the centre goes in one round."""

    moving_rate: Scheduled = 0.9
    every: int = 1

    law: ClassVar[str] = "no law: an optimiser"
    optimises: ClassVar[bool] = True

    @property
    def rhythm(self) -> Rhythm:
        """Every report is answered."""
        return Rhythm(self.every, self.every)

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
        check_count("every", self.every)
        schedules.check("moving_rate", self.moving_rate, num_steps, 0.0)
        if callable(dynamics.temperature) or dynamics.temperature != 0:
            raise ArgumentError(
                "coupling",
                f"{type(self).__name__} is an optimiser, but the temperature is {dynamics.temperature}",
                f"Give {type(dynamics).__name__}(..., temperature=0), or sample with Elastic",
            )

    def roles(self, dynamics: Any, chains: int) -> tuple[Any, Any]:
        """The centre has no motion of its own; its dynamics only makes a state with a position."""
        return dynamics, dynamics

    def covariance(self, stiffness: float, chains: int, temperature: float) -> None:
        """An optimiser claims none."""

    def advance(
        self, dynamics: Any, evaluate: Evaluate, worker: Worker, noise: Noise, step: Any
    ) -> tuple[Worker, Evaluation]:
        """A step, and beside it the pull of an answer just taken."""
        before, copy = worker, worker.copy
        assert copy is not None
        worker, seen = super().advance(dynamics, evaluate, worker, noise, step)
        rate = before.fresh * value_at(self.moving_rate, step) / copy.live
        position = tree_map(
            lambda new, x, c: (new - rate * (x - c)).astype(new.dtype),
            worker.state.position,
            before.state.position,
            copy.position,
        )
        return worker._replace(state=worker.state._replace(position=position)), seen

    def open(self, dynamics: Any, positions: Params, noise: Noise) -> Centre:
        """Start at the mean of the workers, where the pulls of their first step cancel."""
        return open_centre(dynamics, positions, noise)

    def receive(self, dynamics: Any, centre: Centre, report: Report, key: jax.Array) -> tuple[Centre, Copy]:
        """Answer with the centre as it is, then move it towards this worker."""
        joined, earned = centre.earn(report.worker, report.steps)
        joined = joined._replace(positions=set_row(centre.positions, report.worker, report.payload))
        rate = value_at(self.moving_rate, centre.clock) / joined.num_live
        pulls = tree_map(lambda x, c: rate * (x - c), report.payload, centre.state.position)
        return self._move(joined, pulls, earned), joined.copy()

    def receive_all(self, dynamics: Any, centre: Centre, reports: Report, key: jax.Array) -> tuple[Centre, Copy]:
        """The same for all at once: towards their mean."""
        stored = centre._replace(positions=reports.payload)
        rate = value_at(self.moving_rate, centre.clock)
        pulls = tree_map(lambda x, c: rate * (x - c), stored.mean(), centre.state.position)
        earned = jnp.sum(jnp.where(centre.live, reports.steps, 0), dtype=jnp.int32)
        return self._move(stored, pulls, earned), centre.copy()

    def _move(self, centre: Centre, pulls: Params, steps: Any) -> Centre:
        position = tree_map(lambda c, d: (c + d).astype(c.dtype), centre.state.position, pulls)
        credit = centre.credit + steps
        return centre._replace(
            state=centre.state._replace(position=position),
            credit=credit % centre.num_live,
            clock=centre.clock + credit // centre.num_live,
            version=centre.version + 1,
        )
