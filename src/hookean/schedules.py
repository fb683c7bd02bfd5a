"""Hyper-parameters that change in time, and the three ways a coupling is scheduled.

A *coupling schedule* scales the force that the centre exerts on the chains; the centre itself always follows the
chains at full strength, for a free centre would diffuse away and tear the chains along when coupled again.

`hold()`     coupled for the whole run. Kept draws follow the coupled law, narrower than the posterior.
`release()`  coupled at first, then let go during the warm-up: kept draws have the posterior's own marginals.
`cycle(n)`   every n steps a coupled and a free part; draws are kept from the free part only.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hookean.types import ArgumentError, Schedule, Scheduled, check_count, in_one_line

MOST_STEPS = 100_000
"""Longer schedules are checked at so many of their steps."""
AT_REST = 1e-7
"""Of its largest value, what a schedule is by rounding where it should be 0."""
MOST_AT_REST = 0.01
"""Share of its steps at which a schedule that must be positive may be 0."""


def value_at(value: Scheduled | Any, step: Any) -> Any:
    """The value at `step` of a number or a schedule."""
    return value(step) if callable(value) else value


@dataclasses.dataclass(frozen=True)
class Derived:
    """A schedule computed from settings given under other names: it checks them, so that errors speak of those."""

    value: Schedule
    check: Callable[[int], None]

    def __call__(self, step: Any) -> Any:
        """The value at `step`."""
        return self.value(step)


def check(
    name: str,
    value: Scheduled | Any,
    num_steps: int,
    minimum: float,
    exclusive: bool = False,
    below: float = np.inf,
) -> None:
    """Refuse what is neither a number nor a schedule, or is at some step not finite or too small.

    A schedule that must be positive may touch 0 at one step in a hundred, as warm-ups and annealings do that begin or
    end there.
    """
    if not callable(value):
        numbers = np.ravel(_as_number(name, value, "Give a number or a schedule"))
        _check_numbers(name, numbers, minimum, exclusive, below)
        return
    if isinstance(value, Derived):
        value.check(num_steps)
    steps = np.unique(np.linspace(0, max(num_steps - 1, 0), min(max(num_steps, 1), MOST_STEPS)).astype(np.int32))
    try:
        values = np.asarray(jax.jit(jax.vmap(value))(steps), float)
    except Exception as error:
        raise ArgumentError(
            name,
            f"is a schedule that cannot be compiled ({in_one_line(error)})",
            "Write it as a function step -> number with jax.numpy, jnp.where in place of if; or take one of optax",
        ) from error
    if values.shape != steps.shape:
        raise ArgumentError(name, f"is a schedule that gives shape {values.shape[1:]}", "It must give one number")
    at_rest = exclusive & (np.abs(values - minimum) <= AT_REST * np.max(values))
    moving = ~at_rest
    _check_numbers(name, values[moving], minimum, exclusive, below, steps[moving])
    if np.sum(at_rest) > max(1, MOST_AT_REST * len(values)):
        raise ArgumentError(
            name,
            f"is {minimum:g} at {np.mean(at_rest):.0%} of all steps, first at step {steps[np.argmax(at_rest)]}",
            "Nothing moves there: let the schedule end later, or at more than that",
        )


def check_number(
    name: str, value: Any, minimum: float, exclusive: bool = False, below: float = np.inf, tree: bool = False
) -> None:
    """Refuse what is not one finite number from `minimum` up to `below`, itself excluded; for a tree, of such."""
    remedy = "Give a number" + (", or a pytree of numbers like the parameters" if tree else "")
    if callable(value):
        raise ArgumentError(name, "is a function, but it cannot change in time", remedy)
    leaves = jax.tree.leaves(value) if tree else [value]
    numbers = [np.ravel(_as_number(name, leaf, remedy, scalar=not tree)) for leaf in leaves or [None]]
    _check_numbers(name, np.concatenate(numbers), minimum, exclusive, below)


def _as_number(name: str, value: Any, remedy: str, scalar: bool = True) -> np.ndarray:
    array = np.asarray(value)
    is_number = jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)
    if not is_number or (scalar and array.ndim > 0):
        raise ArgumentError(name, f"is {reprlib.repr(value)}", remedy)
    return array.astype(float)


def _check_numbers(
    name: str, numbers: np.ndarray, minimum: float, exclusive: bool, below: float, steps: np.ndarray | None = None
) -> None:
    def refuse(wrong: np.ndarray, remedy: str) -> None:
        if np.any(wrong):
            first = int(np.argmax(wrong))
            where = "" if steps is None else f" at step {steps[first]}"
            raise ArgumentError(name, f"is {numbers[first]:g}{where}", remedy)

    refuse(~np.isfinite(numbers), "Give a finite number")
    bound = f"It must be {'greater than' if exclusive else 'at least'} {minimum:g}"
    bound += f" and less than {below:g}" if np.isfinite(below) else ""
    refuse((numbers <= minimum if exclusive else numbers < minimum) | (numbers >= below), bound)


@dataclasses.dataclass(frozen=True)
class CouplingSchedule:
    """Fractions of a period: full force until `hold`, falling linearly to none at `end`, draws kept from `keep`."""

    kind: str
    hold: float = 1.0
    end: float = 1.0
    keep: float = 0.0
    period: int | None = None
    warmup: int = 0

    def bind(self, warmup: int) -> CouplingSchedule:
        """Fill in what only the run knows: how long its warm-up is."""
        period = self.period
        if self.kind == "release" and period is None:
            if warmup < 1:
                raise ArgumentError(
                    "schedule", "release() lets the chains go during the warm-up, but warmup is 0", "Give a warmup"
                )
            period = warmup
        return dataclasses.replace(self, period=period, warmup=warmup)

    def factor(self, step: Any) -> Any:
        """Share of the force that acts on the chains at `step`."""
        if self.kind == "hold":
            return 1.0
        assert self.period is not None
        within = step if self.kind == "release" else step % self.period
        phase = jnp.asarray(within, float) / self.period  # of two integers JAX would make a float32 even among float64s
        return jnp.clip((self.end - phase) / max(self.end - self.hold, 1e-9), 0.0, 1.0)

    def keeps(self, step: Any) -> Any:
        """Whether the state after `step` steps may be kept as a draw."""
        if self.kind != "cycle":
            return True
        assert self.period is not None
        return ((step - 1) % self.period) >= self.keep * self.period

    def kept_steps(self, num_steps: int, warmup: int, thin: int) -> np.ndarray:
        """The steps after which a run keeps a draw."""
        steps = np.arange(warmup + thin, num_steps + 1, thin)
        return steps[np.broadcast_to(np.asarray(self.keeps(steps)), steps.shape)]

    @property
    def draws_are_coupled(self) -> bool:
        """Whether kept draws feel the springs: always, or those before the chains are let go."""
        return self.kind == "hold" or (self.kind == "release" and self.end * (self.period or 0) > self.warmup)


def hold() -> CouplingSchedule:
    """Coupled for the whole run, as in the paper."""
    return CouplingSchedule("hold")


def release(hold: float = 0.5, end: float = 0.75, over: int | None = None) -> CouplingSchedule:
    """Explore together, sample apart: let go between the fractions `hold` and `end` of the warm-up (or of `over`).

    The rest of the warm-up is for the chains to widen to the posterior.
    """
    check_number("hold", hold, 0.0)
    check_number("end", end, 0.0)
    if not hold < end <= 1:
        raise ArgumentError("release", f"has hold={hold} and end={end}", "They must satisfy 0 <= hold < end <= 1")
    return CouplingSchedule("release", hold, end, period=None if over is None else check_count("over", over))


def cycle(period: int, coupled: float = 0.25, settle: float = 0.25) -> CouplingSchedule:
    """Alternate: coupled for a fraction of each period, then free; draws from after another fraction `settle`."""
    check_number("coupled", coupled, 0.0, exclusive=True)
    check_number("settle", settle, 0.0)
    if coupled + settle >= 1:
        raise ArgumentError("cycle", f"has coupled={coupled} and settle={settle}", "Their sum must leave room below 1")
    return CouplingSchedule("cycle", coupled, coupled, coupled + settle, check_count("period", period, 2))
