"""What workers and the centre say to each other, and the order in which they say it.

A worker sends a `Report`, the centre answers with a `Copy` of itself. Neither holds an engine's object: the same two
messages serve one compiled program, a simulated clock, threads or a cluster.

A `Scenario` describes a set of workers: how fast each one is, how long messages travel, who crashes, who joins late.
`timeline` turns it into a log: a list of `Event`s in the order in which they take effect. Times depend on nothing that is
sampled, so a log exists before the run; whoever executes the same log gets the same run.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hookean.types import ArgumentError, Params


class Report(NamedTuple):
    """Worker to centre: who, what, how many steps since its last report, and which centre it had in mind."""

    worker: jax.Array
    payload: Params
    steps: jax.Array
    base_version: jax.Array


class Copy(NamedTuple):
    """Centre to worker: the centre's position, its version and the number of workers that count."""

    position: Params
    version: jax.Array
    live: jax.Array


class Rhythm(NamedTuple):
    """After how many of its own steps a worker reports, and after how many it wants an answer."""

    report: int
    refresh: int


class Kind(enum.IntEnum):
    """What happens in an event; the columns it uses are named with each."""

    RUN = 0
    """`worker` takes `steps` steps, then keeps draw `draw`."""
    SEND = 1
    """`worker` puts a report of `steps` new steps into letter box `box`."""
    RECEIVE = 2
    """The centre takes the report in `box` (crediting `steps`) and leaves its answer there; it keeps draw `draw`."""
    ADOPT = 3
    """`worker` takes the answer in `box`, for which it asked `steps` steps ago."""
    LEAVE = 4
    """`worker` counts no longer."""
    JOIN = 5
    """`worker` begins to count, where it stands, and is told the centre."""
    RESTORE = 6
    """`worker` falls back to its state at its last report, `steps` steps ago."""
    BARRIER = 7
    """The centre takes the reports of all live workers (of `steps` steps each) at once; it keeps draw `draw`."""
    REFRESH = 8
    """All live workers take the centre's last answer to a barrier."""


class Event(NamedTuple):
    """One line of a log. -1 stands for none."""

    kind: Kind
    worker: int = -1
    steps: int = 0
    draw: int = -1
    box: int = -1
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class Straggler:
    """`worker` is `factor` times slower from one moment to another."""

    worker: int
    factor: float
    start: float = 0.0
    end: float = math.inf


@dataclasses.dataclass(frozen=True)
class Crash:
    """`worker` dies after `step` of its own steps; it starts again from its last report after a while, or never."""

    worker: int
    step: int
    restart_after: float | None = None


