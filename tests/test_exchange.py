"""The protocol of exchanges: what is sent, and the log of who does what in which order."""

from __future__ import annotations

import itertools
import math
import pickle
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hookean as hk
from hookean.exchange import Copy, Event, Kind, Report, Rhythm, num_boxes, timeline
from hookean.random import Noise

EVERY_4 = Rhythm(4, 4)


def every_step(num_steps: int) -> np.ndarray:
    return np.arange(1, num_steps + 1)


def log_of(
    scenario: hk.Scenario,
    workers: int = 1,
    num_steps: int = 20,
    rhythm: Rhythm | None = EVERY_4,
    **others: object,
) -> list[Event]:
    scenario.check(workers)
    return timeline(scenario, workers, num_steps, every_step(num_steps), rhythm, **others)  # type: ignore[arg-type]


def of_kind(log: list[Event], kind: Kind, worker: int | None = None) -> list[Event]:
    return [event for event in log if event.kind is kind and worker in (None, event.worker)]


class Audit:
    """Goes through a log with the eyes of workers, centre and letter boxes, and complains of what cannot be."""

    def __init__(self, scenario: hk.Scenario, workers: int, rhythm: Rhythm, server_owns_chain: bool) -> None:
        self.scenario, self.rhythm, self.server_owns_chain = scenario, rhythm, server_owns_chain
        self.workers = range(workers)
        self.step = [0] * workers
        self.reported = [0] * workers
        self.runs: list[list[int]] = [[] for _ in self.workers]  # steps of which each worker's state is made
        self.draws: list[dict[int, int]] = [{} for _ in self.workers]
        self.server_draws: list[int] = []
        self.live = set(self.workers)
        self.boxes: dict[int, tuple[str, int, int]] = {}  # sent | received | adopted, by whom, at which step
        self.ages: list[int] = []
        self.time = 0.0
        self.clock, self.rounded_away = Fraction(0), Fraction(0)
        self.sent_steps: dict[int, int] = {}

    def see(self, log: list[Event]) -> Audit:
        for event in log:
            assert event.time >= self.time, f"{event} goes back in time"
            self.time = event.time
            getattr(self, event.kind.name.lower())(event)
        return self

    def run(self, event: Event) -> None:
        w = event.worker
        assert event.steps > 0
        self.runs[w] += range(self.step[w], self.step[w] + event.steps)
        self.step[w] += event.steps
        if event.draw >= 0:
            assert not self.server_owns_chain and event.draw not in self.draws[w]
            self.draws[w][event.draw] = self.step[w]

    def send(self, event: Event) -> None:
        w = event.worker
        assert event.steps == self.step[w] - self.reported[w] > 0, "a report counts the steps since the last one"
        assert self.boxes.get(event.box, ("adopted", 0, 0))[0] != "sent", "the box holds a report nobody has read"
        self.boxes[event.box] = ("sent", w, self.step[w])
        self.reported[w] = self.step[w]
        self.sent_steps[event.box] = event.steps

    def receive(self, event: Event) -> None:
        state, w, step = self.boxes[event.box]
        assert (state, w) == ("sent", event.worker), "received before it was sent, twice, or somebody else's"
        self.boxes[event.box] = ("received", w, step)
        assert event.steps == (self.sent_steps[event.box] if w in self.live else 0)
        self.count(self.live | {w})
        self.clock += Fraction(event.steps, len(self.live))
        if event.draw >= 0:
            assert self.server_owns_chain
            self.server_draws.append(event.draw)

    def adopt(self, event: Event) -> None:
        state, w, step = self.boxes[event.box]
        assert (state, w) == ("received", event.worker), "there is no answer for this worker in the box"
        assert event.steps == self.step[w] - step
        assert event.steps <= self.rhythm.refresh * self.scenario.max_staleness
        self.ages.append(event.steps)
        self.boxes[event.box] = ("adopted", w, step)

    def leave(self, event: Event) -> None:
        assert event.worker in self.live
        self.count(self.live - {event.worker})

    def join(self, event: Event) -> None:
        self.count(self.live | {event.worker})

    def count(self, live: set[int]) -> None:
        """A change of K_live rounds away less than one report's worth of the centre's clock."""
        if live != self.live:
            self.rounded_away += Fraction(1, max(len(live), 1))
        self.live = live

    def restore(self, event: Event) -> None:
        w = event.worker
        assert event.steps == self.step[w] - self.reported[w], "back to the last report"
        del self.runs[w][len(self.runs[w]) - event.steps :]
        self.step[w] = self.reported[w]
        self.draws[w] = {draw: step for draw, step in self.draws[w].items() if step <= self.step[w]}

    def finished(self, num_steps: int) -> set[int]:
        return {w for w in self.workers if self.step[w] == num_steps}


