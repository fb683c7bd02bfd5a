"""The methods that are compared on classification, each with the numbers that it is tuned by.

Numbers are those of an optimiser: the learning rate lr = eps^2 N / M, the momentum 1 - eps V / M, and the strength
of a spring, spring = eps^2 alpha / K, which says how far one step pulls a chain towards the centre.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import hookean as hk
from hookean.job import Job
from hookean.preparation import prepare

MOMENTUM = 0.9
Setting = dict[str, float]
"""`lr`, and `spring` (elastic) or `rate` (EASGD, EAMSGD)."""
FINER = {"lr": 1.5, "spring": 2.0, "rate": 1.5}
"""Factors of the second round of a sweep."""


@dataclasses.dataclass(frozen=True)
class Method:
    """One way of sampling with K workers. `every` is s; `grid` is the first round of its sweep."""

    name: str
    chains: int
    grid: tuple[tuple[tuple[str, float], ...], ...]
    every: int = 1

    @property
    def label(self) -> str:
        """Name and s."""
        return self.name if self.name in ("SGHMC", "independent") else f"{self.name}, s = {self.every}"

    @property
    def settings(self) -> list[Setting]:
        """The first round of the sweep."""
        return [dict(setting) for setting in self.grid]

    def finer(self, best: Setting) -> list[Setting]:
        """The second round: the best of the first, and what is next to it in each direction."""
        around = [dict(best)]
        for name, value in best.items():
            top = 1.0 if name == "rate" else math.inf
            around += [{**best, name: min(value * f, top)} for f in (1 / FINER[name], FINER[name])]
        return [setting for i, setting in enumerate(around) if setting not in around[:i]]

    def parts(self, setting: dict[str, Any], num_examples: int, num_steps: int) -> tuple[hk.Dynamics, hk.Coupling]:
        """Dynamics and coupling; the numbers may be traced."""
        step = (setting["lr"] / num_examples) ** 0.5
        dynamics = hk.SGHMC(step, (1 - MOMENTUM) / step)
        match self.name:
            case "SGHMC" | "independent":
                return dynamics, hk.Independent()
            case "stale gradient":
                return dynamics, hk.StaleGradient(every=self.every)
            case "elastic" | "elastic, released":
                return dynamics, hk.Elastic(
                    setting["spring"] * self.chains / step**2,
                    self.every,
                    friction=(1 - MOMENTUM) * self.chains / step,
                    mass=float(self.chains),  # with alpha on it, it swings as fast as a chain does on one spring
                    schedule=hk.hold() if self.name == "elastic" else hk.release(0.4, 0.6, over=num_steps),
                )
            case "EASGD":
                return hk.SGLD(step**2, temperature=0.0), hk.EASGD(setting["rate"], self.every)
            case "EAMSGD":
                return dynamics.replace(temperature=0.0), hk.EAMSGD(setting["rate"], self.every)
        raise ValueError(self.name)

    def job(self, target: hk.Target, init: Callable[[Any], Any], num_steps: int) -> Job:
        """A checked run with the first setting, for `hookean.experiments.follow`."""
        dynamics, coupling = self.parts(self.settings[0], target.num_examples, num_steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hk.HookeanWarning)
            return prepare(target, init, dynamics, coupling, self.chains, num_steps, 0, 1, hk.Vectorised(), 0)

    def vary(self, num_examples: int, num_steps: int) -> Callable[[Job, Any], Job]:
        """The same run with another setting."""

        def vary(job: Job, setting: Any) -> Job:
            dynamics, coupling = self.parts(setting, num_examples, num_steps)
            return dataclasses.replace(job, dynamics=dynamics.bind(0, num_examples), coupling=coupling.bind(0))

        return vary


def _grid(**values: Sequence[float]) -> tuple[tuple[tuple[str, float], ...], ...]:
    return tuple(tuple(zip(values, each, strict=True)) for each in itertools.product(*values.values()))


def all_methods(chains: int, every: Sequence[int], scale: float = 1.0, small: bool = False) -> list[Method]:
    """In the order in which they are worth measuring.

    `scale` multiplies all learning rates of the sweeps; `small` leaves out about half of what they try.
    """

    def rates(*lr: float) -> list[float]:
        return [scale * value for value in lr]

    if small:
        alone, stale = _grid(lr=rates(0.006, 0.02, 0.06)), _grid(lr=rates(0.001, 0.003, 0.01))
        elastic = _grid(lr=rates(0.04, 0.1), spring=(0.01, 0.03))
        easgd, eamsgd = _grid(lr=rates(0.1, 0.3, 1.0), rate=(0.9,)), _grid(lr=rates(0.01, 0.03, 0.1), rate=(0.9,))
    else:
        alone = _grid(lr=rates(0.003, 0.006, 0.012, 0.025, 0.05))
        stale = _grid(lr=rates(0.0005, 0.001, 0.002, 0.004, 0.008))
        elastic = _grid(lr=rates(0.03, 0.06, 0.12), spring=(0.003, 0.01, 0.03))
        easgd = _grid(lr=rates(0.06, 0.12, 0.25, 0.5, 1.0), rate=(0.3, 0.9))
        eamsgd = _grid(lr=rates(0.006, 0.012, 0.025, 0.05, 0.1), rate=(0.3, 0.9))
    middle = 8 if 8 in every else sorted(every)[len(every) // 2]
    order = [middle, *(s for s in (1, 16, 4, 2) if s in every and s != middle)]
    order += [s for s in every if s not in order]
    found = [Method("SGHMC", 1, alone), Method("independent", chains, alone)]
    found.append(Method("elastic", chains, elastic, middle))
    found += [Method("stale gradient", chains, stale, s) for s in (1, middle) if s in every]  # s = 1 comes first:
    found += [Method("elastic, released", chains, elastic, middle)]  # its step is tried with every other s
    found += [Method("EASGD", chains, easgd, middle), Method("EAMSGD", chains, eamsgd, middle)]
    for name, grid in (("elastic", elastic), ("stale gradient", stale)):
        found += [Method(name, chains, grid, s) for s in order[1:]]
    return list(dict.fromkeys(found))
