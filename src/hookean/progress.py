"""What a person sees of a run while it goes on: a live bar on a terminal, else a line now and then. All on stderr."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from hookean.job import Progress
from hookean.telemetry import Telemetry

SECONDS_BETWEEN_LINES = 10.0
"""Where the output is no terminal."""


class Display:
    """Shows how far a run is: steps per second, time left, potential and temperature."""

    def __init__(self, shown: bool, headline: str, num_steps: int, stream: TextIO | None = None) -> None:
        """`headline` is printed first; with `shown=False` nothing is printed at all."""
        self.shown, self.headline, self.num_steps = shown, headline, num_steps
        self.telemetry = Telemetry()
        """Counts of the run, which goes on counting."""
        self.console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._news: Progress | None = None
        self._first_step = self._first_exchanges = 0
        self._began = self._first = self._last_line = time.perf_counter()

    def __enter__(self) -> Self:
        """Print the headline and start the bar."""
        self._began = self._last_line = time.perf_counter()
        if not self.shown:
            return self
        self.console.print(self.headline, markup=False)
        if self.console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed:,}/{task.total:,}"),
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
        if self._news is None:  # the time until the first news is mostly compilation
            self._first, self._first_step = now, progress.step
            self._first_exchanges = self.telemetry.exchanges
        self._news = progress
        if self._bar is not None:
            note = self._note(progress, now)
            self._bar.update(self._task, description="sampling", completed=progress.step, note=note)
        elif self.shown and now - self._last_line > SECONDS_BETWEEN_LINES and progress.step < self.num_steps:
            self._last_line = now
            pace, note = self._pace(progress.step, now), self._note(progress, now)
            left = f"{(self.num_steps - progress.step) / pace:,.0f} s left" if pace > 0 else ""
            self._say(", ".join(filter(None, (f"step {progress.step:,} of {self.num_steps:,}", note, left))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar; say in one line how it went."""
        if self._bar is not None:
            self._bar.stop()
        if self.shown and error is None and self._news is not None:
            now = time.perf_counter()
            seconds = f"{now - self._began:.1f} s, {self._first - self._began:.1f} s of them to compile"
            note = self._note(self._news, now)
            self._say(f"{self._news.step:,} steps in {seconds}" + (f": {note}" if note else ""))

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False)

    def _pace(self, step: int, now: float) -> float:
        """Steps per second since the first news; 0 while that cannot be said."""
        return (step - self._first_step) / max(now - self._first, 1e-9)

    def _note(self, progress: Progress, now: float) -> str:
        pace = self._pace(progress.step, now)
        words = [f"{pace:,.{0 if pace >= 10 else 2}f} steps/s"] if pace > 0 else []
        exchanged = self.telemetry.exchanges - self._first_exchanges
        if exchanged and pace > 0:
            words.append(f"{exchanged / max(now - self._first, 1e-9):,.0f} exchanges/s")
        for name, value in (
            ("potential", f"{progress.potential:,.4g}"),
            ("temperature", f"{progress.temperature:.3g}"),
        ):
            if math.isfinite(getattr(progress, name)):
                words.append(f"{name} {value}")
        faults = self.telemetry.faults()
        if faults:
            words.append("faults: " + " ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in faults.items()))
        return ", ".join(words)