def test_a_log_of_one_worker_by_hand() -> None:
    """Steps take 1, messages 2.5: asked at 4, heard at 6.5, answered at 9; the report due at 8 goes out at 9."""
    log = log_of(hk.Scenario(latency=2.5), num_steps=10)
    told = [(e.kind, e.steps, e.box, e.time) for e in log if e.kind is not Kind.RUN]
    assert told == [
        (Kind.SEND, 4, 0, 4.0),
        (Kind.RECEIVE, 4, 0, 6.5),
        (Kind.SEND, 5, 1, 9.0),
        (Kind.ADOPT, 5, 0, 9.0),
        (Kind.RECEIVE, 5, 1, 11.5),
        (Kind.ADOPT, 1, 1, 14.0),
        (Kind.LEAVE, 0, -1, 14.0),
    ]
    assert [(e.steps, e.draw) for e in of_kind(log, Kind.RUN)] == [(1, draw) for draw in range(10)]


def test_a_late_answer_is_waited_for() -> None:
    """Latency 10, asked at 4: after 4 * 2 steps without an answer the worker stands still until 24."""
    log = log_of(hk.Scenario(latency=10, max_staleness=2), num_steps=20)
    adopted = of_kind(log, Kind.ADOPT)
    assert [(e.steps, e.time) for e in adopted[:1]] == [(8, 24.0)]
    assert of_kind(log, Kind.RUN)[12].time == 28.0, "the next stretch is of 4 steps"
    # The next one is asked for at step 12, where none is due: the limit counts from there, not from a due report.
    odd = log_of(hk.Scenario(latency=3.25, max_staleness=1), num_steps=200, rhythm=Rhythm(8, 8))
    Audit(hk.Scenario(max_staleness=1), 1, Rhythm(8, 8), False).see(odd)


def test_bandwidth_and_latency_delay_every_message() -> None:
    scenario = hk.Scenario(latency=[0.5, 1.0], bandwidth=100.0)
    log = log_of(scenario, 2, num_bytes=150)
    for worker, one_way in ((0, 0.5 + 1.5), (1, 1.0 + 1.5)):
        sent, received = (of_kind(log, kind, worker)[0].time for kind in (Kind.SEND, Kind.RECEIVE))
        assert (sent, received) == (4.0, 4.0 + one_way)
        # The answer is taken at the end of the step in which it arrives.
        assert of_kind(log, Kind.ADOPT, worker)[0].time == math.ceil(4.0 + 2 * one_way)
    assert max(e.time for e in log) > max(e.time for e in log_of(hk.Scenario(), 2, num_bytes=150))


