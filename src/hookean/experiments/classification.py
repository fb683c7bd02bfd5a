"""What the experiments on pictures share: the sweep, and learning curves over seeds.

Honesty is in the order of things. Each method is tuned by the same sweep, coarse and then fine, on examples held out of
the training set; SGHMC by its NLL at the end, the others by their time to that NLL. Then each is run anew with other
seeds on all training examples and judged on the test set. SGHMC is run with all steps of its sweep, and whatever is
compared with it is compared with the best of these at each level, which is more than a user could know beforehand.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hookean as hk
from hookean.experiments.follow import Followed, Follower
from hookean.experiments.methods import Method, Setting
from hookean.experiments.report import Report, Row
from hookean.experiments.speed import time_to
from hookean.types import Params

Say = Callable[[str], None]
SAME_STEP = "the best step of s = 1"
SWEEP_SEED, SEED = 1000, 0
"""First seeds of the sweep and of the runs that are reported: they have none in common."""
BLOCK = 2000
"""Test examples that are worked on at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Data and network. `tuning` has the held-out examples replaced by others, so that N and all shapes stay."""

    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, jax.Array], jax.Array]
    log_prior: Callable[[Params], jax.Array]
    train: tuple[np.ndarray, np.ndarray]
    tuning: tuple[np.ndarray, np.ndarray]
    held_out: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    batch_size: int
    prepare: Callable[[jax.Array], jax.Array]

    @classmethod
    def split(cls, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], **others: Any) -> Task:
        """Hold out as many examples as the test set has, or a sixth; the first ones of the rest stand in for them."""
        count = len(train[1])
        held = min(len(test[1]), count // 6)
        stand_in = tuple(np.concatenate([part[: count - held], part[:held]]) for part in train)
        held_out = tuple(part[count - held :] for part in train)
        return cls(train=train, tuning=stand_in, held_out=held_out, test=test, **others)  # type: ignore[arg-type]

    def log_likelihood(self, params: Params, batch: Any) -> jax.Array:
        """Of each example."""
        x, labels = batch
        return _of_labels(jax.nn.log_softmax(self.apply(params, self.prepare(x))), labels)

    def target(self) -> hk.Target:
        """The posterior of all training examples."""
        return hk.Target(self.log_likelihood, self.log_prior, data=self.train, batch_size=self.batch_size)

    def look(self, params: Params, given: Any) -> Row:
        """Log-probability of each label, and how many classes are right."""

        def block(part: Any) -> Row:
            x, labels = part
            log_p = jax.nn.log_softmax(self.apply(params, self.prepare(x)))
            return {"log_p": _of_labels(log_p, labels), "right": jnp.mean(jnp.argmax(log_p, -1) == labels)}

        count = len(given[1])
        size = max(size for size in range(1, min(BLOCK, count) + 1) if count % size == 0)
        seen = jax.lax.map(block, tuple(part.reshape(-1, size, *part.shape[1:]) for part in given))
        return {"log_p": seen["log_p"].reshape(-1), "right": jnp.mean(seen["right"])}


def _of_labels(log_p: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(log_p, labels[:, None], 1)[:, 0]


class Curves(NamedTuple):
    """NLL after each look: arrays [look, run]."""

    single: np.ndarray
    ensemble: np.ndarray
    average: np.ndarray
    accuracy: np.ndarray


def look_steps(settings: Row) -> list[int]:
    """About as many as wanted, evenly spread; multiples of 8 where that can be, so that exchanges fall on them."""
    num_steps = int(settings["steps"])
    between = max(1, round(num_steps / int(settings["looks"])))
    between = max(8, between // 8 * 8) if num_steps >= 8 * 8 else between
    return list(range(between, num_steps + 1, between))


def nll_of_states(log_p: np.ndarray) -> np.ndarray:
    """Mean over chains and examples; `log_p` is [..., chain, example]."""
    return -log_p.mean((-1, -2))


def nll_of_ensemble(log_p: np.ndarray) -> np.ndarray:
    """Of the chains' mean probabilities."""
    with np.errstate(invalid="ignore"):  # of chains that broke
        return -np.mean(np.logaddexp.reduce(log_p, -2) - np.log(log_p.shape[-2]), -1)


