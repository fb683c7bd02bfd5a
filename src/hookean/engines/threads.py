"""K worker threads and a centre, in one process: chains that exchange without waiting for each other.

A worker runs compiled windows, which release Python's lock, so that threads use all cores, or an accelerator each.
After a window it publishes where it stands; when a report is due it talks to the centre. Whatever is published under
the lock (places of all workers, the centre, the log so far) fits together, so that a checkpoint is a look at it, and a
worker that raised begins again where it last published.

Who came first is decided by the hardware. The log remembers it: `hookean.engines.pieces.replay` does the same again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from hookean.coupling import Worker
from hookean.engines.base import Engine, diverged
from hookean.engines.centre import Centre, Message, Reply, Status
from hookean.engines.faults import Carrier, Faults, Faulty, MessageLost, Strikes
from hookean.engines.pieces import Pieces, Place
from hookean.exchange import Event, Kind
from hookean.job import Job, Progress
from hookean.recorder import Recorder, Saved, Snapshot, Window
from hookean.tree import tree_map
from hookean.types import (
    ArgumentError,
    BatchError,
    HookeanError,
    HookeanWarning,
    Params,
    StalledError,
    check_count,
    in_one_line,
)

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_BETWEEN_MEASUREMENTS = 0.25
SECONDS_OF_A_WINDOW = 0.5
"""Longer windows are cut, so that a run can be watched and stopped."""
SECONDS_TO_STOP = 5.0
"""How long a thread may take to end after an error. It may hang, which may be the error."""
ATTEMPTS = 3
"""How often a message is sent before the worker goes on with the copy it has."""
MOST_WAITING_BYTES = 2**28
"""Draws that wait to be taken; workers that find more of them wait too."""


class Rows(NamedTuple):
    """Kept draws on their way to the recorder."""

    chain: int
    first: int
    draws: Params
    stats: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Threads(Engine):
    """A thread for every chain, over the local devices.

    Attributes:
        spare: seats for chains that callbacks may add while the run goes on.
        max_restarts: how often a worker that raises, and how often the centre, is started again.
        lease: seconds after which a worker that says nothing leaves the mean.
        max_staleness: rounds that a worker goes on without an answer, before it waits for one.
        patience: seconds without any progress after which the run ends with an error.
        snapshot_every: versions of the centre between two states to which it can fall back.
        faults: what is to go wrong on purpose.
    """

    spare: int = 0
    max_restarts: int = 10
    lease: float = 60.0
    max_staleness: int = 4
    patience: float = 300.0
    snapshot_every: int = 64
    faults: Faults = Faults()  # noqa: RUF009 - frozen

    summary: ClassVar[str] = "a thread for every chain, exchanging without waiting for each other"

    def check(self, chains: int) -> None:
        """Refuse settings that cannot work."""
        check_count("spare", self.spare, 0)
        check_count("max_restarts", self.max_restarts, 0)
        check_count("max_staleness", self.max_staleness)
        check_count("snapshot_every", self.snapshot_every)
        for name in ("lease", "patience"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and value > 0):
                raise ArgumentError(name, f"is {value!r}", "Give seconds, greater than 0")
        self.faults.check(chains)

    @property
    def seats(self) -> int:
        """Those that are spare."""
        return self.spare

    def run(self, job: Job, recorder: Recorder, saved: Saved | None = None) -> dict[str, Any]:
        """Start the threads, take what they keep, and watch over them."""
        return _Floor(self, job, recorder, saved).run()


class _Life:
    """What a worker's thread knows of its conversation with the centre."""

    def __init__(self, incarnation: int) -> None:
        self.begin(incarnation, 0, -1)

    def begin(self, incarnation: int, generation: int, version: int) -> None:
        self.incarnation, self.generation, self.version = incarnation, generation, version
        self.seq = -1
        self.unanswered = 0
        self.owes = False
        """An answer that was to be adopted has not come."""


class _Stopped(Exception):
    """The run is over for this worker."""


class _Direct:
    """The carrier of threads: a call, under the lock."""

    def __init__(self, floor: _Floor) -> None:
        self.floor = floor

    def join(self, worker: int, payload: Params, step: int) -> Reply:
        floor = self.floor
        payload = jax.device_put(payload, floor.centre_device)
        with floor.lock:
            return floor.centre.join(worker, payload, step, floor.now())

    def exchange(self, message: Message) -> Reply:
        floor = self.floor
        report, seen = jax.device_put((message.report, message.seen), floor.centre_device)
        message = message._replace(report=report, seen=seen)
        is_finite = bool(floor.pieces.is_finite(message.report.payload))
        with floor.lock:
            try:
                floor.strikes.centre(floor.centre.version)
                reply = floor.centre.exchange(message, floor.now(), is_finite)
                if reply.status is Status.REFUSED:
                    floor.refusals.append(f"chain {message.worker}, at step {message.step}")
                return reply
            except Exception as error:
                floor.rebuild(error)
                raise MessageLost("the centre raised") from error

    def leave(self, worker: int) -> None:
        with self.floor.lock:
            self.floor.centre.leave(worker, self.floor.now())


