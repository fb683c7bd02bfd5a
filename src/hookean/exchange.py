"""What workers and the centre say to each other, and the order in which they say it.

A worker sends a `Report`, the centre answers with a `Copy` of itself. Neither holds an engine's object: the same two
messages serve one compiled program, a simulated clock, threads or a cluster.

A `Scenario` describes a set of workers: how fast each one is, how long messages travel, who crashes, who joins late.
`timeline` turns it into a log: a list of `Event`s in the order in which they take effect. Times depend on nothing
that is sampled, so a log exists before the run; whoever executes the same log gets the same run.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from hookean.types import ArgumentError, Params


class Report(NamedTuple):
    """Worker to centre: who, what, how many steps since its last report, and which centre it had in mind."""

    worker: Any
    payload: Params
    steps: Any
    base_version: Any


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
    """`worker` puts a report of `steps` new steps into letter box `box`. With box -1 it is the report `seq` of its life
    `incarnation`, which it no longer waits for: a REPORT that takes this one later takes what was in it now."""
    RECEIVE = 2
    """The centre takes the report in `box` (crediting `steps`) and leaves its answer there; it keeps draw `draw`."""
    ADOPT = 3
    """`worker` takes the answer in `box`, for which it asked `steps` steps ago."""
    LEAVE = 4
    """`worker` counts no longer."""
    JOIN = 5
    """`worker` begins to count, or is back, where it stands, and is told the centre."""
    RESTORE = 6
    """`worker` falls back to its state at its last report, `steps` steps ago."""
    BARRIER = 7
    """The centre takes the reports of all live workers (of `steps` steps each) at once; it keeps draw `draw`."""
    REFRESH = 8
    """All live workers take the centre's last answer to a barrier."""
    REPORT = 9
    """The centre takes a report of `worker` (crediting `steps`) as it stands, and is at `version` then; it keeps draw
    `draw`. An ADOPT with box -1 takes the answer to it, one with box -2 the centre as it was at `version` of
    generation `seq`; `worker` had asked for it `steps` steps ago."""
    SNAPSHOT = 10
    """The centre writes itself down."""
    REBUILD = 11
    """The centre falls back to its last SNAPSHOT, `steps` versions ago, and begins generation `seq`."""


class Event(NamedTuple):
    """One line of a log. -1 stands for none; `incarnation`, `seq` and `version` are for those who read it."""

    kind: Kind
    worker: int = -1
    steps: int = 0
    draw: int = -1
    box: int = -1
    time: float = 0.0
    incarnation: int = -1
    seq: int = -1
    version: int = -1


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
        lease: a worker that has been silent for so long leaves the mean; None for ten normal intervals of the slowest.
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
        if not all(0 < s.factor < math.inf for s in self.stragglers):
            raise ArgumentError("stragglers", "have a factor that is not positive", "2.0 means half the speed")
        if not (all(c.step >= 0 for c in self.crashes) and all(0 <= j.time < math.inf for j in self.joins)):
            raise ArgumentError("crashes and joins", "lie before the start", "Give steps and times of at least 0")
        if not all(c.restart_after is None or 0 <= c.restart_after < math.inf for c in self.crashes):
            raise ArgumentError("crashes", "have a restart before the crash", "Give a time of at least 0, or None")
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
    clock = _Synchronous if scenario.barrier or rhythm is None else _Asynchronous
    return list(clock(scenario, workers, num_steps, kept, rhythm, server_owns_chain, num_bytes, seed).events())


def num_boxes(log: Sequence[Event]) -> int:
    """How many letter boxes the log uses."""
    return 1 + max((event.box for event in log), default=-1)


@dataclasses.dataclass
class ParallelClock:
    """Counts in parallel steps what workers report: a tick is a report of every live worker."""

    live: set[int] = dataclasses.field(default_factory=set)
    ticks: int = 0
    credit: int = 0

    def count(self, worker: int, counts: bool) -> None:
        """Let a worker count or not. The part of a tick that has passed stays the same part of a tick."""
        before = len(self.live)
        (self.live.add if counts else self.live.discard)(worker)
        self.credit = self.credit * len(self.live) // max(before, 1)

    def tick(self, reports: int) -> list[int]:
        """Hear of `reports` reports; the ticks that this completes."""
        before = self.ticks
        self.credit += reports
        while self.live and self.credit >= len(self.live):
            self.credit -= len(self.live)
            self.ticks += 1
        return list(range(before + 1, self.ticks + 1))


