"""The protocol of the centre, call by call, without threads: who counts, what is applied, and what each is told.

No law is tested here, and nothing is a matter of chance: every test is exact, and the random ones are seeded.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hookean as hk
from hookean.engines.centre import Centre, Message, Reply, Status
from hookean.engines.faults import Faults, Faulty, InjectedFault, MessageLost, Strikes
from hookean.engines.pieces import Pieces, Place, replay
from hookean.exchange import Event, Kind, Report
from hookean.job import Job, new_seen
from hookean.preparation import prepare
from hookean.telemetry import Telemetry

TARGET = hk.Target.from_log_density(lambda x: -jnp.sum(x**2) / 2 - jnp.sum(x**4) / 8)
COUPLINGS: dict[str, Any] = {
    "elastic": hk.Elastic(1.0, 2),
    "walking": hk.Elastic(1.5, 2),
    "stale gradient": hk.StaleGradient(2, 2),
    "easgd": hk.EASGD(0.6, 2),
    "eamsgd": hk.EAMSGD(0.6, 2),
    "as printed": hk.ElasticAsPrinted(0.5, 2),
}

LEAPS = {"elastic": 2, "walking": 2, "as printed": 2}
"""How many steps the centre takes at least, where it waits for a round."""


def job_of(coupling: Any, chains: int = 3, num_steps: int = 60) -> Job:
    temperature = 0.0 if coupling.optimises else 1.0
    first_order = isinstance(coupling, hk.EASGD) and not isinstance(coupling, hk.EAMSGD)
    dynamics: Any = hk.SGHMC(0.1, 1.0, temperature=temperature)
    if first_order:
        dynamics = hk.SGLD(0.05, temperature=temperature)
    if coupling is COUPLINGS["walking"]:
        dynamics = hk.PSGLD(0.05)  # its centre has no leap
    return prepare(
        TARGET, lambda key: jax.random.normal(key, (4,)), dynamics, coupling, chains, num_steps, 0, 3, hk.Simulated(), 0
    )


@functools.cache
def opened(name: str) -> tuple[Pieces, list[Place], Any]:
    """Compiled once for all tests."""
    pieces = Pieces(job_of(COUPLINGS[name]))
    return pieces, *pieces.open()


def centre_of(name: str, snapshot_every: int = 1000) -> Centre:
    pieces, _, state = opened(name)
    return Centre(pieces, pieces.duplicate(state), 10.0, snapshot_every, Telemetry())


@pytest.fixture
def centre() -> Centre:
    return centre_of("elastic")


def message(worker: int, seq: int, step: int, value: float = 1.0, incarnation: int = 0, generation: int = 0) -> Message:
    payload, number = np.full(4, value, np.float32), np.int32(worker)
    seen = jax.tree.map(lambda leaf: leaf[0], new_seen(1))
    return Message(worker, incarnation, generation, seq, step, Report(number, payload, np.int32(0), np.int32(0)), seen)


def tell(centre: Centre, *args: Any, now: float = 0.0, is_finite: bool = True, **kwargs: Any) -> Reply:
    return centre.exchange(message(*args, **kwargs), now, is_finite)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


# -- one rule at a time ------------------------------------------------------------------------------------------------


def test_a_report_is_applied_once_and_a_duplicate_is_told_the_centre_as_it_is(centre: Centre) -> None:
    first = tell(centre, 0, 0, 2)
    assert (first.status, first.version, first.live, first.answers) == (Status.OK, 1, 3, True)
    tell(centre, 1, 0, 2, value=-3.0)
    before = centre.state
    again = tell(centre, 0, 0, 2, value=99.0)
    assert (again.status, again.version, again.answers) == (Status.DUPLICATE, 2, False)
    assert centre.state is before and centre.telemetry.duplicates == 1 and centre.telemetry.exchanges == 2
    assert bits(again.copy) == bits(centre.pieces.copy(centre.state)) != bits(first.copy)
    assert tell(centre, 0, 5, 8).status is Status.OK  # numbers may be skipped: what they said, this one says
    assert tell(centre, 0, 4, 6).status is Status.DUPLICATE


def test_an_earlier_life_is_fenced(centre: Centre) -> None:
    reply = centre.join(0, jnp.zeros(4), 10, 0.0)
    assert (reply.status, reply.incarnation, reply.version) == (Status.OK, 1, 1)
    before = centre.state
    old = tell(centre, 0, 7, 12)
    assert (old.status, old.copy, old.incarnation) == (Status.FENCED, None, 1)
    assert centre.state is before and centre.telemetry.fenced == 1
    assert tell(centre, 0, 0, 12, incarnation=1).status is Status.OK
    assert tell(centre, 0, 1, 14, incarnation=2).status is Status.RESYNC  # a life that this centre knows nothing of


def test_a_rebuilt_centre_falls_back_and_all_join_again(centre: Centre) -> None:
    tell(centre, 0, 0, 2)
    centre.write_down()
    state, credit = bits(centre.state), centre.clock.credit
    for seq in range(1, 4):
        tell(centre, 0, seq, 2 + 2 * seq, value=5.0)
    centre.join(1, jnp.ones(4), 0, 0.0)
    assert centre.rebuild(3.0) == 4
    assert (centre.version, centre.generation, centre.clock.credit) == (1, 1, credit)
    assert bits(centre.state) == state
    assert (centre.telemetry.rebuilds, centre.telemetry.rolled_back) == (1, 4)
    late = tell(centre, 0, 4, 10)
    assert (late.status, late.generation, late.copy) == (Status.RESYNC, 1, None)
    assert tell(centre, 1, 0, 2).status is Status.FENCED  # lives are not forgotten
    assert centre.join(0, jnp.ones(4), 10, 0.0).incarnation == 1
    assert tell(centre, 0, 0, 12, incarnation=1, generation=1).status is Status.OK
    rebuilt = next(event for event in centre.events if event.kind is Kind.REBUILD)
    assert (rebuilt.steps, rebuilt.seq, rebuilt.version, rebuilt.time) == (4, 1, 1, 3.0)


def test_a_new_generation_has_noise_of_its_own(centre: Centre) -> None:
    answers = []
    for generation in range(2):
        payloads = [tell(centre, w, generation, 2 * generation + 2, generation=generation) for w in range(3)]
        answers.append(payloads[-1])
        if generation == 0:
            centre.rebuild(0.0)
            for worker in range(3):
                centre.members[worker].seq = 0  # as if nothing but the generation were another
                centre.members[worker].step = 2
    assert answers[0].version == answers[1].version
    assert bits(answers[0].copy.position) != bits(answers[1].copy.position)


def test_who_has_left_stays_away_when_the_centre_falls_back(centre: Centre) -> None:
    """A worker that is done will not say so again, and would hold the others back until its lease ends."""
    centre.leave(2, 1.0)
    assert centre.clock.live == {0, 1}
    centre.rebuild(2.0)
    assert centre.clock.live == {0, 1} and np.asarray(centre.state.live).tolist() == [True, True, False]
    kinds = [event.kind for event in centre.events]
    assert kinds[-3:] == [Kind.REBUILD, Kind.SNAPSHOT, Kind.LEAVE]


def test_nan_is_refused_and_changes_nothing(centre: Centre) -> None:
    tell(centre, 0, 0, 2)
    state, before, events = centre.state, centre.facts(), list(centre.events)
    reply = tell(centre, 1, 0, 2, value=np.nan, is_finite=False)
    assert (reply.status, reply.copy, reply.version) == (Status.REFUSED, None, 1)
    assert centre.state is state and centre.facts() == before and centre.events == events
    assert centre.telemetry.refused == 1 and centre.telemetry.exchanges == 1
    later = tell(centre, 1, 1, 4)  # the next one is welcome, and counts all steps
    assert later.status is Status.OK and centre.events[-1].steps == 4


def test_leases_end_and_begin_again(centre: Centre) -> None:
    tell(centre, 0, 0, 2, now=6.0)
    tell(centre, 1, 0, 2, now=3.0, is_finite=False)  # refused, but not silent
    assert centre.expire(9.9, {0, 1, 2}) == []
    assert centre.expire(12.9, {0, 1, 2}) == [2] and centre.telemetry.evictions == 1
    assert centre.expire(12.9, {0, 1, 2}) == []
    assert centre.expire(13.0, {0, 2}) == [] and centre.expire(13.0, {0, 1, 2}) == [1]
    assert centre.state.live.tolist() == [True, False, False]
    back = tell(centre, 2, 0, 40, now=14.0)
    assert (back.status, back.live) == (Status.OK, 2)
    assert centre.events[-1].steps == 0 and centre.clock.live == {0, 2}  # it starts at no new steps
    assert tell(centre, 2, 1, 42, now=15.0).status is Status.OK and centre.events[-1].steps == 2


def test_leaving_twice_is_leaving_once(centre: Centre) -> None:
    centre.leave(0, 1.5)
    version = centre.version
    centre.leave(0, 2.0)
    assert centre.version == version and [e.time for e in centre.events if e.kind is Kind.LEAVE] == [1.5]


def test_another_model_is_refused_at_the_door(centre: Centre) -> None:
    for payload in (jnp.zeros(5), jnp.zeros(4, jnp.int32), {"x": jnp.zeros(4)}):
        with pytest.raises(hk.ArgumentError, match="Give both the same model"):
            centre.join(0, payload, 0, 0.0)
    assert centre.version == 0 and centre.members[0].incarnation == 0


def test_the_clock_counts_new_steps_over_those_that_count(centre: Centre) -> None:
    """d new steps are worth d / K_live; lost reports cost nothing; a slow worker and a joiner bring no flood."""

    def parallel() -> float:
        return int(centre.state.clock) + int(centre.state.credit) / len(centre.clock.live)

    tell(centre, 0, 0, 2)
    assert parallel() == pytest.approx(2 / 3)
    tell(centre, 0, 3, 8)  # three reports were lost
    assert parallel() == pytest.approx(8 / 3)
    centre.join(2, jnp.zeros(4), 5000, 0.0)  # it has taken 5,000 steps that nobody counted
    assert parallel() == pytest.approx(8 / 3)
    tell(centre, 2, 0, 5002, incarnation=1)
    assert parallel() == pytest.approx(10 / 3)
    tell(centre, 1, 0, 2)  # the slow one: its own steps, not the time that has passed
    assert parallel() == pytest.approx(4)
    centre.leave(1, 0.0)
    tell(centre, 0, 4, 10)
    assert parallel() == pytest.approx(5)
    steps = sum(event.steps for event in centre.events if event.kind is Kind.REPORT)
    assert steps == 2 + 6 + 2 + 2 + 2


def test_a_snapshot_is_the_whole_of_it(centre: Centre) -> None:
    for seq in range(3):
        for worker in range(3):
            tell(centre, worker, seq, 2 * seq + 2, value=worker)
    centre.leave(1, 0.0)
    centre.join(0, jnp.ones(4), 6, 0.0)
    centre.rebuild(0.0)
    tell(centre, 2, 3, 8)
    state, facts = centre.snapshot()
    facts = json.loads(json.dumps(facts))  # on disk they are JSON
    other = centre_of("elastic")
    other.restore(state, facts)
    assert other.snapshot()[1] == facts
    assert [event.kind for event in other.events] == [Kind.SNAPSHOT] and other.events[0].version == centre.version
    for one in (centre, other):
        reply = one.join(2, jnp.ones(4), 8, 0.0)
        answer = tell(one, 2, 0, 12, incarnation=reply.incarnation, generation=reply.generation)
        assert answer.status is Status.OK
    assert bits(centre.state) == bits(other.state) and centre.snapshot()[1] == other.snapshot()[1]


def test_it_writes_itself_down_every_so_many_versions() -> None:
    centre = centre_of("elastic", snapshot_every=4)
    for seq in range(11):
        tell(centre, 0, seq, 2 * seq + 2)
    assert [event.version for event in centre.events if event.kind is Kind.SNAPSHOT] == [0, 4, 8]
    assert centre.rebuild(0.0) == 3 and centre.version == 8


def test_of_stale_gradients_each_counts_one_and_draws_hang_on_ticks() -> None:
    """Three workers, draws every 3 ticks: each is due with the report that completes its tick, in whatever order."""
    centre = centre_of("stale gradient")
    kept = centre.pieces.job.kept_steps.tolist()
    seqs, order = [0, 0, 0], [0, 0, 1, 2, 1, 0, 2, 2, 2]  # nine reports are three ticks
    due = []
    for _ in range(4):
        for worker in order:
            reply = tell(centre, worker, seqs[worker], 10 * seqs[worker] + 7, value=0.1)  # whatever it says of steps
            seqs[worker] += 1
            assert centre.events[-1].steps == 1 or centre.events[-1].kind is Kind.SNAPSHOT
            assert reply.copy is not None
            tell(centre, worker, seqs[worker] - 1, 0)  # a gradient must not be applied again
        due.append(centre.clock.ticks)
    assert due == [3, 6, 9, 12] and centre.clock.credit == 0 and centre.telemetry.duplicates == 36
    assert [entry.number for entry in centre.draws] == [kept.index(tick) for tick in (3, 6, 9, 12)]
    assert int(centre.state.version) == 18  # wait_for=2
    assert int(centre.state.histogram.sum()) == 36


# -- random conversations ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """The rules once more, in plain Python."""

    chains: int
    lease: float
    snapshot_every: int
    served: bool
    leap: int
    version: int = 0
    generation: int = 0
    ticks: int = 0
    credit: int = 0
    written: Any = None

    def __post_init__(self) -> None:
        self.lives = [0] * self.chains
        self.heard = [0.0] * self.chains
        self.seqs, self.steps = [-1] * self.chains, [0] * self.chains
        self.live = set(range(self.chains))
        self.applied: set[tuple[int, int, int, int]] = set()
        self.write()

    FORGOTTEN = ("version", "ticks", "credit", "seqs", "steps", "live")

    def write(self) -> None:
        self.written = {name: copy.deepcopy(getattr(self, name)) for name in self.FORGOTTEN}

    def changed(self) -> None:
        self.version += 1
        if self.version % self.snapshot_every == 0:
            self.write()

    def count(self, worker: int, counts: bool) -> None:
        before = max(len(self.live), 1)
        self.live = self.live | {worker} if counts else self.live - {worker}
        self.credit = self.credit * len(self.live) // before

    def join(self, worker: int, step: int, now: float) -> None:
        self.lives[worker] += 1
        self.seqs[worker], self.steps[worker], self.heard[worker] = -1, step, now
        self.count(worker, True)
        self.changed()

    def leave(self, worker: int) -> None:
        if worker in self.live:
            self.count(worker, False)
            self.changed()

    def exchange(self, m: Message, now: float, is_finite: bool) -> Status:
        if m.incarnation < self.lives[m.worker]:
            return Status.FENCED
        if (m.generation, m.incarnation) != (self.generation, self.lives[m.worker]):
            return Status.RESYNC
        self.heard[m.worker] = now
        if m.seq <= self.seqs[m.worker]:
            return Status.DUPLICATE
        if not is_finite:
            return Status.REFUSED
        key = (m.worker, m.incarnation, m.seq, m.generation)
        assert key not in self.applied
        self.applied.add(key)
        steps = (1 if self.served else m.step - self.steps[m.worker]) if m.worker in self.live else 0
        self.count(m.worker, True)
        self.credit += steps
        whole = self.credit // len(self.live)
        if whole >= self.leap:  # it takes its steps a round at a time
            self.ticks += whole
            self.credit -= whole * len(self.live)
        self.seqs[m.worker], self.steps[m.worker] = m.seq, m.step
        self.changed()
        return Status.OK

    def rebuild(self) -> int:
        forgotten, live = self.version - self.written["version"], self.live
        for name, value in copy.deepcopy(self.written).items():
            setattr(self, name, value)
        self.generation += 1
        self.write()
        for worker in sorted(self.live - live):
            self.leave(worker)
        return forgotten


class Conversation:
    """Workers that really step, their centre, and chance that decides who does what next. All in one thread."""

    def __init__(self, name: str, seed: int) -> None:
        self.pieces, places, state = opened(name)
        self.job, self.places = self.pieces.job, list(places)
        self.telemetry = Telemetry()
        self.centre = Centre(self.pieces, self.pieces.duplicate(state), 8.0, 7, self.telemetry)
        self.model = Model(self.job.chains, 8.0, 7, self.job.coupling.server_owns_chain, LEAPS.get(name, 1))
        self.random = np.random.default_rng(seed)
        self.now = 0.0
        self.lives = [(0, 0)] * self.job.chains
        self.seqs = [-1] * self.job.chains
        self.steps = [0] * self.job.chains
        self.old: list[Message] = []
        self.met: list[Status] = []
        self.draws: dict[tuple[int, int], bytes] = {}

    def act(self) -> None:
        self.now += self.random.exponential(0.5)
        worker = int(self.random.integers(self.job.chains))
        actions = [self.step, self.again, self.born, self.goes, self.fall, self.wait]
        self.random.choice(np.array(actions, object), p=[0.72, 0.14, 0.05, 0.03, 0.02, 0.04])(worker)
        self.check()

    def check(self) -> None:
        model, centre = self.model, self.centre
        assert (centre.version, centre.generation) == (model.version, model.generation)
        assert centre.clock.live == model.live
        assert [m.incarnation for m in centre.members] == model.lives
        assert np.flatnonzero(np.asarray(centre.state.live)).tolist() == sorted(model.live)
        if model.served:
            assert (centre.clock.ticks, centre.clock.credit) == (model.ticks, model.credit)
        else:
            assert (int(centre.state.clock), int(centre.state.credit)) == (model.ticks, model.credit)

    def step(self, worker: int) -> None:
        """A window, and its report: lost on the way there or back, poisoned, or answered."""
        lengths, draws = self.pieces.plan(self.steps[worker], 100)
        if not lengths:
            return
        self.places[worker], rows = self.pieces.run(None, self.places[worker], worker, lengths)
        self.steps[worker] += sum(lengths)
        self.centre.events.extend(
            Event(Kind.RUN, worker, length, draw) for length, draw in zip(lengths, draws, strict=True)
        )
        for slot, draw in enumerate(draws):
            if draw >= 0:
                self.draws[worker, draw] = np.asarray(rows.draws[slot]).tobytes()
        if self.steps[worker] % self.pieces.report_every:
            return
        self.seqs[worker] += 1
        report = self.pieces.report(self.places[worker].worker, worker, 0)
        life, generation = self.lives[worker]
        told = Message(
            worker, life, generation, self.seqs[worker], self.steps[worker], report, self.places[worker].seen
        )
        self.old.append(told)
        fate = self.random.random()
        if fate < 0.15:  # it may come later, out of turn
            self.centre.events.append(Event(Kind.SEND, worker, incarnation=life, seq=told.seq))
            return
        if fate < 0.2:
            told = told._replace(report=told.report._replace(payload=jnp.full(4, jnp.nan)))
        reply = self.deliver(told, is_finite=not 0.15 <= fate < 0.2)
        if fate > 0.95:
            return
        if reply.status is Status.RESYNC:
            self.born(worker)
        elif reply.copy is not None and self.steps[worker] % self.pieces.refresh_every == 0:
            self.adopt(worker, reply)

    def adopt(self, worker: int, reply: Reply) -> None:
        place, step = self.places[worker], np.int32(self.steps[worker])
        self.places[worker] = place._replace(worker=self.pieces.adopt(place.worker, reply.copy, step))
        box = -1 if reply.answers else -2
        self.centre.events.append(Event(Kind.ADOPT, worker, box=box, seq=reply.generation, version=reply.version))

    def deliver(self, told: Message, is_finite: bool) -> Reply:
        state, wanted = self.centre.state, self.model.exchange(told, self.now, is_finite)
        reply = self.centre.exchange(told, self.now, is_finite)
        assert reply.status is wanted
        assert (reply.copy is not None) == (wanted in (Status.OK, Status.DUPLICATE))
        assert (self.centre.state is not state) == (wanted is Status.OK)
        self.met.append(wanted)
        return reply

    def again(self, worker: int) -> None:
        """Any message of before arrives, perhaps once more. Nobody hears the answer."""
        if self.old:
            recent = self.old[-12:]
            self.deliver(recent[int(self.random.integers(len(recent)))], True)

    def born(self, worker: int) -> None:
        payload = self.pieces.payload(self.places[worker].worker)
        reply = self.centre.join(worker, payload, self.steps[worker], self.now)
        self.model.join(worker, self.steps[worker], self.now)
        assert (reply.incarnation, reply.generation) == (self.model.lives[worker], self.model.generation)
        self.lives[worker], self.seqs[worker] = (reply.incarnation, reply.generation), -1
        place, step = self.places[worker], np.int32(self.steps[worker])
        self.places[worker] = place._replace(worker=self.pieces.adopt(place.worker, reply.copy, step))

    def goes(self, worker: int) -> None:
        self.centre.leave(worker, self.now)
        self.model.leave(worker)

    def fall(self, worker: int) -> None:
        assert self.centre.rebuild(self.now) == self.model.rebuild() <= 7
        self.met.append(Status.RESYNC)

    def wait(self, worker: int) -> None:
        self.now += 4.0
        gone = [w for w in sorted(self.model.live) if self.now >= self.model.heard[w] + self.model.lease]
        assert self.centre.expire(self.now, set(range(self.job.chains))) == gone
        for each in gone:
            self.model.leave(each)


@pytest.mark.parametrize("name", COUPLINGS)
def test_random_conversations_keep_the_rules_and_replay(name: str) -> None:
    """Every answer, the clock and who counts, beside a model in plain Python; and the log gives the same bits again."""
    served = COUPLINGS[name].server_owns_chain
    met: set[Status] = set()
    for seed in range(1):
        talk = Conversation(name, seed)
        for _ in range(250):
            talk.act()
        met |= set(talk.met)
        log = list(talk.centre.events)
        found: dict[tuple[int, int], bytes] = {}

        def keep(chain: int, draw: int, position: Any, stats: Any, found: Any = found) -> None:
            found[chain, draw] = np.asarray(position).tobytes()

        places, state = replay(talk.job, log, keep)
        if served:
            wanted = {(0, due.number): np.asarray(due.position).tobytes() for due in talk.centre.draws}
        else:
            wanted = talk.draws
        assert wanted and found == wanted
        assert bits(state) == bits(talk.centre.state)
        assert bits([place.worker for place in places]) == bits([place.worker for place in talk.places])
        assert_versions_grow(log)
        times = [event.time for event in log if event.kind in (Kind.REPORT, Kind.JOIN, Kind.LEAVE)]
        assert times == sorted(times) and times[0] > 0
    assert met == set(Status)


def assert_versions_grow(log: list[Event]) -> None:
    """By one with every change, within a generation; each report at most once."""
    version, taken, generation = 0, set(), 0
    for event in log:
        if event.kind in (Kind.REPORT, Kind.JOIN, Kind.LEAVE):
            assert event.version == version + 1
            version += 1
        if event.kind is Kind.REBUILD:
            assert event.seq == generation + 1 and event.version == version - event.steps
            version, generation = event.version, event.seq
        if event.kind is Kind.REPORT:
            key = (event.worker, event.incarnation, event.seq, generation)
            assert key not in taken
            taken.add(key)


# -- faults on purpose -------------------------------------------------------------------------------------------------


def test_strikes_come_once_each_at_their_place() -> None:
    strikes = Strikes(Faults(worker_crashes=[(1, 5), (0, 3), (1, 5)], centre_crashes=[4]))
    strikes.worker(0, 2)
    for worker, step in ((0, 3), (1, 8), (1, 8)):
        with pytest.raises(InjectedFault, match=f"worker {worker}"):
            strikes.worker(worker, step)
        strikes.worker(0, 100)
    strikes.worker(1, 100)
    strikes.centre(3)
    with pytest.raises(InjectedFault, match="version 4"):
        strikes.centre(6)
    strikes.centre(100)


class Ear:
    """A carrier that only listens."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def exchange(self, message: Any) -> Any:
        self.heard.append(message)
        return message

    def join(self, worker: int, payload: Any, step: int) -> Any:
        self.heard.append(("join", worker))
        return worker

    def leave(self, worker: int) -> None:
        self.heard.append(("leave", worker))


