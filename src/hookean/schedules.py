"""Hyper-parameters that change in time, and the three ways a coupling is scheduled.

A *coupling schedule* scales the force that the centre exerts on the chains; the centre itself always follows the
chains at full strength, for a free centre would diffuse away and tear the chains along when coupled again.

`hold()`     coupled for the whole run. Kept draws follow the coupled law, narrower than the posterior.
`release()`  coupled at first, then let go during the warm-up: kept draws have the posterior's own marginals.
`cycle(n)`   every n steps a coupled and a free part; draws are kept from the free part only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hookean.types import ArgumentError, Scheduled


def value_at(value: Scheduled | Any, step: Any) -> Any:
    """The value at `step` of a number or a schedule."""
    return value(step) if callable(value) else value


def check(name: str, value: Scheduled | Any, num_steps: int, minimum: float, exclusive: bool = False) -> None:
    """Refuse a number, or a schedule at a sample of its steps, that is not finite or too small."""
    steps = np.unique(np.linspace(0, max(num_steps - 1, 0), 33).astype(int)) if callable(value) else [0]
    for step in steps:
        try:
            numbers = np.asarray(jax.tree.leaves(value_at(value, jnp.asarray(step))), dtype=object)
            flat = np.concatenate([np.ravel(np.asarray(x, dtype=float)) for x in numbers])
        except (TypeError, ValueError) as error:
            raise ArgumentError(name, f"is not a number but {value!r}", "Give a number or a schedule") from error
        where = f" at step {step}" if callable(value) else ""
        if not np.all(np.isfinite(flat)):
            raise ArgumentError(name, f"is {flat[~np.isfinite(flat)][0]}{where}", "Give a finite number")
        low = flat.min()
        if low < minimum or (exclusive and low == minimum):
            bound = "greater than" if exclusive else "at least"
            raise ArgumentError(name, f"is {low:g}{where}", f"It must be {bound} {minimum:g}")


@dataclasses.dataclass(frozen=True)
class CouplingSchedule:
    """Fractions of a period: full force until `hold`, falling linearly to none at `end`, draws kept from `keep`."""

    kind: str
    hold: float = 1.0
    end: float = 1.0
    keep: float = 0.0
    period: int | None = None

    def bind(self, warmup: int) -> CouplingSchedule:
        """Fill in what only the run knows."""
        if self.kind != "release" or self.period is not None:
            return self
        if warmup < 1:
            raise ArgumentError(
                "schedule", "release() lets the chains go during the warm-up, but warmup is 0", "Give a warmup"
            )
        return dataclasses.replace(self, period=warmup)

    def factor(self, step: Any) -> Any:
        """Share of the force that acts on the chains at `step`."""
        if self.kind == "hold":
            return 1.0
        phase = step / self.period if self.kind == "release" else (step % self.period) / self.period
        return jnp.clip((self.end - phase) / max(self.end - self.hold, 1e-9), 0.0, 1.0)

    def keeps(self, step: Any) -> Any:
        """Whether the state after `step` steps may be kept as a draw."""
        if self.kind != "cycle":
            return True
        assert self.period is not None
        return ((step - 1) % self.period) >= self.keep * self.period

    @property
    def draws_are_coupled(self) -> bool:
        """Whether kept draws feel the springs."""
        return self.kind == "hold"


def hold() -> CouplingSchedule:
    """Coupled for the whole run, as in the paper."""
    return CouplingSchedule("hold")


def release(hold: float = 0.5, end: float = 0.75, over: int | None = None) -> CouplingSchedule:
    """Explore together, sample apart: let go between the fractions `hold` and `end` of the warm-up (or of `over`).

    The rest of the warm-up is for the chains to widen to the posterior.
    """
    if not 0 <= hold < end <= 1:
        raise ArgumentError("release", f"hold={hold} and end={end}", "They must satisfy 0 <= hold < end <= 1")
    return CouplingSchedule("release", hold, end, period=over)


def cycle(period: int, coupled: float = 0.25, settle: float = 0.25) -> CouplingSchedule:
    """Alternate: coupled for a fraction of each period, then free; draws from after another fraction `settle`."""
    if period < 2:
        raise ArgumentError("period", f"is {period}", "A cycle needs at least 2 steps")
    if not (0 < coupled < 1 and 0 <= settle and coupled + settle < 1):
        raise ArgumentError("cycle", f"coupled={coupled} and settle={settle}", "Their sum must leave room below 1")
    return CouplingSchedule("cycle", coupled, coupled, coupled + settle, period)
