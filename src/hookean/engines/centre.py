"""The centre as a state machine: who counts, what has been applied, and what each worker is told.

Pure of clocks, threads and disks: every call says what time it is. Given the same calls it does the same, so that its
log replays. The arithmetic of a coupling is in `hookean.coupling`; here are the rules of the conversation.

    join      a worker begins a life (an incarnation) and is told the centre
    exchange  a report is applied at most once for each (worker, incarnation, seq) of a generation, and answered
    leave     a worker stops counting; `expire` does that to those that have been silent for too long
    snapshot, restore    the whole of it; a restored centre begins a new generation, in which workers join again

Messages carry state, not increments (but for stale gradients, where a message that was applied must not be applied
again): a lost report costs nothing, for the next one says more, and its steps are counted with the next.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

from hookean.engines.pieces import Pieces
from hookean.exchange import Copy, Event, Kind, ParallelClock, Report
from hookean.job import Seen
from hookean.telemetry import Telemetry
from hookean.tree import fingerprint
from hookean.types import ArgumentError, Params


class Status(enum.Enum):
    """How a message was taken."""

    OK = "ok"
    DUPLICATE = "duplicate"
    """It had been applied before; the answer is the centre as it is now."""
    FENCED = "fenced"
    """It comes from an earlier life of its worker."""
    RESYNC = "resync"
    """The centre is of another generation, or does not know the worker: join again."""
    REFUSED = "refused"
    """It has NaN or Inf in it."""


class Message(NamedTuple):
    """Worker to centre. `step` counts all steps of the worker, so that nothing is lost with a lost message."""

    worker: int
    incarnation: int
    generation: int
    seq: int
    step: int
    report: Report
    seen: Seen


class Reply(NamedTuple):
    """Centre to worker. (generation, version) orders replies: an older one is not adopted.

    `answers` says that the copy is the answer to a report just applied, and not the centre as it happens to be: there
    are couplings in which these differ.
    """

    status: Status
    incarnation: int
    generation: int
    version: int
    live: int
    copy: Copy | None
    answers: bool = False


@dataclasses.dataclass
class Member:
    """What the centre knows of one worker."""

    incarnation: int = 0
    seq: int = -1
    step: int = 0
    heard: float = 0.0


class Due(NamedTuple):
    """A draw of the server's chain."""

    number: int
    position: Params
    stats: dict[str, Any]