def curves_of(found: Followed) -> Curves:
    """`average` is over all states seen in the second half of the run so far. NaN from where a run broke."""
    log_p = found.seen["log_p"]  # [look, run, chain, example]
    looks, runs = log_p.shape[:2]
    average = np.empty((looks, runs))
    for run in range(runs):  # one at a time, for memory
        summed = np.cumsum(np.exp(log_p[:, run].astype(float)).mean(1), 0)
        for now, step in enumerate(found.steps):
            before = int(np.sum(found.steps <= step / 2))
            total = summed[now] - (summed[before - 1] if before else 0)
            average[now, run] = -np.mean(np.log(np.maximum(total / (now + 1 - before), 1e-38)))
    curves = Curves(nll_of_states(log_p), nll_of_ensemble(log_p), average, found.seen["right"].mean(2))
    broken = (found.broken >= 0) & (found.steps[:, None] > found.broken)
    return Curves(*(np.where(broken, np.nan, part) for part in curves))


# -- sweep and runs ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Clock:
    """How much time is left; methods that would begin after the end are left out, and said so."""

    minutes: float | None
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        """Whether to begin nothing more."""
        return self.minutes is not None and time.monotonic() - self.began > 60 * self.minutes


def measure(report: Report, task: Task, methods: Sequence[Method], clock: Clock, say: Say) -> dict[str, Runs]:
    """Tables sweep, tuned and curves. What a folder has already is not done again. Gives the compiled programs."""
    compiled: dict[str, Runs] = {}
    target = task.target()
    done = {row["method"] for row in report.rows("curves")}
    left_out = []
    for method in methods:
        if method.label in done:
            continue
        if clock.is_over:
            left_out.append(method.label)
            continue
        began = time.monotonic()
        compiled[method.label] = runs = Runs(report, task, target, method)
        chosen = runs.sweep(_level(report))
        report.append("tuned", [_tuned_row(method, role, setting) for role, setting in chosen.items()])
        for role, setting in _also(report, method).items():
            chosen.setdefault(role, setting)
        runs.repeat(chosen)
        say(f"{method.label}: {time.monotonic() - began:.0f} s")
    if left_out:
        report.note(f"Left out, for the time was up: {'; '.join(left_out)}.")
    return compiled