class _Clock:
    """Times of steps and messages, and the parallel clock that counts them."""

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
        self.scenario, self.workers, self.num_steps = scenario, workers, num_steps
        self.exchanges = rhythm is not None
        self.report, self.refresh = rhythm or (256, 256)  # no exchanges: pieces short enough to show progress
        self.server_owns_chain = server_owns_chain
        self.draw_at = {int(step): index for index, step in enumerate(kept)}
        self.random = np.random.default_rng([seed, 0x5CE])
        self.step_time = np.broadcast_to(np.asarray(scenario.step_time, float), (workers,))
        self.latency = np.broadcast_to(np.asarray(scenario.latency, float), (workers,))
        self.transfer = num_bytes / scenario.bandwidth
        self.crashes = {
            worker: sorted((c for c in scenario.crashes if c.worker == worker), key=lambda c: c.step)
            for worker in range(workers)
        }
        self.clock = ParallelClock()

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
        """Advance the parallel clock, one tick for a report of every live worker; the draw that is due, if any.

        A worker reports one gradient at a time where draws hang on ticks, so that no more than one is due at once.
        """
        due = -1
        for tick in self.clock.tick(reports):
            if self.server_owns_chain:
                due = self.draw_at.get(tick, due)
        return due


class _Synchronous(_Clock):
    """All step together; at an exchange they wait for each other. Without exchanges nobody waits."""

    def events(self) -> Iterator[Event]:
        self.clock.live.update(range(self.workers))
        now = [0.0] * self.workers
        for join in self.scenario.joins:
            now[join.worker] = join.time
        step = 0
        while step < self.num_steps and self.clock.live:
            end = min(step + self.report - step % self.report, self.num_steps)
            for worker in sorted(self.clock.live):
                stop = end
                for crash in (c for c in self.crashes[worker] if step <= c.step < end):
                    if crash.restart_after is None:
                        stop = crash.step
                        break
                    for _ in range(crash.step - step):  # lost: without exchanges it costs nothing but time
                        now[worker] += self.step_duration(worker, now[worker])
                    now[worker] += crash.restart_after
                for _ in range(stop - step):
                    now[worker] += self.step_duration(worker, now[worker])
                yield from self.run(worker, step, stop, now[worker])
                if stop < end:
                    self.clock.count(worker, False)
                    if self.exchanges:
                        yield Event(Kind.LEAVE, worker, time=now[worker])
            if self.exchanges and end % self.report == 0 and self.clock.live:
                time = max(now[worker] + 2 * self.travel(worker) for worker in sorted(self.clock.live))
                now = [time] * self.workers
                yield Event(Kind.BARRIER, steps=self.report, draw=self.tick(len(self.clock.live)), time=time)
                if end % self.refresh == 0:
                    yield Event(Kind.REFRESH, steps=self.refresh, time=time)
            step = end


class _Awaited(NamedTuple):
    """An answer under way: its box, the step at which it was asked for, and when it arrives."""

    box: int
    asked_at: int
    arrival: float


@dataclasses.dataclass
class _Hand:
    """What the clock knows of one worker."""

    step: int = 0
    reported: int = 0
    """Steps that the centre knows of or will hear of."""
    awaited: _Awaited | None = None
    owes_report: bool = False
    """A report was due while an answer was still awaited; it is sent once that is here."""
    under_way: int = 0
    """Reports sent and not yet received."""
    done: bool = False
    heard: float = 0.0
    life: int = 0
    """Incarnation: what was planned for an earlier one is void."""


