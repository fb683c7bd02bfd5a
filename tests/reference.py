"""The samplers once more, in plain NumPy and float64, written from the equations and not from the library.

A `System` holds workers, centre and messages under way as arrays [coordinate, column] and executes a log, event by
event, without leaps, keys, pytrees or compilation. Columns are whatever the caller makes of them:

trajectory  one column, no noise: what a run at temperature 0 must reproduce to rounding;
law         one column for each number that chance draws. The rules are affine in these numbers, so that the columns of
            the final state are its derivatives J with respect to them, and the covariance is J J^T, exactly;
replicas    many columns with noise of their own, for rules that are not affine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

import hookean as hk
from hookean.exchange import Event, Kind

Start = tuple[float, float] | list[np.ndarray]
"""Mean and standard deviation of where every coordinate starts, or the starts themselves, one array a chain."""


def value(setting: Any, step: int) -> float:
    return float(setting(step)) if callable(setting) else float(setting)


# -- where randomness comes from ---------------------------------------------------------------------------------------


class Silence:
    """No noise."""

    def __init__(self, columns: int = 1) -> None:
        self.columns = columns

    def normal(self, size: int) -> np.ndarray:
        return np.zeros((size, self.columns))

    signs = normal


class Counting(Silence):
    """Silence that counts what was asked for."""

    count = 0

    def normal(self, size: int) -> np.ndarray:
        self.count += size
        return super().normal(size)


class Derivatives:
    """Every number drawn is a unit vector of its own."""

    def __init__(self, columns: int) -> None:
        self.columns, self.used = columns, 0

    def normal(self, size: int) -> np.ndarray:
        unit = np.zeros((size, self.columns))
        unit[np.arange(size), self.used + np.arange(size)] = 1.0
        self.used += size
        return unit


class Replicas:
    """Noise for many independent copies of everything."""

    def __init__(self, columns: int, seed: int) -> None:
        self.columns, self.generator = columns, np.random.default_rng(seed)

    def normal(self, size: int) -> np.ndarray:
        return self.generator.standard_normal((size, self.columns))

    def signs(self, size: int) -> np.ndarray:
        return self.generator.choice([-1.0, 1.0], (size, self.columns))


# -- dynamics ----------------------------------------------------------------------------------------------------------
# start(d, x, chance, T) -> state; step(d, s, gradient, hessian, chance, t, T) -> state; every setting read from `d`.


def sgld_step(d: Any, s: Any, g: np.ndarray, hessian: Any, chance: Any, t: int, T: float) -> Any:
    eps = value(d.step_size, t)
    return SimpleNamespace(x=s.x - eps * g + np.sqrt(2 * eps * T) * chance.normal(len(s.x)))


def with_momentum(variance: Callable[[Any], float]) -> Callable[..., Any]:
    def start(d: Any, x: np.ndarray, chance: Any, T: float) -> Any:
        return SimpleNamespace(x=x, p=np.sqrt(variance(d) * T) * chance.normal(len(x)))

    return start


def sghmc_step(d: Any, s: Any, g: np.ndarray, hessian: Any, chance: Any, t: int, T: float) -> Any:
    eps, V, M, n = value(d.step_size, t), value(d.friction, t), float(d.mass), len(s.x)
    if d.integrator == "obabo":
        p = s.p - eps / 2 * g
        if t % d.refresh_every == 0:
            decay = np.exp(-V * eps * d.refresh_every / M)
            p = decay * p + np.sqrt(M * T * (1 - decay**2)) * chance.normal(n)
        p = p - eps / 2 * g
        return SimpleNamespace(x=s.x + eps * p / M, p=p)
    noise = np.sqrt(max(2 * eps * T * V - eps**2 * float(d.noise_estimate), 0)) * chance.normal(n)
    p = s.p - eps * g - eps * V * s.p / M + noise
    return SimpleNamespace(x=s.x + eps * (s.p if d.integrator == "explicit" else p) / M, p=p)


def scale_adapted_step(d: Any, s: Any, g: np.ndarray, hessian: Any, chance: Any, t: int, T: float) -> Any:
    assert d.adapt_steps == 0  # frozen at v = 1
    eps, decay, M = value(d.step_size, t), d.momentum_decay, 1.0 + d.damping
    p = (1 - decay) * s.p - eps * g + np.sqrt(2 * decay * M * T) * chance.normal(len(s.x))
    return SimpleNamespace(x=s.x + eps * p / M, p=p)


def sgnht_start(d: Any, x: np.ndarray, chance: Any, T: float) -> Any:
    s = with_momentum(lambda d: 1.0)(d, x, chance, T)
    s.xi = np.full(x.shape[1], value(d.friction, 0))
    return s


def sgnht_step(d: Any, s: Any, g: np.ndarray, hessian: Any, chance: Any, t: int, T: float) -> Any:
    eps, A = value(d.step_size, t), value(d.friction, t)
    p = s.p - eps * g - eps * s.xi * s.p + np.sqrt(2 * eps * A * T) * chance.normal(len(s.x))
    return SimpleNamespace(x=s.x + eps * p, p=p, xi=s.xi + eps * (np.mean(p**2, 0) - T) / d.inertia)


def psgld_start(d: Any, x: np.ndarray, chance: Any, T: float) -> Any:
    return SimpleNamespace(x=x, v=np.ones_like(x))


def psgld_step(d: Any, s: Any, g: np.ndarray, hessian: Any, chance: Any, t: int, T: float) -> Any:
    eps, a = value(d.step_size, t), d.decay
    v = a * s.v + (1 - a) * (g / d.scale) ** 2
    G = 1 / (d.damping + np.sqrt(v))
    Gamma = 0.0
    if d.gamma:
        signs = chance.signs(len(s.x))
        diagonal = signs * (hessian @ signs)
        Gamma = -(G**2) * (1 - a) * (g / d.scale) * (diagonal / d.scale) / np.sqrt(np.maximum(v, np.finfo(float).tiny))
    x = s.x - eps * (G * g - T * Gamma) + np.sqrt(2 * eps * T * G) * chance.normal(len(s.x))
    return SimpleNamespace(x=x, v=v)


@dataclasses.dataclass(frozen=True)
class Rule:
    start: Callable[..., Any]
    step: Callable[..., Any]
    affine: bool = True


RULES: dict[type, Rule] = {
    hk.SGLD: Rule(lambda d, x, chance, T: SimpleNamespace(x=x), sgld_step),
    hk.SGHMC: Rule(with_momentum(lambda d: float(d.mass)), sghmc_step),
    hk.ScaleAdaptedSGHMC: Rule(with_momentum(lambda d: 1.0), scale_adapted_step),
    hk.SGNHT: Rule(sgnht_start, sgnht_step, affine=False),
    hk.PSGLD: Rule(psgld_start, psgld_step, affine=False),
}


# -- the system --------------------------------------------------------------------------------------------------------


class System:
    """K workers on U(x) = x.A x / 2, a centre or a server, and a log to execute."""

    def __init__(
        self, dynamics: Any, coupling: Any, precision: np.ndarray, chains: int, chance: Any, start: Start
    ) -> None:
        self.d, self.coupling, self.A, self.K, self.chance = dynamics, coupling, precision, chains, chance
        self.rule, self.n = RULES[type(dynamics)], len(precision)
        self.affine_part = not isinstance(chance, Derivatives)  # derivatives know no constants
        self.kind = type(coupling)
        self.live = np.ones(chains, bool)
        self.steps = [0] * chains
        if isinstance(start, list):
            x = start
        else:
            x = [self.constant(start[0]) + start[1] * chance.normal(self.n) for _ in range(chains)]
        self.credit = self.clock = self.version = 0
        self.boxes: dict[int, Any] = {}
        self.late: dict[tuple[int, int, int], Any] = {}
        self.answers: list[Any] = [None] * chains
        self.told: dict[tuple[int, int], Any] = {}
        self.generation = 0
        self.written: dict[str, Any] = {}
        self.draws: dict[tuple[int, int], np.ndarray] = {}
        if self.kind is hk.StaleGradient:
            self.server = self.rule.start(dynamics, x[0], chance, self.temperature(0))
            self.waiting: list[np.ndarray] = []
            self.workers: list[Any] = [None] * chains
        else:
            self.workers = [self.rule.start(dynamics, one, chance, self.temperature(0)) for one in x]
            self.positions = x
            if self.kind is not hk.Independent:
                self.cd = self.centre_dynamics()
                self.centre = self.rule.start(self.cd, np.mean(x, 0), chance, self.centre_temperature(0))
        self.copies = [self.copy()] * chains
        self.saved = [(w, c, 0) for w, c in zip(self.workers, self.copies, strict=True)]

    def constant(self, number: float) -> np.ndarray:
        return np.full((self.n, self.chance.columns), number if self.affine_part else 0.0)

    @property
    def num_live(self) -> int:
        return int(self.live.sum())

    def copy(self) -> Any:
        if self.kind is hk.Independent:
            return None
        position = self.server.x if self.kind is hk.StaleGradient else self.centre.x
        return SimpleNamespace(x=position, live=self.num_live, version=self.version, fresh=True)

    # Eq. 6 as printed differs in the noise, which is a matter of temperature, and in the strength of the springs.

    def temperature(self, t: int) -> float:
        T = value(self.d.temperature, t)
        if self.kind is hk.ElasticAsPrinted and self.coupling.noise != "chain":
            V, C = value(self.d.friction, t), value(self.centre_dynamics().friction, t)
            T *= (V + C) / V * (value(self.d.step_size, t) if self.coupling.noise == "printed" else 1.0)
        return T

    def centre_temperature(self, t: int) -> float:
        T = value(self.d.temperature, t)
        return T * value(self.d.step_size, t) if getattr(self.coupling, "noise", "") == "printed" else T

    def centre_dynamics(self) -> Any:
        changes = {name: getattr(self.coupling, name, None) for name in ("friction", "mass")}
        if isinstance(self.d, hk.PSGLD):
            changes["scale"] = 1.0
        return dataclasses.replace(self.d, **{k: v for k, v in changes.items() if v is not None})

    # -- events

    def execute(self, log: list[Event]) -> System:
        for event in log:
            getattr(self, event.kind.name.lower())(event)
            if event.version >= 0 and event.kind is not Kind.ADOPT and self.kind is not hk.Independent:
                self.told[self.generation, event.version] = self.copy()
            if event.draw >= 0:
                owner = 0 if self.kind is hk.StaleGradient else event.worker
                self.draws[owner, event.draw] = (
                    self.server.x if self.kind is hk.StaleGradient else self.workers[owner].x
                )
        return self

    def run(self, event: Event) -> None:
        i = event.worker
        for _ in range(event.steps):
            t, copy = self.steps[i], self.copies[i]
            if self.kind is hk.StaleGradient:
                self.workers[i] = self.A @ copy.x
            else:
                s = self.workers[i]
                gradient, hessian, pull = self.A @ s.x, self.A, 0.0
                if issubclass(self.kind, hk.Elastic):
                    strength = value(self.coupling.alpha, t) * float(self.coupling.schedule.factor(t))
                    if self.kind is hk.Elastic:
                        strength /= copy.live
                    gradient = gradient + strength * (s.x - copy.x)
                    hessian = hessian + strength * np.eye(self.n)
                if isinstance(self.coupling, hk.EASGD) and copy.fresh:
                    pull = value(self.coupling.moving_rate, t) / copy.live * (s.x - copy.x)
                    self.copies[i] = SimpleNamespace(**{**vars(copy), "fresh": False})
                new = self.rule.step(self.d, s, gradient, hessian, self.chance, t, self.temperature(t))
                new.x = new.x - pull
                self.workers[i] = new
            self.steps[i] += 1

    def message(self, i: int) -> Any:
        payload = self.workers[i] if self.kind is hk.StaleGradient else self.workers[i].x
        return SimpleNamespace(payload=payload, base=None if self.copies[i] is None else self.copies[i].version)

    def send(self, event: Event) -> None:
        self.boxes[event.box] = self.message(event.worker)
        if event.box < 0:  # given up, and perhaps taken later
            self.late[event.worker, event.incarnation, event.seq] = self.boxes[event.box]
        self.saved[event.worker] = (self.workers[event.worker], self.copies[event.worker], self.steps[event.worker])

    def receive(self, event: Event) -> None:
        i, payload = event.worker, self.boxes[event.box].payload
        steps = event.steps if self.live[i] else 0  # who did not count has no new steps
        self.count(i, True)
        if self.kind is hk.StaleGradient:
            self.gradient(payload)
            self.boxes[event.box] = self.copy()
        elif isinstance(self.coupling, hk.EASGD):
            self.positions[i] = payload
            self.boxes[event.box] = self.copy()
            rate = value(self.coupling.moving_rate, self.clock) / self.num_live
            self.centre = SimpleNamespace(
                **{**vars(self.centre), "x": self.centre.x + rate * (payload - self.centre.x)}
            )
            self.earn(steps)
        else:
            old = self.mean()
            self.positions[i] = payload
            self.advance_centre(old if self.coupling.simultaneous else self.mean(), self.earn(steps))
            self.boxes[event.box] = self.copy()

    def report(self, event: Event) -> None:
        """As it stands, without a letter box; or as it stood when the worker gave it up."""
        which = event.worker, event.incarnation, event.seq
        self.boxes[-1] = self.late[which] if which in self.late else self.message(event.worker)
        self.receive(event)
        self.answers[event.worker] = self.boxes[-1]

    WRITTEN = ("centre", "positions", "live", "credit", "clock", "version", "server", "waiting")

    def snapshot(self, event: Event) -> None:
        here = {name: vars(self)[name] for name in self.WRITTEN if name in vars(self)}
        self.written = {name: x.copy() if isinstance(x, list | np.ndarray) else x for name, x in here.items()}

    def rebuild(self, event: Event) -> None:
        here = {name: x.copy() if isinstance(x, list | np.ndarray) else x for name, x in self.written.items()}
        vars(self).update(here)
        self.generation = event.seq

    def barrier(self, event: Event) -> None:
        reporters = [i for i in range(self.K) if self.live[i]]
        if self.kind is hk.StaleGradient:
            for i in reporters:
                self.gradient(self.workers[i])
            self.answer = self.copy()
            return
        old = self.mean()
        for i in range(self.K):
            self.positions[i] = self.workers[i].x
        if isinstance(self.coupling, hk.EASGD):
            self.answer = self.copy()
            rate = value(self.coupling.moving_rate, self.clock)
            moved = self.centre.x + rate * (self.mean() - self.centre.x)
            self.centre = SimpleNamespace(**{**vars(self.centre), "x": moved})
            self.earn(event.steps * len(reporters))
            return
        self.advance_centre(old if self.coupling.simultaneous else self.mean(), self.earn(event.steps * len(reporters)))
        self.answer = self.copy()

    def refresh(self, event: Event) -> None:
        for i in range(self.K):
            if self.live[i]:
                self.copies[i] = self.answer

    def adopt(self, event: Event) -> None:
        given = {-1: self.answers[event.worker], -2: self.told.get((event.seq, event.version))}
        self.copies[event.worker] = given[event.box] if event.box < 0 else self.boxes[event.box]

    def leave(self, event: Event) -> None:
        self.count(event.worker, False)

    def join(self, event: Event) -> None:
        i = event.worker
        self.count(i, True)
        if self.kind is not hk.StaleGradient:
            self.positions[i] = self.workers[i].x
        self.copies[i] = self.copy()

    def restore(self, event: Event) -> None:
        i = event.worker
        self.workers[i], self.copies[i], self.steps[i] = self.saved[i]

    # -- centre and server

    def mean(self) -> np.ndarray:
        return np.mean([x for x, live in zip(self.positions, self.live, strict=True) if live], 0)

    def count(self, worker: int, counts: bool) -> None:
        """Part of a step of the centre stays the same part, rounded down, whoever comes and goes."""
        before = max(self.num_live, 1)
        self.live[worker] = counts
        self.credit = self.credit * self.num_live // before

    def earn(self, steps: int) -> int:
        self.credit += steps
        whole = self.credit // self.num_live
        if isinstance(self.coupling, hk.Elastic) and whole < (self.coupling.leap or self.coupling.every):
            whole = 0
        self.credit -= whole * self.num_live
        if isinstance(self.coupling, hk.EASGD):
            self.clock += whole
        return whole

    def advance_centre(self, mean: np.ndarray, steps: int) -> None:
        for _ in range(steps):
            alpha = value(self.coupling.alpha, self.clock)
            T = self.centre_temperature(self.clock)
            gradient, hessian = alpha * (self.centre.x - mean), alpha * np.eye(self.n)
            self.centre = self.rule.step(self.cd, self.centre, gradient, hessian, self.chance, self.clock, T)
            self.clock += 1

    def gradient(self, gradient: np.ndarray) -> None:
        self.waiting.append(gradient)
        if len(self.waiting) == self.coupling.wait_for:
            mean = np.mean(self.waiting, 0)
            self.server = self.rule.step(
                self.d, self.server, mean, self.A, self.chance, self.version, self.temperature(self.version)
            )
            self.waiting, self.version = [], self.version + 1


# -- what is asked of it -----------------------------------------------------------------------------------------------


def barrier_log(coupling: Any, chains: int, num_steps: int, kept: list[int]) -> list[Event]:
    """All workers in step, exchanging together: written out, one step at a time."""
    log, draw_of = [], {step: i for i, step in enumerate(kept)}
    served = isinstance(coupling, hk.StaleGradient)
    for step in range(1, num_steps + 1):
        due = draw_of.get(step, -1)
        log += [Event(Kind.RUN, i, 1, -1 if served else due) for i in range(chains)]
        if coupling.rhythm is not None and step % coupling.rhythm.report == 0:
            log.append(Event(Kind.BARRIER, steps=coupling.rhythm.report, draw=due if served else -1))
            if step % coupling.rhythm.refresh == 0:
                log.append(Event(Kind.REFRESH))
    return log


def trajectory(
    dynamics: Any, coupling: Any, precision: np.ndarray, chains: int, log: list[Event], start: list[np.ndarray]
) -> System:
    """Without noise."""
    return System(dynamics, coupling, precision, chains, Silence(start[0].shape[1]), start).execute(log)


def law(
    dynamics: Any, coupling: Any, precision: np.ndarray, chains: int, log: list[Event], start: tuple[float, float]
) -> tuple[System, System]:
    """The mean of every draw, and its derivatives with respect to all randomness."""
    counting = Counting()
    mean = System(dynamics, coupling, precision, chains, counting, start).execute(log)
    spread = System(dynamics, coupling, precision, chains, Derivatives(counting.count), start).execute(log)
    return mean, spread


def replicas(
    dynamics: Any,
    coupling: Any,
    precision: np.ndarray,
    chains: int,
    log: list[Event],
    start: tuple[float, float],
    count: int,
    seed: int = 0,
) -> System:
    return System(dynamics, coupling, precision, chains, Replicas(count, seed), start).execute(log)
