"""Names shared by every layer: aliases and the errors a user can meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Params = Any
"""A pytree of floating-point arrays."""

Batch = Any
"""A pytree of arrays with a common leading axis, one row per example."""

Scalar = float | jax.Array
Schedule = Callable[[Any], Any]
"""A function step -> value; optax schedules are such functions."""

Scheduled = float | Schedule
"""A hyper-parameter: a number, or a schedule if it changes in time."""


class HookeanError(Exception):
    """Base of all errors that the library raises on purpose."""


class ArgumentError(HookeanError, ValueError):
    """An argument that cannot work. Says which one, what is wrong with it, and the remedy."""

    def __init__(self, argument: str, problem: str, remedy: str) -> None:
        """Compose the message out of the three."""
        super().__init__(f"{argument}: {problem}. {remedy}.")
        self.argument = argument


class DivergenceError(HookeanError, FloatingPointError):
    """A chain turned NaN or Inf. `run` holds the draws kept until then."""

    def __init__(self, message: str, chain: int | None, step: int, leaf: str | None) -> None:
        """Keep chain, step and leaf beside the message, for programs that react to them."""
        super().__init__(message)
        self.chain, self.step, self.leaf = chain, step, leaf
        self.run: Any = None


class HookeanWarning(UserWarning):
    """Something legal that will probably not give what was hoped for."""