class _Asynchronous(_Clock):
    """Nobody waits, but for a worker whose answer is overdue. Actions wait in a queue for their time."""

    FIRST, SECOND, THIRD, LAST = range(4)
    """Order of actions at the same moment: messages arrive before workers look for them, leases end last."""

    def events(self) -> Iterator[Event]:
        self.queue: list[tuple[float, int, int, Callable[..., Iterator[Event]], tuple[Any, ...]]] = []
        self.pushed = self.boxes = 0
        self.free_boxes: list[int] = []
        self.hands = [_Hand() for _ in range(self.workers)]
        round_trip = 2 * float(self.latency.max() + self.transfer)
        usual = float(self.step_time.max()) * self.refresh + round_trip
        self.lease = self.scenario.lease if self.scenario.lease is not None else 10 * usual
        late = {join.worker: join.time for join in self.scenario.joins}
        for worker in late:
            yield Event(Kind.LEAVE, worker)
            self.push(late[worker], self.SECOND, self.join, worker)
        for worker in range(self.workers):
            if worker not in late:
                self.listen(worker, 0.0)
                self.plan(worker, 0.0)
        while self.queue:
            now, _, _, action, details = heapq.heappop(self.queue)
            yield from action(now, *details)

    def push(self, time: float, priority: int, action: Callable[..., Iterator[Event]], *details: Any) -> None:
        self.pushed += 1  # first come, first served
        heapq.heappush(self.queue, (time, priority, self.pushed, action, details))

    def listen(self, worker: int, now: float) -> None:
        """The centre has heard of a worker, which counts until its lease ends."""
        self.clock.count(worker, True)
        self.hands[worker].heard = now
        if self.lease < math.inf:
            self.push(now + self.lease, self.LAST, self.expire, worker)

    def plan(self, worker: int, now: float) -> None:
        """Run until it reports, an answer arrives, it crashes or is done; or wait for an overdue answer."""
        hand = self.hands[worker]
        end, arrival, limit = hand.step, math.inf, self.num_steps
        if hand.awaited is not None:
            arrival = hand.awaited.arrival
            limit = min(limit, hand.awaited.asked_at + self.refresh * self.scenario.max_staleness)
        if end >= limit:  # done, but for an answer under way; or the answer is overdue
            now = max(now, arrival)
        else:
            crash = min((c.step for c in self.crashes[worker]), default=limit)
            last = min(end + self.report - end % self.report, limit, max(crash, end))
            while end < last and now < arrival:
                now += self.step_duration(worker, now)
                end += 1
        self.push(now, self.THIRD, self.pause, worker, hand.life, end)

    def pause(self, now: float, worker: int, life: int, end: int) -> Iterator[Event]:
        """A worker has come to the end of what was planned."""
        hand = self.hands[worker]
        if life != hand.life:
            return
        yield from self.run(worker, hand.step, end, now)
        hand.step = end
        crash = next((c for c in self.crashes[worker] if c.step <= end), None)
        if crash is not None:
            self.crash(now, worker, crash)
            return
        arrived = hand.awaited if hand.awaited is not None and now >= hand.awaited.arrival else None
        due, wants = end % self.report == 0, end % self.refresh == 0
        if arrived is not None:
            hand.awaited = None
        elif hand.awaited is not None and due and wants:
            hand.owes_report = True
        if hand.step > hand.reported:  # reported before the answer is taken: what was done, was done without it
            asks = hand.awaited is None and (hand.owes_report or (due and wants))
            if asks or (due and self.server_owns_chain):
                yield self.send(worker, now, asks)
        if arrived is not None:
            yield Event(Kind.ADOPT, worker, end - arrived.asked_at, box=arrived.box, time=now)
            heapq.heappush(self.free_boxes, arrived.box)
        if hand.step < self.num_steps or hand.awaited is not None:
            self.plan(worker, now)
        else:
            hand.done = True
            yield from self.leave_if_done(now, worker)

    def send(self, worker: int, now: float, asks: bool) -> Event:
        hand = self.hands[worker]
        if self.free_boxes:
            box = heapq.heappop(self.free_boxes)
        else:
            box, self.boxes = self.boxes, self.boxes + 1
        steps = hand.step - hand.reported
        arrival = now + self.travel(worker)
        self.push(arrival, self.FIRST, self.receive, worker, box, steps, asks)
        hand.reported = hand.step
        hand.under_way += 1
        if asks:
            hand.owes_report = False
            hand.awaited = _Awaited(box, hand.step, arrival + self.travel(worker))
        return Event(Kind.SEND, worker, steps, box=box, time=now)

    def receive(self, now: float, worker: int, box: int, steps: int, asked: bool) -> Iterator[Event]:
        """The centre takes a report. A worker that did not count has no steps to its credit."""
        credit = steps if worker in self.clock.live else 0
        self.listen(worker, now)
        self.hands[worker].under_way -= 1
        yield Event(Kind.RECEIVE, worker, credit, self.tick(credit), box, now)
        if not asked:
            yield from self.free(now, box)
        yield from self.leave_if_done(now, worker)

    def free(self, now: float, box: int) -> Iterator[Event]:
        """A box whose answer nobody wants."""
        heapq.heappush(self.free_boxes, box)
        yield from ()

    def crash(self, now: float, worker: int, crash: Crash) -> None:
        """A worker dies, and with it what it waited for. It is not back before that would have come."""
        hand = self.hands[worker]
        self.crashes[worker].remove(crash)
        back = now
        if hand.awaited is not None:
            back = max(now, hand.awaited.arrival)
            self.push(back, self.FIRST, self.free, hand.awaited.box)
        hand.life, hand.awaited, hand.owes_report = hand.life + 1, None, False
        if crash.restart_after is not None:
            self.push(back + crash.restart_after, self.SECOND, self.restart, worker)

    def restart(self, now: float, worker: int) -> Iterator[Event]:
        """A worker that had died goes on from its last report, with the centre as it is by now."""
        hand = self.hands[worker]
        yield Event(Kind.RESTORE, worker, hand.step - hand.reported, time=now)
        hand.step = hand.reported
        yield from self.join(now, worker)

    def join(self, now: float, worker: int) -> Iterator[Event]:
        """A worker begins late, or is back."""
        self.listen(worker, now)
        yield Event(Kind.JOIN, worker, time=now)
        self.plan(worker, now)

    def expire(self, now: float, worker: int) -> Iterator[Event]:
        """A lease ends, unless it was renewed."""
        if now >= self.hands[worker].heard + self.lease:
            yield from self.leave(now, worker)

    def leave_if_done(self, now: float, worker: int) -> Iterator[Event]:
        """A worker that is done counts until its last report is there."""
        hand = self.hands[worker]
        if hand.done and not hand.under_way:
            yield from self.leave(now, worker)

    def leave(self, now: float, worker: int) -> Iterator[Event]:
        """A worker stops counting: it is done, or has been silent for too long."""
        if worker in self.clock.live:
            self.clock.count(worker, False)
            yield Event(Kind.LEAVE, worker, time=now)
