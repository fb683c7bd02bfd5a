"""Watch a run in TensorBoard (the extra `tensorboard`): `hk.sample(..., callbacks=[TensorBoard("logs/first")])`."""

from __future__ import annotations

import math
import os
import time
from typing import Any

from hookean.recorder import Window
from hookean.types import HookeanError

SECONDS_BETWEEN_COUNTS = 1.0


class TensorBoard:
    """A callback that writes what TensorBoard shows.

    `potential/chain_0` and `temperature/chain_0` stand at the chain's own step. `counts/...` (exchanges, faults, bytes,
    goodput) are of all chains together, and stand at the mean step of the chains seen so far, once a second.
    """

    def __init__(self, logdir: str | os.PathLike[str]) -> None:
        """Write below the folder `logdir`."""
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise HookeanError(
                "TensorBoard: tensorboardX is not installed. Install hookean with its extra `tensorboard`."
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(logdir))
        self._steps: dict[int, int] = {}
        self._counted = -math.inf

    def __call__(self, window: Window) -> None:
        """Write what a chain says at the end of a window."""
        self._steps[window.chain] = window.step
        for name in ("potential", "temperature"):
            value = getattr(window, name)
            if math.isfinite(value):
                self._writer.add_scalar(f"{name}/chain_{window.chain}", value, window.step)
        if time.monotonic() - self._counted >= SECONDS_BETWEEN_COUNTS:
            self._counted = time.monotonic()
            self._count(window)

    def _count(self, window: Window) -> None:
        step = sum(self._steps.values()) // len(self._steps)
        for name, value in window.run.telemetry.facts().items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"counts/{name}", value, step)

    def close(self) -> None:
        """Write what waits; TensorBoard sees most of it before."""
        self._writer.close()