class _Floor:
    """One run: what its threads share, and what each of them does."""

    def __init__(self, engine: Threads, job: Job, recorder: Recorder, saved: Saved | None) -> None:
        self.engine, self.job, self.recorder = engine, job, recorder
        self.pieces = pieces = Pieces(job)
        self.counts = recorder.telemetry
        self.lock = threading.RLock()
        self.news = threading.Condition(self.lock)
        self.strikes = Strikes(engine.faults)
        self.began = time.monotonic()
        devices = jax.local_devices()
        self.centre_device = devices[0]
        self.devices = [devices[chain % len(devices)] for chain in range(job.chains)]
        self.data = {device: jax.device_put(job.target.data, device) for device in set(self.devices)}

        places, state = pieces.open()
        if saved is not None:
            places, state = saved.like((places, state))
        self.places = [jax.device_put(p, d) for p, d in zip(places, self.devices, strict=True)]
        self.steps = [int(place.step) for place in places]
        self.centre = Centre(
            pieces, jax.device_put(state, self.centre_device), engine.lease, engine.snapshot_every, self.counts
        )
        self.events = self.centre.events
        self.restarts = [0] * job.chains
        self.centre_failures = 0
        self.begun = [True] * (job.chains - engine.spare) + [False] * engine.spare
        self.removed = [False] * job.chains
        if saved is not None:
            self.centre.restore(self.centre.state, saved.facts["centre"])
            self.begun, self.removed = list(saved.facts["begun"]), list(saved.facts["removed"])
        elif pieces.exchanges:
            for chain in np.flatnonzero(~np.array(self.begun)):
                self.centre.leave(int(chain), 0.0)
        self.must_join = [saved is not None] * job.chains
        direct = _Direct(self)
        self.carrier: Carrier = direct if engine.faults == Faults() else Faulty(direct, engine.faults, job.chains)

        self.rows: list[Rows] = []
        self.waiting_bytes = 0
        self.inflight = [0] * job.chains
        self.asked = [int(place.worker.asked) for place in places]
        self.heat = [math.nan] * job.chains
        self.potentials = [math.nan] * job.chains
        self.measured = 0.0
        self.rebuilds: list[str] = []
        self.refusals: list[str] = []
        self.windows: list[int] = []
        self.threads: dict[int, threading.Thread] = {}
        self.failure: BaseException | None = None
        self.lost: dict[int, BaseException] = {}
        self.stopping = False
        self.x64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        self.last_progress = time.monotonic()

    # -- the thread that watches --------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        self.recorder.requests = []
        for device in set(self.devices):  # compile before the clocks of the leases tick
            chain = self.devices.index(device)
            self.pieces.compile(self.data[device], self.places[chain], self.centre.state)
        self.last_progress = time.monotonic()
        for member in self.centre.members:
            member.heard = self.now()
        for chain in range(self.job.chains):
            if self.begun[chain] and not self.removed[chain] and self.steps[chain] < self.job.num_steps:
                self.start(chain)
        try:
            while any(thread.is_alive() for thread in self.threads.values()):
                with self.news:
                    self.news.wait(SECONDS_BETWEEN_LOOKS)
                self.look()
                self.serve()
                self.watch_over()
        except BaseException as error:
            self.fail(error)
        end = time.monotonic() + SECONDS_TO_STOP
        for thread in self.threads.values():
            thread.join(None if self.failure is None else max(end - time.monotonic(), 0.0))
        if self.failure is not None:
            with contextlib.suppress(Exception):  # the first error counts
                self.take()
            raise self.failure
        self.look()
        self.recorder.save(Snapshot((self.places, self.centre.state), self.facts()))
        if self.lost:
            told = "; ".join(f"chain {chain}: {in_one_line(error)}" for chain, error in sorted(self.lost.items()))
            warnings.warn(
                f"{len(self.lost)} of {self.job.chains} chains raised more than max_restarts="
                f"{self.engine.max_restarts} times and were given up; their later draws are missing. {told}",
                HookeanWarning,
                stacklevel=2,
            )
        return {"steps": max(self.steps), "final": (self.stacked(), self.centre.state), "restarts": list(self.restarts)}

    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.began

    def stacked(self) -> Worker:
        """All workers' last states as one, as other engines give them."""
        workers = jax.device_get([place.worker for place in self.places])
        return tree_map(lambda *leaves: np.stack(leaves), *workers)

    def take(self) -> Callable[[], Snapshot] | None:
        """Hand over what has been published, and a snapshot that fits to it, if one is due.

        The centre is written over in place, so that a snapshot needs a copy, made while nothing moves.
        """
        wanted = self.recorder.checkpoint_due()
        with self.news:
            events, rows, dues = list(self.events), self.rows, self.centre.draws
            self.events.clear()
            self.rows, self.centre.draws, self.waiting_bytes = [], [], 0
            state = self.pieces.duplicate(self.centre.state) if wanted else None
            places = list(self.places)
            told = self.facts()
            self.news.notify_all()
        self.recorder.log(events)
        for entry in rows:
            self.recorder.keep(*entry)
        for due in dues:
            draw, stats = self.fetched((due.position, due.stats))
            self.recorder.keep(0, due.number, *tree_map(lambda x: np.asarray(x)[None], (draw, stats)))
        return (lambda: Snapshot(self.fetched((places, state)), told)) if wanted else None

    def fetched(self, tree: Any) -> Any:
        """Values on the host. A computation that hangs may keep all others from the device: wait as for that one."""
        while not all(leaf.is_ready() for leaf in jax.tree.leaves(tree)):
            if self.failure is not None:
                raise self.failure
            self.watch_over()
            time.sleep(0.001)
        return jax.device_get(tree)

    def facts(self) -> dict[str, Any]:
        return {"centre": self.centre.facts(), "begun": list(self.begun), "removed": list(self.removed)}

    def look(self) -> None:
        snapshot = self.take()
        with self.lock:
            finished, self.windows = self.windows, []
            rebuilds, self.rebuilds = self.rebuilds, []
            refusals, self.refusals = self.refusals, []
        for rebuild in rebuilds:
            warnings.warn(f"the centre raised {rebuild}", HookeanWarning, stacklevel=2)
        for refusal in refusals:
            warnings.warn(f"a report with NaN or Inf was refused: {refusal}", HookeanWarning, stacklevel=2)
        now = time.monotonic()
        if now - self.measured > SECONDS_BETWEEN_MEASUREMENTS:
            self.measured = now
            with self.lock:
                served, places = self.job.coupling.server_owns_chain, list(self.places)
                owners = [self.centre.state] if served else [place.worker for place in places]
                heat = [self.pieces.heat(owner) for owner in owners]
            heat, potentials = self.fetched((heat, [place.seen.potential for place in places]))
            self.heat = [float(heat[0 if served else i]) for i in range(len(places))]
            self.potentials = [float(potential) for potential in potentials]
        running = [i for i, begun in enumerate(self.begun) if begun]

        def mean(values: list[float]) -> float:
            known = [values[i] for i in running if math.isfinite(values[i])]
            return float(np.mean(known)) if known else math.nan

        progress = Progress(int(mean([float(step) for step in self.steps])), mean(self.potentials), mean(self.heat))

        def windows() -> list[Window]:
            return [Window(i, self.steps[i], self.potentials[i], self.heat[i], self.recorder) for i in finished]

        if self.recorder.look(progress, windows, snapshot):
            self.stopping = True

    def serve(self) -> None:
        """Do what callbacks have asked for."""
        requests, self.recorder.requests = self.recorder.requests or [], []
        for what, chain in requests:
            if what == "remove":
                if not 0 <= chain < self.job.chains:
                    raise HookeanError(f"there is no chain {chain} to remove: chains are 0 to {self.job.chains - 1}")
                self.removed[chain] = True
            else:
                free = [i for i, begun in enumerate(self.begun) if not begun]
                if not free:
                    raise HookeanError("no seat is free for another chain. Give more of them: hk.Threads(spare=...)")
                self.begun[free[0]] = self.must_join[free[0]] = True
                self.start(free[0])

    def watch_over(self) -> None:
        """End the leases of the silent, and the run if nothing moves any more."""
        if self.pieces.exchanges:
            with self.lock:
                self.centre.expire(self.now(), set(range(self.job.chains)))
        if time.monotonic() - self.last_progress > self.engine.patience and self.failure is None:
            slow = ", ".join(f"chain {i} at step {self.steps[i]}" for i, t in self.threads.items() if t.is_alive())
            raise StalledError(
                f"no worker has finished a window for {self.engine.patience:g} s ({slow}). A likelihood or a reader "
                "of batches may hang; if windows really take so long, give hk.Threads(patience=...) more"
            )

    def start(self, chain: int) -> None:
        thread = threading.Thread(target=self.work, args=(chain,), name=f"chain {chain}", daemon=True)
        self.threads[chain] = thread
        thread.start()

    def fail(self, error: BaseException) -> None:
        """End the run with an error; the first one counts."""
        with self.news:
            self.failure = self.failure or error
            self.stopping = True
            self.news.notify_all()

    def rebuild(self, error: Exception) -> None:
        """The centre raised: it falls back to what it last wrote down."""
        self.centre_failures += 1
        if self.centre_failures > self.engine.max_restarts:
            self.fail(error)
        forgotten = self.centre.rebuild(self.now())
        self.rebuilds.append(
            f"({in_one_line(error)}) and was rebuilt: {forgotten} versions are forgotten, generation "
            f"{self.centre.generation} begins"
        )

    # -- a worker's thread --------------------------------------------------------------------------------------------

    def work(self, chain: int) -> None:
        """Live, and live again after an error, as long as the budget lasts."""
        with jax.enable_x64(self.x64):  # which is each thread's own
            self.live_again(chain)

    def live_again(self, chain: int) -> None:
        while True:
            try:
                self.live(chain)
                return
            except _Stopped:
                return
            except (BatchError, StalledError, ArgumentError) as error:
                self.fail(error)
                return
            except Exception as error:
                if not self.may_restart(chain, error):
                    return

    def may_restart(self, chain: int, error: Exception) -> bool:
        with self.news:
            self.restarts[chain] += 1
            self.must_join[chain] = True
            self.counts.redone += self.inflight[chain]
            if self.restarts[chain] <= self.engine.max_restarts:
                self.counts.restarts += 1
                return True
            self.lost[chain] = error
            if self.pieces.exchanges:
                self.centre.leave(chain, self.now())
            if len(self.lost) == sum(self.begun):
                self.fail(error)
            self.news.notify_all()
            return False

    def live(self, chain: int) -> None:
        place, step, life = self.places[chain], self.steps[chain], _Life(self.centre.members[chain].incarnation)
        # A server's chain counts its steps by the gradients that it is given; one that was on its way is given again.
        owed = self.job.coupling.server_owns_chain and self.centre.members[chain].step < step
        if self.must_join[chain] and self.pieces.exchanges:
            place = self.join(chain, place, step, life)
            if owed:
                place = self.exchange(chain, place, step, life)
        longest = 1  # until it is known how long a step takes
        while step < self.job.num_steps and not self.removed[chain]:
            lengths, draws = self.pieces.plan(step, longest)
            self.inflight[chain] = sum(lengths)
            began = time.perf_counter()
            for _ in range(int(self.engine.faults.stragglers.get(chain, 1))):
                done, rows = self.pieces.run(self.data[self.devices[chain]], place, chain, lengths)
                broken_at = int(done.seen.broken_at)
            took = time.perf_counter() - began
            longest = int(np.clip(SECONDS_OF_A_WINDOW * sum(lengths) / took, 1, 2 * longest))
            place, step = done, step + sum(lengths)
            self.strikes.worker(chain, step)
            if broken_at >= 0:  # what was kept after it broke is no draw
                draws = [draw if draw >= 0 and self.job.kept_steps[draw] <= broken_at else -1 for draw in draws]
            kept = self.kept(chain, rows, draws)
            self.publish(chain, place, step, list(zip(lengths, draws, strict=True)), kept, took)
            if broken_at >= 0:
                self.diverged(chain, place, broken_at)
            if self.pieces.exchanges and step % self.pieces.report_every == 0:
                place = self.exchange(chain, place, step, life)
        if self.pieces.exchanges:
            self.carrier.leave(chain)

    def kept(self, chain: int, rows: Any, draws: list[int]) -> list[Rows]:
        """The draws of a window, on the host."""
        slots = [slot for slot, draw in enumerate(draws) if draw >= 0]
        if not slots:
            return []
        here = jax.device_get(rows)
        if draws[slots[-1]] - draws[slots[0]] == slots[-1] - slots[0] == len(slots) - 1:  # neighbours: one piece
            slots = [slots[0]]
            pieces = [slice(slots[0], slots[0] + sum(draw >= 0 for draw in draws))]
        else:
            pieces = [slice(slot, slot + 1) for slot in slots]
        return [
            Rows(chain, draws[slot], *tree_map(lambda x, p=piece: x[p], (here.draws, here.stats)))
            for slot, piece in zip(slots, pieces, strict=True)
        ]

    def publish(
        self, chain: int, place: Place, step: int, stretches: list[tuple[int, int]], rows: list[Rows], seconds: float
    ) -> None:
        """Tell all others where this worker stands."""
        began = time.perf_counter()
        with self.news:
            if self.stopping:
                raise _Stopped
            now = self.now()
            self.events.extend(Event(Kind.RUN, chain, length, draw, time=now) for length, draw in stretches)
            self.places[chain], self.steps[chain], self.inflight[chain] = place, step, 0
            self.rows.extend(rows)
            self.waiting_bytes += sum(leaf.nbytes for entry in rows for leaf in jax.tree.leaves(entry.draws))
            self.windows.append(chain)
            self.counts.steps += sum(length for length, _ in stretches)
            self.counts.stepping += seconds
            self.last_progress = time.monotonic()
            while self.waiting_bytes > MOST_WAITING_BYTES and not self.stopping:
                self.news.notify_all()
                self.news.wait(1.0)
            self.counts.waiting += time.perf_counter() - began

    def diverged(self, chain: int, place: Place, step: int) -> None:
        with self.lock:
            self.fail(diverged(self.job, chain, place.worker.state, self.centre.state, step))
        raise _Stopped

    # -- its conversation ---------------------------------------------------------------------------------------------

    def join(self, chain: int, place: Place, step: int, life: _Life) -> Place:
        """Begin a life; what is told is adopted (the log's JOIN says both)."""
        payload = self.pieces.payload(place.worker)
        reply = self.until_answered(chain, lambda: self.carrier.join(chain, payload, step))
        life.begin(reply.incarnation, reply.generation, reply.version)
        return self.adopted(chain, place, reply, step, None)

    def exchange(self, chain: int, place: Place, step: int, life: _Life) -> Place:
        """Report, and adopt the answer if it is time for one. Without an answer, go on with the copy there is."""
        began = time.perf_counter()
        wants = life.owes = life.owes or step % self.pieces.refresh_every == 0
        life.seq += 1
        report = self.pieces.report(place.worker, chain, 0)
        message = Message(chain, life.incarnation, life.generation, life.seq, step, report, place.seen)
        reply = None
        for _ in range(ATTEMPTS):
            reply = self.attempt(message)
            if reply is not None:
                break
        else:
            life.unanswered += 1
            with self.lock:  # it may be under way, and come to be applied when the worker is elsewhere
                told = Event(Kind.SEND, chain, time=self.now(), incarnation=life.incarnation, seq=life.seq)
                self.events.append(told)
            if life.unanswered >= self.engine.max_staleness:
                reply = self.until_answered(chain, lambda: self.carrier.exchange(message))
        if reply is not None:
            life.unanswered = 0
            if reply.status is Status.RESYNC:
                place = self.join(chain, place, step, life)
            elif reply.status is Status.FENCED:
                raise HookeanError(f"chain {chain} has begun another life: this one ends")
            elif reply.copy is not None and wants:
                life.owes = False
                if self.is_news(reply, life):
                    life.version = reply.version
                    place = self.adopted(chain, place, reply, step, Event(Kind.ADOPT, chain))
        with self.lock:
            self.counts.exchanging += time.perf_counter() - began
        return place

    @staticmethod
    def is_news(reply: Reply, life: _Life) -> bool:
        return (reply.generation, reply.version) > (life.generation, life.version) or reply.answers

    def attempt(self, message: Message) -> Reply | None:
        try:
            return self.carrier.exchange(message)
        except MessageLost:
            with self.lock:
                self.counts.lost += 1
            return None

    def until_answered(self, chain: int, call: Any) -> Reply:
        """Try until an answer comes, or patience ends."""
        end = time.monotonic() + self.engine.patience
        while not self.stopping:
            try:
                return call()
            except MessageLost:
                with self.lock:
                    self.counts.lost += 1
            if time.monotonic() > end:
                raise StalledError(
                    f"chain {chain} had no answer from the centre for {self.engine.patience:g} s and "
                    f"max_staleness={self.engine.max_staleness} rounds"
                )
            time.sleep(0.001)
        raise _Stopped

    def adopted(self, chain: int, place: Place, reply: Reply, step: int, event: Event | None) -> Place:
        copy = jax.device_put(reply.copy, self.devices[chain])
        place = place._replace(worker=self.pieces.adopt(place.worker, copy, np.int32(step)))
        with self.lock:
            if event is not None:
                box = -1 if reply.answers else -2
                told = event._replace(box=box, time=self.now(), seq=reply.generation, version=reply.version)
                self.events.append(told)
                self.counts.aged(step - 1 - self.asked[chain])
            self.asked[chain] = step
            self.places[chain] = place
        return place
