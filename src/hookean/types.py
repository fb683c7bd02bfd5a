"""Names shared by every layer: aliases and the errors a user can meet."""

from __future__ import annotations

import operator
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


class BatchError(HookeanError):
    """The user's own batches failed during a run; the cause is the error there. `run` holds the draws until then."""

    def __init__(self, chain: int, step: int, error: BaseException) -> None:
        """Say for which chain, at which step, and what."""
        what = str(error) if isinstance(error, HookeanError) else f"batches: {in_one_line(error)}."
        super().__init__(f"{what} Chain {chain} wanted a batch for step {step}")
        self.chain, self.step = chain, step
        self.run: Any = None
        self.__cause__ = error


class StoreError(HookeanError):
    """A run on disk that cannot be written or read. Says which part, and what is safe or what to do."""


class StalledError(HookeanError):
    """Nothing moves any more: no worker has finished a window, or had an answer, for longer than it may take."""


class Interrupted(KeyboardInterrupt):
    """A run that was stopped by Ctrl-C, in order: `run` holds its draws."""

    def __init__(self, message: str, run: Any) -> None:
        """Say how to go on."""
        super().__init__(message)
        self.run = run


class HookeanWarning(UserWarning):
    """Something legal that will probably not give what was hoped for."""


def check_count(argument: str, value: Any, least: int = 1, most: int = 2**31 - 1) -> int:
    """`value` as an `int`, whichever library's integer it is; refuses all else, and what is not in [least, most]."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise ArgumentError(argument, f"is {value!r}", f"Give an integer of at least {least}") from None
    if count < least:
        raise ArgumentError(argument, f"is {count}", f"Give an integer of at least {least}")
    if count > most:
        raise ArgumentError(argument, f"is {count}", f"Give an integer of at most {most}")
    return count


def in_one_line(error: BaseException) -> str:
    """Kind and first line of an error, for a message that has the error itself as its cause."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(". :")
