"""What a person sees of a run while it goes on: a live bar on a terminal, else a line now and then. All on stderr."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hookean.job import Progress

SECONDS_BETWEEN_LINES = 10.0
"""Where the output is no terminal."""


class Display:
    """Shows how far a run is: steps per second, time left, potential and temperature."""

    def __init__(self, shown: bool, headline: str, num_steps: int, stream: TextIO | None = None) -> None:
        """`headline` is printed first; with `shown=False` nothing is printed at all."""
        self.shown, self.headline, self.num_steps = shown, headline, num_steps
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._began = self._first = self._last_line = time.perf_counter()
        self._first_step = 0

    def __enter__(self) -> Self:
        """Print the headline and start the bar."""
        self._began = time.perf_counter()
        if not self.shown:
            return self
        self.console.print(self.headline, markup=False)
        if self.console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task("compiling", total=self.num_steps, note="")
            self._bar.start()
        return self

    def update(self, progress: Progress) -> None:
        """Take news from an engine."""
        now = time.perf_counter()
        if self._first_step == 0:  # the time until the first news is mostly compilation
            self._first, self._first_step = now, progress.step
        if not self.shown:
            return
        if self._bar is not None:
            self._bar.update(
                self._task, description="sampling", completed=progress.step, note=self._note(progress, now)
            )
        elif now - self._last_line > SECONDS_BETWEEN_LINES and progress.step < self.num_steps:
            self._last_line = now
            left = self._seconds_left(progress.step, now)
            remaining = f", {left:.0f} s left" if math.isfinite(left) else ""
            self._say(f"step {progress.step:,} of {self.num_steps:,}: {self._note(progress, now)}{remaining}")
        self._news = progress

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar; say in one line how it went."""
        if self._bar is not None:
            self._bar.stop()
        if self.shown and error is None and hasattr(self, "_news"):
            now = time.perf_counter()
            note = self._note(self._news, now)
            self._say(f"{self._news.step:,} steps in {now - self._began:.1f} s: {note}")

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def _pace(self, step: int, now: float) -> float:
        """Steps per second, compilation left out where that is possible."""
        if step > self._first_step:
            return (step - self._first_step) / max(now - self._first, 1e-9)
        return step / max(now - self._began, 1e-9)

    def _seconds_left(self, step: int, now: float) -> float:
        pace = self._pace(step, now)
        return (self.num_steps - step) / pace if pace > 0 else math.inf

    def _note(self, progress: Progress, now: float) -> str:
        words = [f"{self._pace(progress.step, now):,.0f} steps/s", f"potential {progress.potential:,.4g}"]
        if math.isfinite(progress.temperature):
            words.append(f"temperature {progress.temperature:.3g}")
        return ", ".join(words)