class Centre:
    """The one place where workers meet. Not safe to be called from two threads at once: its owner takes care of that.

    `events` and `draws` fill up with what has happened; the owner takes them out.
    """

    def __init__(self, pieces: Pieces, state: Any, lease: float, snapshot_every: int, telemetry: Telemetry) -> None:
        """All workers count from the start."""
        job = pieces.job
        self.pieces, self.state, self.lease, self.telemetry = pieces, state, lease, telemetry
        self.snapshot_every = snapshot_every
        self.members = [Member() for _ in range(job.chains)]
        self.clock = ParallelClock(set(range(job.chains)))
        self.version = self.generation = 0
        self.events: list[Event] = []
        self.draws: list[Due] = []
        self._key = pieces.key_of(0)
        self._draw_at = (
            {int(step): i for i, step in enumerate(job.kept_steps)} if job.coupling.server_owns_chain else {}
        )
        self._written: dict[str, Any] = {}
        self.write_down()

    # -- what workers say ---------------------------------------------------------------------------------------------

    def join(self, worker: int, payload: Params, step: int, now: float) -> Reply:
        """Begin to count, with no new steps; older lives are fenced from now on."""
        told, known = fingerprint(payload), self.pieces.fingerprint
        if told != known:
            raise ArgumentError(f"worker {worker}", f"has {told}, the centre has {known}", "Give both the same model")
        member = self.members[worker]
        self.members[worker] = Member(member.incarnation + 1, -1, step, now)
        self.clock.count(worker, True)
        self.state = self.pieces.join(self.state, worker, payload)
        self._changed(Kind.JOIN, worker, 0, now)
        return self._reply(Status.OK, worker)

    def exchange(self, message: Message, now: float, is_finite: bool) -> Reply:
        """Take a report: apply it if it is news, and answer."""
        worker, member = message.worker, self.members[message.worker]
        if message.incarnation < member.incarnation:
            self.telemetry.fenced += 1
            return self._reply(Status.FENCED, worker, copy=False)
        if message.generation != self.generation or message.incarnation > member.incarnation:
            self.telemetry.resyncs += 1
            return self._reply(Status.RESYNC, worker, copy=False)
        member.heard = now
        if message.seq <= member.seq:
            self.telemetry.duplicates += 1
            return self._reply(Status.DUPLICATE, worker)
        if not is_finite:
            self.telemetry.refused += 1
            return self._reply(Status.REFUSED, worker, copy=False)
        served = self.pieces.job.coupling.server_owns_chain
        # A worker that had left the mean counts again and starts at no new steps.
        steps = (1 if served else message.step - member.step) if worker in self.clock.live else 0
        self.clock.count(worker, True)
        report = message.report._replace(steps=steps)
        self.state, copy = self.pieces.receive(self.state, report, self._key)
        member.seq, member.step = message.seq, message.step
        draw = -1
        # Workers end one by one, and what the last of them report is beyond the end: there a longer run goes on.
        for tick in self.clock.tick(steps if served and self.clock.ticks < self.pieces.job.num_steps else 0):
            draw = self._draw_at.get(tick, draw)
        if draw >= 0:
            self.draws.append(Due(draw, *self.pieces.served(self.state, message.seen)))
        self.telemetry.exchanges += 1
        self.telemetry.bytes += 2 * self.pieces.message_bytes
        self._changed(Kind.REPORT, worker, steps, now, draw)
        return self._reply(Status.OK, worker)._replace(copy=copy, answers=True)

    def leave(self, worker: int, now: float) -> None:
        """Stop counting."""
        if worker in self.clock.live:
            self.clock.count(worker, False)
            self.state = self.pieces.leave(self.state, worker)
            self._changed(Kind.LEAVE, worker, 0, now)

    def expire(self, now: float, silent: set[int]) -> list[int]:
        """Let those of `silent` workers leave whose lease has ended."""
        gone = [w for w in sorted(silent & self.clock.live) if now >= self.members[w].heard + self.lease]
        for worker in gone:
            self.leave(worker, now)
        self.telemetry.evictions += len(gone)
        return gone

    def _changed(self, kind: Kind, worker: int, steps: int, now: float, draw: int = -1) -> None:
        self.version += 1
        member = self.members[worker]
        self.events.append(Event(kind, worker, steps, draw, -1, now, member.incarnation, member.seq, self.version))
        if self.version % self.snapshot_every == 0:
            self.write_down()

    def _reply(self, status: Status, worker: int, copy: bool = True) -> Reply:
        told = self.pieces.copy(self.state) if copy else None
        incarnation = self.members[worker].incarnation
        return Reply(status, incarnation, self.generation, self.version, len(self.clock.live), told)

    # -- the whole of it ----------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[Any, dict[str, Any]]:
        """State as arrays, and all else as plain values."""
        return self.pieces.duplicate(self.state), self.facts()

    def facts(self) -> dict[str, Any]:
        """All that is not arrays."""
        return {
            "version": self.version,
            "generation": self.generation,
            "members": [dataclasses.asdict(member) for member in self.members],
            "live": sorted(self.clock.live),
            "ticks": self.clock.ticks,
            "credit": self.clock.credit,
        }

    def restore(self, state: Any, facts: dict[str, Any]) -> None:
        """Become what a snapshot tells, as if nothing had been before."""
        self.events.clear()
        self.draws.clear()
        self.state = state
        self.version, self.generation = facts["version"], facts["generation"]
        self.members = [Member(**member) for member in facts["members"]]
        self.clock = ParallelClock(set(facts["live"]), facts["ticks"], facts["credit"])
        self._key = self.pieces.key_of(self.generation)
        self.write_down()

    def write_down(self) -> None:
        """Keep a snapshot to fall back to."""
        state, facts = self.snapshot()
        self._written = {"state": state, "facts": facts}
        self.events.append(Event(Kind.SNAPSHOT, version=self.version))

    def rebuild(self, now: float) -> int:
        """Fall back to the last snapshot and begin a new generation; how many versions are forgotten.

        Lives go on counting from where they are, so that nothing that was sent before can be taken for news. Who has
        left since the snapshot leaves once more, for nobody would hear of it again.
        """
        forgotten, generation = self.version - self._written["facts"]["version"], self.generation + 1
        lives = [member.incarnation for member in self.members]
        heard, live = [member.heard for member in self.members], set(self.clock.live)
        facts = {**self._written["facts"], "generation": generation}
        self.state = self.pieces.duplicate(self._written["state"])
        self.version = facts["version"]
        self.generation = generation
        self.members = [
            Member(**{**member, "incarnation": life, "heard": last})
            for member, life, last in zip(facts["members"], lives, heard, strict=True)
        ]
        self.clock = ParallelClock(set(facts["live"]), facts["ticks"], facts["credit"])
        self._key = self.pieces.key_of(generation)
        self.telemetry.rebuilds += 1
        self.telemetry.rolled_back += forgotten
        self.events.append(Event(Kind.REBUILD, steps=forgotten, time=now, seq=generation, version=self.version))
        self.write_down()
        for worker in sorted(self.clock.live - live):
            self.leave(worker, now)
        return forgotten