class Runs:
    """The runs of one method: one compiled program."""

    def __init__(self, report: Report, task: Task, target: hk.Target, method: Method) -> None:
        """Nothing is compiled yet."""
        self.report, self.task, self.method = report, task, method
        self.width = 0
        num_steps = int(report.settings["steps"])
        vary = method.vary(target.num_examples, num_steps)
        job = method.job(target, task.init, num_steps)
        self.follower = Follower(job, task.init, task.look, look_steps(report.settings), vary)

    def sweep(self, level: float | None) -> dict[str, Setting]:
        """One round or two on held-out examples; what is chosen, by role."""
        rounds, seeds, until = (int(self.report.settings[name]) for name in ("rounds", "sweep_seeds", "sweep_steps"))
        tried: dict[str, list[tuple[Setting, Curves]]] = {}
        settings = self.method.settings
        for number in range(1, rounds + 1):
            pairs = [(setting, SWEEP_SEED + seed) for setting in settings for seed in range(seeds)]
            found = self._follow(pairs, self.task.tuning, self.task.held_out, until)
            self.report.append(
                "sweep", _rows(self.method, pairs, found, {"round": number}, self.steps[: len(found.single)])
            )
            for index, (setting, _) in enumerate(pairs):
                one = Curves(*(part[:, index] for part in found))
                tried.setdefault(repr(setting), []).append((setting, one))
            if number < rounds:
                settings = self.method.finer(self._best(tried, level, "single"))
        chosen = {"tuned": self._best(tried, level, "single")}
        if self.method.name == "SGHMC":
            everything = [each[0][0] for each in tried.values()]
            chosen |= {f"also lr = {s['lr']:.4g}": s for s in everything if s != chosen["tuned"]}
        elif self.method.name == "independent":
            chosen["tuned for its ensemble"] = self._best(tried, level, "ensemble")
        return chosen

    def _best(self, tried: dict[str, list[tuple[Setting, Curves]]], level: float | None, by: str) -> Setting:
        """Least NLL at the end; or, with a level, least time to it. Settings that break come last."""

        def rank(each: list[tuple[Setting, Curves]]) -> tuple[bool, float, float]:
            curves = np.stack([getattr(one, by) for _, one in each])
            last = float(np.nan_to_num(curves[:, -1].mean(), nan=np.inf))
            if level is None or not np.isfinite(last):
                return not np.isfinite(last), 0.0, last
            return False, float(np.mean([time_to(curve, self.steps, level) for curve in curves])), last

        return min(tried.values(), key=rank)[0][0]

    def repeat(self, chosen: dict[str, Setting]) -> None:
        """The chosen settings with fresh seeds, on all training examples, seen on the test set."""
        seeds = int(self.report.settings["seeds"])
        pairs = [(setting, SEED + seed) for setting in chosen.values() for seed in range(seeds)]
        roles = [role for role in chosen for _ in range(seeds)]
        found = self._follow(pairs, self.task.train, self.task.test)
        self.report.append("curves", _rows(self.method, pairs, found, {"role": roles}, self.steps))

    @property
    def steps(self) -> np.ndarray:
        """When it is looked."""
        return np.asarray(self.follower.steps)

    def _follow(self, pairs: Sequence[tuple[Setting, int]], data: Any, given: Any, until: int | None = None) -> Curves:
        """Curves of many runs, in sets of one size that the first call decides, filled up with repetitions."""
        found = [curves_of(each) for each in self._sets(pairs, data, given, until)]
        return Curves(*(np.concatenate(parts, 1)[:, : len(pairs)] for parts in zip(*found, strict=True)))

    def test(self, setting: Setting, seeds: Sequence[int]) -> np.ndarray:
        """Log-probabilities of the test labels [look, run, chain, example]."""
        pairs = [(setting, seed) for seed in seeds]
        found = [each.seen["log_p"] for each in self._sets(pairs, self.task.train, self.task.test)]
        return np.concatenate(found, 1)[:, : len(pairs)]

    def _sets(
        self, pairs: Sequence[tuple[Setting, int]], data: Any, given: Any, until: int | None = None
    ) -> Iterator[Followed]:
        self.width = self.width or len(pairs)
        data, given = jax.device_put((data, given))
        for begin in range(0, len(pairs), self.width):
            some = [pairs[i % len(pairs)] for i in range(begin, begin + self.width)]
            settings = {name: np.array([setting[name] for setting, _ in some], np.float32) for name in some[0][0]}
            yield self.follower([seed for _, seed in some], settings, data, given, until)


def _level(report: Report) -> float | None:
    """NLL of the best SGHMC of the sweep at the end, on held-out examples; None before there is one."""
    rows = [row for row in report.rows("sweep") if row["method"] == "SGHMC"]
    if not rows:
        return None
    last = max(row["step"] for row in rows)
    by_lr: dict[float, list[float]] = {}
    for row in rows:
        if row["step"] == last:
            by_lr.setdefault(row["lr"], []).append(float(row["single"]))
    return min(float(np.nan_to_num(np.mean(each), nan=np.inf)) for each in by_lr.values())


def _also(report: Report, method: Method) -> dict[str, Setting]:
    """A stale-gradient method is run at the step that is best for s = 1, too, if that is known."""
    if method.name != "stale gradient" or method.every == 1:
        return {}
    known = [r for r in report.rows("tuned") if r["method"] == "stale gradient, s = 1" and r["role"] == "tuned"]
    return {SAME_STEP: {"lr": float(known[-1]["lr"])}} if known else {}


def _tuned_row(method: Method, role: str, setting: Setting) -> Row:
    return {"method": method.label, "role": role, **_numbers(setting)}


def _numbers(setting: Setting) -> Row:
    return {name: setting.get(name, "") for name in ("lr", "spring", "rate")}


def _rows(
    method: Method, pairs: Sequence[tuple[Setting, int]], curves: Curves, others: Row, steps: np.ndarray
) -> Iterable[Row]:
    for index, (setting, seed) in enumerate(pairs):
        own = {name: value[index] if isinstance(value, list) else value for name, value in others.items()}
        for look, step in enumerate(steps):
            yield {
                "method": method.label,
                **own,
                **_numbers(setting),
                "seed": seed,
                "step": int(step),
                **{name: float(getattr(curves, name)[look, index]) for name in Curves._fields},
            }