@pytest.mark.parametrize("fault", ["loss", "duplication", "reordering", "delay"])
def test_messages_go_wrong_as_often_as_asked_for(fault: str) -> None:
    """2,000 messages at 10 %: within 5 standard deviations (67), which the seed fixes."""
    ear = Ear()
    faulty = Faulty(ear, Faults(seed=3, **{fault: 0.1}), 2)
    sent = [message(1, 0, 0)._replace(seq=seq) for seq in range(2000)]
    lost = 0
    for one in sent:
        try:
            assert faulty.exchange(one).seq == one.seq
        except MessageLost:
            lost += 1
    seqs = [one.seq for one in ear.heard]
    arrived = {"loss": 1900, "duplication": 2200, "reordering": 2200, "delay": 2000}[fault]
    assert abs(len(seqs) - arrived) < (50 if fault == "loss" else 67 if fault != "delay" else 2)
    assert (lost > 130) == (fault in ("loss", "delay"))
    assert (seqs != sorted(seqs)) == (fault == "reordering")


def test_one_workers_faults_do_not_depend_on_anothers_pace() -> None:
    def fates(others: int) -> list[bool]:
        faulty, found = Faulty(Ear(), Faults(seed=1, loss=0.3, delay=0.2, duplication=0.2), 2), []
        for seq in range(50):
            for worker in [1] * others + [0]:
                try:
                    faulty.exchange(message(worker, seq, 2))
                    lost = False
                except MessageLost:
                    lost = True
                if worker == 0:
                    found.append(lost)
        return found

    assert fates(0) == fates(3) and len(set(fates(0))) == 2


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"loss": 1.0}, "loss"),
        ({"delay": -0.1}, "delay"),
        ({"worker_crashes": [(3, 5)]}, "worker 3 of 3"),
        ({"nans": [(-1, 5)]}, "worker -1 of 3"),
        ({"stragglers": {7: 2}}, "worker 7 of 3"),
        ({"stragglers": {0: 0}}, "stragglers"),
        ({"stragglers": {0: 1.5}}, "stragglers"),
    ],
)
def test_faults_that_cannot_be_are_refused(faults: dict[str, Any], words: str) -> None:
    with pytest.raises(hk.ArgumentError, match=words):
        hk.Threads(faults=Faults(**faults)).check(3)


def test_a_nan_is_put_into_one_report() -> None:
    ear = Ear()
    faulty = Faulty(ear, Faults(nans=[(1, 4)]), 3)
    for worker, step in ((0, 4), (1, 2), (1, 4), (1, 6)):
        faulty.exchange(message(worker, step, step))
    assert [bool(jnp.isnan(m.report.payload).all()) for m in ear.heard] == [False, False, True, False]