def test_stragglers_and_slow_workers_take_their_time() -> None:
    """A worker of step time 2 that is 3 times slower from 10 to 22 has 5 + 2 + 13 of its 20 steps done by 48."""
    scenario = hk.Scenario(step_time=[1.0, 2.0], stragglers=[hk.Straggler(1, 3.0, 10.0, 22.0)])
    log = log_of(scenario, 2)
    times = [[e.time for e in of_kind(log, Kind.RUN, w)] for w in (0, 1)]
    # Runs are told at the end of a stretch of 4 steps: steps 0-3 end at 8, then 10, 16, 22, 24, ...
    assert times[0] == [4.0 * (1 + step // 4) for step in range(20)]
    assert times[1] == [(8.0, 24.0, 32.0, 40.0, 48.0)[step // 4] for step in range(20)]


def test_jitter_spreads_times_as_it_says() -> None:
    """log of a step's time is N(0, jitter^2): mean and spread of 4,000 within 5 of their errors (6e-7 each)."""
    jitter, count = 0.3, 4000
    log = log_of(hk.Scenario(jitter=jitter), num_steps=count, rhythm=Rhythm(1, 1))
    ends = np.array([0.0] + [e.time for e in of_kind(log, Kind.RUN)])
    logs = np.log(np.diff(ends)) / jitter
    assert abs(logs.mean()) < 5 / math.sqrt(count)
    assert abs(logs.var() - 1) < 5 * math.sqrt(2 / count)
    same, other = (log_of(hk.Scenario(jitter=jitter), num_steps=50, seed=seed) for seed in (0, 1))
    assert same == log_of(hk.Scenario(jitter=jitter), num_steps=50, seed=0) != other
    # ... and the latencies: each way has its own.
    log = log_of(hk.Scenario(step_time=1e-9, latency=1.0, jitter=jitter), num_steps=800, rhythm=Rhythm(1, 1))
    sent = {}
    ways = []
    for event in log:
        if event.kind is Kind.SEND:
            sent[event.box] = event.time
        elif event.kind is Kind.RECEIVE:
            ways.append(event.time - sent[event.box])
            sent[event.box] = event.time
        elif event.kind is Kind.ADOPT:
            ways.append(event.time - sent[event.box])
    logs = np.log(ways) / jitter
    assert len(logs) > 300
    assert abs(logs.mean()) < 5 / math.sqrt(len(logs))
    assert abs(logs.var() - 1) < 5 * math.sqrt(2 / len(logs))


def test_at_a_barrier_all_wait_for_the_slowest() -> None:
    scenario = hk.Scenario(step_time=[1.0, 3.0], latency=0.25, barrier=True)
    log = log_of(scenario, 2, num_steps=10)
    assert [e.time for e in of_kind(log, Kind.BARRIER)] == [12.5, 25.0]
    assert [e.worker for e in log if e.kind is Kind.RUN and e.time > 25.0] == [0, 0, 1, 1]
    assert [e.kind for e in log if e.worker < 0] == [Kind.BARRIER, Kind.REFRESH] * 2


def test_a_crash_at_a_barrier_leaves_the_others() -> None:
    scenario = hk.Scenario(barrier=True, crashes=[hk.Crash(1, 6)])
    log = log_of(scenario, 3, num_steps=12)
    assert sum(e.steps for e in of_kind(log, Kind.RUN, 1)) == 6
    assert [log.index(e) for e in of_kind(log, Kind.LEAVE)] == [log.index(of_kind(log, Kind.RUN, 1)[-1]) + 1]
    assert len(of_kind(log, Kind.BARRIER)) == 3
    everyone = hk.Scenario(barrier=True, crashes=[hk.Crash(w, 6) for w in range(3)])
    assert len(of_kind(log_of(everyone, 3, num_steps=12), Kind.BARRIER)) == 1


def test_without_exchanges_workers_are_on_their_own() -> None:
    """One dies for good; one loses 5 steps, waits 2, and takes them again; one begins late."""
    scenario = hk.Scenario(crashes=[hk.Crash(0, 7), hk.Crash(1, 5, 2.0)], joins=[hk.Join(2, 100.0)])
    log = log_of(scenario, 3, num_steps=20, rhythm=None)
    assert {e.kind for e in log} == {Kind.RUN}
    ran = [sum(e.steps for e in of_kind(log, Kind.RUN, w)) for w in range(3)]
    ends = [max(e.time for e in of_kind(log, Kind.RUN, w)) for w in range(3)]
    assert (ran, ends) == ([7, 20, 20], [7.0, 27.0, 120.0])


def test_a_crashed_worker_goes_on_from_its_last_report() -> None:
    """Reported at 4 and 8, dies after 10: 2 steps are lost. It comes back 7 later and is told the centre anew."""
    scenario = hk.Scenario(crashes=[hk.Crash(0, 10, restart_after=7.0)], lease=1000.0)
    log = log_of(scenario, 2, num_steps=16)
    restored = of_kind(log, Kind.RESTORE)
    assert [(e.worker, e.steps, e.time) for e in restored] == [(0, 2, 17.0)]
    after = log[log.index(restored[0]) + 1]
    assert (after.kind, after.worker) == (Kind.JOIN, 0)
    ran = [e.draw for e in of_kind(log, Kind.RUN, 0)]
    assert ran == [*range(10), 8, 9, *range(10, 16)], "the lost steps are run again, and their draws kept again"
    assert max(e.time for e in of_kind(log, Kind.RUN, 0)) == 10 + 7 + 8
    # What it had asked for before it died is void: with latency the answer would come while it is away.
    late = log_of(hk.Scenario(latency=3.0, crashes=[hk.Crash(0, 5, 1.0)]), 1, num_steps=16)
    assert [(e.steps, e.time) for e in of_kind(late, Kind.RESTORE)] == [(1, 4 + 2 * 3.0 + 1.0)]
    assert next((e.steps, e.time) for e in of_kind(late, Kind.ADOPT)) == (6, 21.0)
    Audit(hk.Scenario(), 1, EVERY_4, False).see(late)


def test_boxes_of_crashed_workers_are_used_again() -> None:
    crashes = [hk.Crash(0, step, 0.0) for step in range(5, 400, 4)]
    log = log_of(hk.Scenario(latency=0.6, crashes=crashes), 1, num_steps=400)
    assert len(of_kind(log, Kind.RESTORE)) == len(crashes)
    assert num_boxes(log) <= 2


def test_the_lease_of_a_silent_worker_ends() -> None:
    """Last heard at 8 (no latency), lease 10: out at 18. One that stays away too long but comes back counts again."""
    scenario = hk.Scenario(crashes=[hk.Crash(0, 10), hk.Crash(1, 10, 30.0)], lease=10.0)
    log = log_of(scenario, 3, num_steps=60)
    out = [(e.worker, e.time) for e in of_kind(log, Kind.LEAVE)]
    assert out == [(0, 18.0), (1, 18.0), (2, 60.0), (1, 40.0 + 52)]
    assert [(e.worker, e.time) for e in of_kind(log, Kind.JOIN)] == [(1, 40.0)]
    # A worker whose interval is longer than the lease leaves and returns with each report, without credit.
    slow = log_of(hk.Scenario(step_time=[1.0, 5.0], lease=10.0), 2, num_steps=20)
    assert [e.steps for e in of_kind(slow, Kind.RECEIVE, 1)] == [0] * 5
    forever = log_of(hk.Scenario(crashes=[hk.Crash(0, 10)], lease=math.inf), 2, num_steps=60)
    assert [e.worker for e in of_kind(forever, Kind.LEAVE)] == [1]
    assert max(e.time for e in forever) == 60.0


def test_nobody_expires_who_keeps_its_normal_pace() -> None:
    scenario = hk.Scenario(step_time=[1.0, 7.0], latency=[40.0, 0.0])
    log = log_of(scenario, 2, num_steps=200)
    assert all(e.steps > 0 for e in of_kind(log, Kind.RECEIVE))


def test_a_late_worker_joins_with_no_new_steps() -> None:
    log = log_of(hk.Scenario(joins=[hk.Join(1, 10.5)]), 2, num_steps=20)
    assert log[0] == Event(Kind.LEAVE, 1)
    assert [e.time for e in of_kind(log, Kind.JOIN)] == [10.5]
    assert of_kind(log, Kind.RUN, 1)[0].time == 14.5
    assert [e.steps for e in of_kind(log, Kind.RECEIVE, 1)] == [4] * 5, "its own steps, none of the time before"


def test_gradients_are_sent_before_a_newer_copy_is_taken() -> None:
    """Each belongs to the copy it was taken at. The last is heard before its worker leaves, and all are counted."""
    rhythm = Rhythm(1, 3)
    log = log_of(hk.Scenario(latency=2.25), 2, num_steps=10, rhythm=rhythm, server_owns_chain=True)
    for worker in (0, 1):
        mine = [e for e in log if e.worker == worker and e.kind in (Kind.RUN, Kind.SEND, Kind.ADOPT)]
        for before, event in itertools.pairwise(mine):
            assert (event.kind is Kind.SEND) == (before.kind is Kind.RUN)
        theirs = [e.kind for e in log if e.worker == worker and e.kind in (Kind.RECEIVE, Kind.LEAVE)]
        assert theirs == [Kind.RECEIVE] * 10 + [Kind.LEAVE]
    # An answer asked for at 3 comes at 7.5; what fell due at 6 is asked for with the next gradient after that.
    assert [(e.steps, e.time) for e in of_kind(log, Kind.ADOPT, 0)] == [(5, 8.0), (2, 12.5)]


def random_scenario(random: np.random.Generator) -> tuple[hk.Scenario, int, int, Rhythm, bool]:
    workers, num_steps = int(random.integers(1, 7)), int(random.integers(1, 70))
    server_owns_chain = bool(random.random() < 0.4)
    every = int(random.integers(1, 10))
    rhythm = Rhythm(1, every) if server_owns_chain else Rhythm(every, every)

    def maybe(probability: float) -> list[int]:
        return [w for w in range(workers) if random.random() < probability]

    crashes = [
        hk.Crash(w, int(random.integers(0, num_steps + 1)), float(random.choice([0.0, 1.0, 30.0])))
        for w in maybe(0.4)
        for _ in range(random.integers(1, 4))
    ]
    crashes += [hk.Crash(w, int(random.integers(0, num_steps + 1))) for w in maybe(0.15)]
    scenario = hk.Scenario(
        step_time=list(random.choice([0.5, 1.0, 1.0, 3.0], workers)) if random.random() < 0.7 else 1.0,
        latency=float(random.choice([0.0, 0.1, 2.0, 17.0])),
        jitter=float(random.choice([0.0, 0.3])),
        bandwidth=float(random.choice([math.inf, 10.0])),
        stragglers=[hk.Straggler(w, 20.0, 5.0, 30.0) for w in maybe(0.2)],
        crashes=crashes,
        joins=[hk.Join(w, float(random.integers(0, 40))) for w in maybe(0.2)[: workers - 1]],
        lease=[None, 15.0, math.inf][random.integers(3)],
        max_staleness=int(random.integers(1, 4)),
    )
    return scenario, workers, num_steps, rhythm, server_owns_chain


@pytest.mark.parametrize("number", range(80))
def test_any_scenario_gives_a_log_that_can_be_executed(number: int) -> None:
    random = np.random.default_rng([2016, number])
    scenario, workers, num_steps, rhythm, server_owns_chain = random_scenario(random)
    scenario.check(workers)
    thin = int(random.integers(1, 4))
    kept = np.arange(thin, num_steps + 1, thin)
    arguments = (scenario, workers, num_steps, kept, rhythm)
    log = timeline(*arguments, server_owns_chain=server_owns_chain, num_bytes=8, seed=number)
    assert log == timeline(*arguments, server_owns_chain=server_owns_chain, num_bytes=8, seed=number)
    audit = Audit(scenario, workers, rhythm, server_owns_chain).see(log)

    lost = {c.worker for c in scenario.crashes if c.restart_after is None}
    assert audit.finished(num_steps) >= set(range(workers)) - lost, "whoever lives finishes"
    for w in range(workers):
        assert audit.runs[w] == list(range(audit.step[w])), "every step once and in order, lost ones again"
        wanted = [] if server_owns_chain else [i for i, step in enumerate(kept) if step <= audit.step[w]]
        assert sorted(audit.draws[w]) == wanted
        assert all(kept[draw] == step for draw, step in audit.draws[w].items())
        if w not in lost:
            due = audit.step[w] - audit.step[w] % rhythm.report
            assert audit.reported[w] >= due, "its last report has gone out"
    assert "sent" not in [state for state, _, _ in audit.boxes.values()], "every report was received"
    assert audit.live <= (lost if scenario.lease == math.inf else set()), "whoever is done leaves, and the lost expire"
    if server_owns_chain:
        assert audit.server_draws == sorted(set(audit.server_draws)), "each draw once and in order"
        undisturbed = not scenario.crashes and scenario.lease == math.inf
        if undisturbed:
            assert audit.server_draws == list(range(len(kept))), "with nobody lost none is missing"
        exact, least = (int(np.sum(kept <= clock)) for clock in (audit.clock, audit.clock - audit.rounded_away))
        assert least <= len(audit.server_draws) <= exact, "a gradient moves the clock by 1 / K_live"
    else:
        assert num_boxes(log) <= workers + 1, "a worker has one exchange under way"


def test_staleness_without_latency_is_none_and_with_it_bounded() -> None:
    fresh = Audit(hk.Scenario(), 3, EVERY_4, False).see(log_of(hk.Scenario(step_time=[1, 2, 3]), 3))
    assert set(fresh.ages) == {0}
    scenario = hk.Scenario(latency=50.0, max_staleness=3)
    late = Audit(scenario, 2, EVERY_4, False).see(log_of(scenario, 2, num_steps=100))
    assert max(late.ages) == 12


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        (hk.Scenario(step_time=0.0), "step_time: is 0.0"),
        (hk.Scenario(step_time=[1.0, 1.0]), r"step_time: has shape \(2,\)"),
        (hk.Scenario(step_time=math.nan), "step_time: is nan"),
        (hk.Scenario(latency=-1.0), "latency: is -1"),
        (hk.Scenario(jitter=-0.1), "jitter: is -0.1"),
        (hk.Scenario(jitter=math.inf), "jitter: is inf"),
        (hk.Scenario(bandwidth=0.0), "bandwidth: is 0"),
        (hk.Scenario(bandwidth=math.nan), "bandwidth: is nan"),
        (hk.Scenario(lease=0.0), "lease: is 0"),
        (hk.Scenario(lease=math.nan), "lease: is nan"),
        (hk.Scenario(max_staleness=0), "max_staleness: is 0"),
        (hk.Scenario(stragglers=[hk.Straggler(3, 2.0)]), "stragglers: name worker 3 of 3"),
        (hk.Scenario(crashes=[hk.Crash(-1, 2)]), "crashes: name worker -1 of 3"),
        (hk.Scenario(stragglers=[hk.Straggler(0, 0.0)]), "stragglers: have a factor"),
        (hk.Scenario(stragglers=[hk.Straggler(0, math.nan)]), "stragglers: have a factor"),
        (hk.Scenario(crashes=[hk.Crash(0, -1)]), "crashes and joins: lie before"),
        (hk.Scenario(crashes=[hk.Crash(0, 1, -1.0)]), "crashes: have a restart before"),
        (hk.Scenario(joins=[hk.Join(0, -1.0)]), "crashes and joins: lie before"),
        (hk.Scenario(joins=[hk.Join(0, math.nan)]), "crashes and joins: lie before"),
        (hk.Scenario(joins=[hk.Join(w, 1.0) for w in range(3)]), "joins: leave no worker"),
        (hk.Scenario(barrier=True, joins=[hk.Join(0, 1.0)]), "barrier: has no place"),
        (hk.Scenario(barrier=True, crashes=[hk.Crash(0, 1, 1.0)]), "barrier: has no place"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(scenario: hk.Scenario, says: str) -> None:
    with pytest.raises(hk.ArgumentError, match=f"^{says}"):
        scenario.check(3)


@pytest.mark.parametrize(
    "coupling", [hk.Elastic(1.0), hk.EASGD(0.3), hk.StaleGradient()], ids=lambda c: type(c).__name__
)
def test_messages_are_arrays_that_survive_a_journey(coupling: hk.Coupling) -> None:
    """Between threads, processes and machines: nothing in a message but arrays, and nothing lost on the way."""
    dynamics = hk.SGHMC(0.1, temperature=0.0)
    chain_dynamics, centre_dynamics = coupling.roles(dynamics, 3)
    positions = {"a": jnp.ones((3, 2)), "b": [jnp.arange(3.0)]}
    key = jax.random.key(0)
    centre = coupling.open(centre_dynamics, positions, Noise(key))
    one = jax.tree.map(lambda leaf: leaf[1], positions)
    worker = coupling.init(chain_dynamics, one, centre.copy(), Noise(key))
    report = Report(jnp.int32(1), coupling.payload(worker), jnp.int32(4), worker.copy.version)
    _, answer = coupling.receive(centre_dynamics, centre, report, key)
    for message, kind in ((report, Report), (answer, Copy)):
        assert type(message) is kind
        fetched = jax.device_get(message)
        assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(fetched))
        back = pickle.loads(pickle.dumps(fetched))
        assert jax.tree.structure(back) == jax.tree.structure(message)
        for sent, arrived in zip(jax.tree.leaves(message), jax.tree.leaves(back), strict=True):
            assert sent.dtype == arrived.dtype
            np.testing.assert_array_equal(sent, arrived)
    # What has been packed and unpacked does as well as the original.
    again = coupling.receive(centre_dynamics, centre, pickle.loads(pickle.dumps(jax.device_get(report))), key)[1]
    jax.tree.map(np.testing.assert_array_equal, again, answer)
