"""What a run's machinery did: exchanges, faults, and where the time went. Counted beside the draws, never in them."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

BINS = 24
"""Staleness 0, 1, 2-3, 4-7, ...: bin b > 0 holds what needs b binary digits. The last takes all that is longer."""


@dataclasses.dataclass
class Telemetry:
    """Counts of a run so far, all chains together.

    Attributes:
        steps: steps that count, each once.
        redone: steps that were taken again, because a worker fell back.
        exchanges: reports that the centre applied.
        duplicates: reports that it had already applied, answered again.
        fenced: messages of a worker's earlier life, ignored.
        refused: reports with NaN or Inf.
        rolled_back: versions of the centre that were forgotten when it was rebuilt.
        resyncs: workers told to join again, for the centre was not the one they knew.
        lost: requests or answers that did not arrive.
        restarts: workers that raised and were started again.
        evictions: workers that left the mean because they were silent.
        rebuilds: times the centre raised and was rebuilt.
        bytes: of reports and answers, both ways.
        stepping: seconds that workers spent in compiled windows.
        exchanging: seconds that workers spent on exchanges, waiting for the centre included.
        waiting: seconds that workers spent until what they had kept was taken from them.
        staleness: how many steps ago the copy of the centre had been asked for at the end of a window, as a histogram.
    """

    steps: int = 0
    redone: int = 0
    exchanges: int = 0
    duplicates: int = 0
    fenced: int = 0
    refused: int = 0
    rolled_back: int = 0
    resyncs: int = 0
    lost: int = 0
    restarts: int = 0
    evictions: int = 0
    rebuilds: int = 0
    bytes: int = 0
    stepping: float = 0.0
    exchanging: float = 0.0
    waiting: float = 0.0
    staleness: list[int] = dataclasses.field(default_factory=lambda: [0] * BINS)

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Self:
        """The counts that `facts` gave."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in facts.items() if name in names})

    @property
    def goodput(self) -> float:
        """Steps done over the steps that the same work would have done without faults."""
        return self.steps / max(self.steps + self.redone, 1)

    def aged(self, steps: int, times: int = 1) -> None:
        """Count a staleness of `steps`, `times` times."""
        self.staleness[min(max(int(steps), 0).bit_length(), BINS - 1)] += times

    def facts(self) -> dict[str, Any]:
        """All counts and the goodput, as plain values."""
        return {**dataclasses.asdict(self), "goodput": self.goodput}

    def faults(self) -> dict[str, int]:
        """What went wrong, by name; only what did."""
        names = (
            "lost",
            "duplicates",
            "fenced",
            "refused",
            "resyncs",
            "rolled_back",
            "rebuilds",
            "restarts",
            "evictions",
        )
        return {name: getattr(self, name) for name in names if getattr(self, name)}


def histogram(counts: list[int], width: int = 30) -> list[str]:
    """A staleness histogram as lines of text, from the first to the last bin that is not empty."""
    last = max((i for i, count in enumerate(counts) if count), default=-1)
    first = next((i for i, count in enumerate(counts) if count), 0)
    lines, total, most = [], max(sum(counts), 1), max([*counts, 1])
    for i in range(first, last + 1):
        low, high = (0, 0) if i == 0 else (2 ** (i - 1), 2**i - 1)
        label = f"{low}" if low == high else f"{low}-{high}"
        lines.append(f"{label:>11}  {counts[i] / total:6.1%}  {'#' * round(width * counts[i] / most)}".rstrip())
    return lines