@dataclasses.dataclass(frozen=True)
class Join:
    """`worker` begins only at `time`."""

    worker: int
    time: float


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Workers and network. Times are in seconds, or in any unit that is used throughout.

    Attributes:
        step_time: seconds of one step; one number, or one for each worker.
        latency: seconds that a message travels, each way; one number, or one for each worker.
        jitter: spread of step times and latencies: each is multiplied by exp(jitter z), z standard normal.
        bandwidth: bytes per second of each worker's link, each way.
        stragglers: workers that are slow for some time.
        crashes: workers that die, and when they come back.
        joins: workers that begin late.
        barrier: all workers wait for each other at every exchange (nothing else of the network matters then).
        lease: a worker that has been silent for so long leaves the mean; None for ten times its slowest normal interval.
        max_staleness: a worker without an answer for so many rounds waits for it.
    """

    step_time: float | Sequence[float] = 1.0
    latency: float | Sequence[float] = 0.0
    jitter: float = 0.0
    bandwidth: float = math.inf
    stragglers: Sequence[Straggler] = ()
    crashes: Sequence[Crash] = ()
    joins: Sequence[Join] = ()
    barrier: bool = False
    lease: float | None = None
    max_staleness: int = 4

    def check(self, workers: int) -> None:
        """Refuse a scenario that does not fit `workers` workers."""
        for name, low, exclusive in (("step_time", 0.0, True), ("latency", 0.0, False)):
            values = np.asarray(getattr(self, name), float)
            if values.ndim > 1 or (values.ndim == 1 and len(values) != workers):
                raise ArgumentError(name, f"has shape {values.shape}", f"Give one number, or {workers}, one a worker")
            if not np.all(np.isfinite(values)) or values.min() < low or (exclusive and values.min() == low):
                raise ArgumentError(name, f"is {getattr(self, name)}", "Give finite times that are not negative")
        if not (self.jitter >= 0 and math.isfinite(self.jitter)):
            raise ArgumentError("jitter", f"is {self.jitter}", "Give a number of at least 0")
        if not self.bandwidth > 0:
            raise ArgumentError("bandwidth", f"is {self.bandwidth}", "Give bytes per second, greater than 0")
        if self.lease is not None and not self.lease > 0:
            raise ArgumentError("lease", f"is {self.lease}", "Give a time greater than 0, or None")
        if self.max_staleness < 1:
            raise ArgumentError("max_staleness", f"is {self.max_staleness}", "Give at least 1 round")
        for name in ("stragglers", "crashes", "joins"):
            for entry in getattr(self, name):
                if not 0 <= entry.worker < workers:
                    raise ArgumentError(
                        name, f"name worker {entry.worker} of {workers}", f"Workers are 0 to {workers - 1}"
                    )
        if any(s.factor <= 0 for s in self.stragglers):
            raise ArgumentError("stragglers", "have a factor that is not positive", "2.0 means half the speed")
        if any(c.step < 0 for c in self.crashes) or any(j.time < 0 for j in self.joins):
            raise ArgumentError("crashes and joins", "lie before the start", "Give steps and times of at least 0")
        if self.barrier and (self.joins or any(c.restart_after is not None for c in self.crashes)):
            raise ArgumentError("barrier", "has no place for a worker that joins or comes back", "Use barrier=False")
        if len({join.worker for join in self.joins}) >= workers:
            raise ArgumentError("joins", "leave no worker at the start", "Let at least one worker begin at once")


def timeline(
    scenario: Scenario,
    workers: int,
    num_steps: int,
    kept: np.ndarray,
    rhythm: Rhythm | None,
    *,
    server_owns_chain: bool = False,
    num_bytes: int = 0,
    seed: int = 0,
) -> list[Event]:
    """The log of a run of `num_steps` steps of each worker; the states after the steps `kept` become draws."""
    clock = _Clock(scenario, workers, num_steps, kept, rhythm, server_owns_chain, num_bytes, seed)
    return list(clock.synchronous() if scenario.barrier or rhythm is None else clock.asynchronous())


def num_boxes(log: Sequence[Event]) -> int:
    """How many letter boxes the log uses."""
    return 1 + max((event.box for event in log), default=-1)


class _Clock:
    """The discrete-event clock behind `timeline`."""

    def __init__(
        self,
        scenario: Scenario,
        workers: int,
        num_steps: int,
        kept: np.ndarray,
        rhythm: Rhythm | None,
        server_owns_chain: bool,
        num_bytes: int,
        seed: int,
    ) -> None:
        self.scenario, self.workers, self.num_steps, self.rhythm = scenario, workers, num_steps, rhythm
        self.server_owns_chain = server_owns_chain
        self.draw_at = {int(step): index for index, step in enumerate(kept)}
        self.random = np.random.default_rng([seed, 0x5CE])
        self.step_time = np.broadcast_to(np.asarray(scenario.step_time, float), (workers,))
        self.latency = np.broadcast_to(np.asarray(scenario.latency, float), (workers,))
        self.transfer = num_bytes / scenario.bandwidth
        self.crash_steps: dict[int, list[Crash]] = {}
        for crash in sorted(scenario.crashes, key=lambda c: c.step):
            self.crash_steps.setdefault(crash.worker, []).append(crash)
        self.live: set[int] = set()
        self.ticks = self.credit = 0

    def jitter(self) -> float:
        return math.exp(self.scenario.jitter * self.random.standard_normal()) if self.scenario.jitter else 1.0

    def step_duration(self, worker: int, now: float) -> float:
        slow = math.prod(s.factor for s in self.scenario.stragglers if s.worker == worker and s.start <= now < s.end)
        return float(self.step_time[worker]) * slow * self.jitter()

    def travel(self, worker: int) -> float:
        return float(self.latency[worker]) * self.jitter() + self.transfer

    def run(self, worker: int, start: int, end: int, time: float) -> Iterator[Event]:
        """Steps `start` to `end` of a worker, cut where a draw is kept."""
        at = start
        if not self.server_owns_chain:
            for step in range(start + 1, end + 1):
                if step in self.draw_at:
                    yield Event(Kind.RUN, worker, step - at, self.draw_at[step], time=time)
                    at = step
        if at < end:
            yield Event(Kind.RUN, worker, end - at, time=time)

    def tick(self, reports: int) -> int:
        """Advance the parallel clock, one tick for a report of every live worker; the draw that is due, if any."""
        self.credit += reports
        due = -1
        while self.credit >= len(self.live):
            self.credit -= len(self.live)
            self.ticks += 1
            if self.server_owns_chain:
                due = self.draw_at.get(self.ticks, due)
        return due

    def synchronous(self) -> Iterator[Event]:
        """All step together; at an exchange they wait for each other. Without exchanges nobody waits."""
        self.live = set(range(self.workers))
        report, refresh = self.rhythm or (256, 256)  # no exchanges: pieces short enough to show progress
        now = [0.0] * self.workers
        step = 0
        while step < self.num_steps and self.live:
            end = min(step + report - step % report, self.num_steps)
            for worker in sorted(self.live):
                fatal = [c.step for c in self.crash_steps.get(worker, []) if c.restart_after is None]
                crash = next((at for at in fatal if step <= at < end), None)
                stop = end if crash is None else crash
                for _ in range(stop - step):
                    now[worker] += self.step_duration(worker, now[worker])
                yield from self.run(worker, step, stop, now[worker])
                if crash is not None:
                    self.live.discard(worker)
                    if self.rhythm is not None:
                        yield Event(Kind.LEAVE, worker, time=now[worker])
            if self.rhythm is not None and end % report == 0 and self.live:
                time = max(now[worker] + 2 * self.travel(worker) for worker in sorted(self.live))
                now = [time] * self.workers
                yield Event(Kind.BARRIER, steps=report, draw=self.tick(len(self.live)), time=time)
                if end % refresh == 0:
                    yield Event(Kind.REFRESH, steps=refresh, time=time)
            step = end

    def asynchronous(self) -> Iterator[Event]:
        """Nobody waits, but for a worker whose answer is overdue."""
        assert self.rhythm is not None
        report, refresh = self.rhythm
        slowest = float(self.step_time.max()) * refresh + 2 * float(self.latency.max() + self.transfer)
        lease = self.scenario.lease if self.scenario.lease is not None else 10 * slowest
        queue: list[tuple[float, int, int, str, dict[str, Any]]] = []
        order = 0

        def push(time: float, priority: int, what: str, **details: Any) -> None:
            nonlocal order
            order += 1
            heapq.heappush(queue, (time, priority, order, what, details))

        free_boxes: list[int] = []
        boxes = 0

        def take_box() -> int:
            nonlocal boxes
            if free_boxes:
                return heapq.heappop(free_boxes)
            boxes += 1
            return boxes - 1

        step = [0] * self.workers  # taken so far
        reported = [0] * self.workers  # of these, known to the centre or on their way
        asked: list[tuple[int, int, float] | None] = [None] * self.workers  # box, step, time of the awaited answer
        waits_to_send = [False] * self.workers
        heard = [0.0] * self.workers
        life = [0] * self.workers  # incarnation: what was planned for an earlier one is void

        def plan(worker: int, now: float) -> None:
            """Let the worker run until it reports, takes an answer, crashes or ends."""
            pending = asked[worker]
            waiting = pending is not None and step[worker] - pending[1] >= refresh * self.scenario.max_staleness
            if waiting:
                assert pending is not None
                push(max(now, pending[2]), 2, "pause", worker=worker, life=life[worker], end=step[worker])
                return
            crash = min((c.step for c in self.crash_steps.get(worker, [])), default=self.num_steps)
            last = min(step[worker] + report - step[worker] % report, self.num_steps, max(crash, step[worker]))
            end = step[worker]
            while end < last:
                now += self.step_duration(worker, now)
                end += 1
                if pending is not None and now >= pending[2]:
                    break
            push(now, 2, "pause", worker=worker, life=life[worker], end=end)

        def send(worker: int, now: float, wants_answer: bool) -> Event:
            box = take_box()
            steps = step[worker] - reported[worker]
            arrival = now + self.travel(worker)
            push(arrival, 0, "receive", worker=worker, box=box, steps=steps, keep=wants_answer)
            if wants_answer:
                asked[worker] = (box, step[worker], arrival + self.travel(worker))
            reported[worker] = step[worker]
            return Event(Kind.SEND, worker, steps, box=box, time=now)

        late = {join.worker: join.time for join in self.scenario.joins}
        for worker in range(self.workers):
            if worker in late:
                push(late[worker], 1, "join", worker=worker)
            else:
                self.live.add(worker)
                push(lease, 3, "lease", worker=worker)
        for worker in late:
            yield Event(Kind.LEAVE, worker)
        for worker in range(self.workers):
            if worker not in late:
                plan(worker, 0.0)

        while queue:
            now, _, _, what, details = heapq.heappop(queue)
            worker = details["worker"]
            if what == "receive":
                newcomer = worker not in self.live
                self.live.add(worker)
                heard[worker] = now
                push(now + lease, 3, "lease", worker=worker)
                credit = 0 if newcomer else details["steps"]
                draw = self.tick(credit)
                yield Event(Kind.RECEIVE, worker, credit, draw, details["box"], now)
                if not details["keep"]:
                    heapq.heappush(free_boxes, details["box"])
            elif what == "lease":
                if worker in self.live and now - heard[worker] >= lease * (1 - 1e-12):
                    self.live.discard(worker)
                    yield Event(Kind.LEAVE, worker, time=now)
            elif what == "join":
                self.live.add(worker)
                heard[worker] = now
                push(now + lease, 3, "lease", worker=worker)
                yield Event(Kind.JOIN, worker, time=now)
                plan(worker, now)
            elif what == "restart":
                yield Event(Kind.RESTORE, worker, step[worker] - reported[worker], time=now)
                step[worker] = reported[worker]
                plan(worker, now)
            elif details["life"] == life[worker]:  # pause
                yield from self.run(worker, step[worker], details["end"], now)
                step[worker] = details["end"]
                crash = next((c for c in self.crash_steps.get(worker, []) if c.step <= step[worker]), None)
                if crash is not None:
                    self.crash_steps[worker].remove(crash)
                    life[worker] += 1
                    pending, asked[worker], waits_to_send[worker] = asked[worker], None, False
                    if pending is not None:  # the answer finds nobody; its box is not used again
                        now = max(now, pending[2])
                    if crash.restart_after is not None:
                        push(now + crash.restart_after, 1, "restart", worker=worker)
                    continue
                pending = asked[worker]
                if pending is not None and now >= pending[2]:
                    yield Event(Kind.ADOPT, worker, step[worker] - pending[1], box=pending[0], time=now)
                    heapq.heappush(free_boxes, pending[0])
                    asked[worker] = None
                if step[worker] % report == 0 and step[worker] > reported[worker]:
                    wants = step[worker] % refresh == 0 and asked[worker] is None
                    missed = step[worker] % refresh == 0 and asked[worker] is not None
                    if wants or self.server_owns_chain:
                        yield send(worker, now, wants)
                    waits_to_send[worker] = missed
                elif waits_to_send[worker] and asked[worker] is None:
                    waits_to_send[worker] = False
                    yield send(worker, now, True)
                if step[worker] == self.num_steps and asked[worker] is None:
                    push(now, 1, "leave", worker=worker)
                elif asked[worker] is not None and asked[worker][2] <= now:  # type: ignore[index]
                    push(now, 2, "pause", worker=worker, life=life[worker], end=step[worker])
                elif step[worker] == self.num_steps:
                    assert asked[worker] is not None
                    push(asked[worker][2], 2, "pause", worker=worker, life=life[worker], end=step[worker])  # type: ignore[index]
                else:
                    plan(worker, now)
            if what == "leave" and worker in self.live:
                self.live.discard(worker)
                yield Event(Kind.LEAVE, worker, time=now)
