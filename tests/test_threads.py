"""Workers that do not wait for each other, and what may go wrong with them, over every carrier of their messages.

The order of events is up to the machine, so that nothing here depends on it: a test looks at rules that hold in every
order, and at the replay of the order that was. Nothing is left to chance, but for time. Where seconds are measured, the
limit is a multiple of what a busy machine needs, or the same machine is measured beside it, and the best of several
trials counts: a defect shows in all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hookean as hk
from hookean.engines.faults import Faults, InjectedFault
from hookean.engines.pieces import Pieces, replay
from hookean.exchange import Event, Kind

CARRIERS: dict[str, Callable[..., Any]] = {"threads": hk.Threads}
"""Engines whose workers exchange without waiting. They take the settings of `hk.Threads`, and keep a log to replay."""

pytestmark = pytest.mark.parametrize("carrier", CARRIERS)

TARGET = hk.Target.from_log_density(lambda x: -jnp.sum(x**2) / 2)
EVERYTHING = {"loss": 0.1, "duplication": 0.1, "reordering": 0.1, "delay": 0.1}


def start(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (4,))


def sample(carrier: str, coupling: Any, target: hk.Target = TARGET, **settings: Any) -> hk.Run:
    own = {name: settings.pop(name) for name in list(settings) if name in hk.Threads.__dataclass_fields__}
    told = {"dynamics": hk.SGHMC(0.05, 1.0), "chains": 3, "num_steps": 120, "thin": 5, "progress": False, **settings}
    return hk.sample(target, start, coupling=coupling, engine=CARRIERS[carrier](**own), **told)


def same(left: Any, right: Any) -> bool:
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True) for x, y in pairs)


def assert_replays(run: hk.Run) -> None:
    """Draws, statistics, workers and centre, bit for bit."""
    found: dict[tuple[int, int], Any] = {}
    places, centre = replay(run.job, run.log(), lambda chain, draw, *what: found.__setitem__((chain, draw), what))
    shown = np.argwhere(np.isfinite(np.asarray(run.stats["potential"])))
    assert len(shown) and {tuple(place) for place in shown.tolist()} == set(found)
    for (chain, draw), (position, statistics) in found.items():
        assert same(position, run.draws[chain, draw])
        for name, values in run.stats.items():
            assert same(statistics[name], np.asarray(values)[chain, draw]), (name, chain, draw)
    workers, last = run.info["final"]
    assert same(centre, last)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *jax.device_get([place.worker for place in places]))
    assert same(stacked, workers)


def assert_rules(run: hk.Run) -> None:
    """What holds in every order: each report once, versions one by one, generations one by one, times that grow."""
    version, generation, taken, told = 0, 0, set(), 0.0
    for event in run.log():
        if event.kind in (Kind.REPORT, Kind.JOIN, Kind.LEAVE):
            assert event.version == version + 1
            version += 1
        elif event.kind is Kind.REBUILD:
            assert event.seq == generation + 1 and event.version == version - event.steps
            version, generation = event.version, event.seq
        if event.kind is Kind.REPORT:
            key = event.worker, event.incarnation, event.seq, generation
            assert key not in taken
            taken.add(key)
        if event.kind in (Kind.REPORT, Kind.RUN, Kind.ADOPT):
            assert told <= event.time < 3600
            told = event.time


def count(run: hk.Run, kind: Kind, worker: int | None = None) -> int:
    return sum(event.kind is kind and worker in (None, event.worker) for event in run.log())


def parallel_steps(log: list[Event], chains: int, leap: int) -> tuple[int, int]:
    """The centre's clock by the rule: d new steps are worth d / K_live. And how often K_live changed."""
    live, credit, clock, changes = set(range(chains)), 0, 0, 0
    written = set(live), credit, clock
    for event in log:
        before = len(live)
        if event.kind in (Kind.JOIN, Kind.REPORT):
            live.add(event.worker)
        elif event.kind is Kind.LEAVE:
            live.discard(event.worker)
        elif event.kind is Kind.SNAPSHOT:
            written = set(live), credit, clock
        elif event.kind is Kind.REBUILD:
            live, credit, clock = set(written[0]), *written[1:]
            continue
        changes += len(live) != before
        credit = credit * len(live) // max(before, 1)
        if event.kind is Kind.REPORT:
            credit += event.steps
            whole = credit // len(live)
            if whole >= leap:
                clock, credit = clock + whole, credit - whole * len(live)
    return clock, changes


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coupling", [hk.Elastic(1.0, 1), hk.StaleGradient(4, 1)], ids=["elastic", "stale gradient"])
def test_ten_thousand_exchanges_of_which_any_may_go_wrong(carrier: str, coupling: Any) -> None:
    """10 % each of loss, duplication, reordering and delay."""
    run = sample(carrier, coupling, num_steps=3400, thin=100, faults=Faults(**EVERYTHING))
    telemetry = run.info["telemetry"]
    assert telemetry.exchanges == count(run, Kind.REPORT) >= 10_000
    assert telemetry.lost > 1000 and telemetry.duplicates > 1000  # the faults are there
    assert count(run, Kind.SEND) > 0  # some were given up, after three attempts
    assert_rules(run)
    assert_replays(run)
    if not coupling.server_owns_chain:
        assert np.all(np.isfinite(run.draws)) and run.draws.shape[:2] == (3, 34)
        steps = sum(event.steps for event in run.log() if event.kind is Kind.REPORT)
        last = {worker: 0 for worker in range(3)}
        last.update({event.worker: event.seq + 1 for event in run.log() if event.kind is Kind.REPORT})
        assert steps == sum(last.values())  # no step was lost with a report, but for those after the last one


@pytest.mark.parametrize(
    ("coupling", "dynamics"),
    [
        (hk.Elastic(1.0, 3, simultaneous=True), hk.SGHMC(0.05, 1.0, integrator="obabo")),
        (hk.Elastic(1.0, 2), hk.PSGLD(0.01)),
        (hk.ElasticAsPrinted(1.0, 2), hk.SGHMC(0.05, 1.0)),
        (hk.StaleGradient(2, 3), hk.SGHMC(0.05, 1.0)),
        (hk.EASGD(0.6, 2), hk.SGLD(0.05, temperature=0.0)),
        (hk.EAMSGD(0.6, 4), hk.SGHMC(0.05, 1.0, temperature=0.0)),
    ],
    ids=lambda setting: type(setting).__name__,
)
def test_every_coupling_replays_after_all_faults_together(carrier: str, coupling: Any, dynamics: Any) -> None:
    faults = Faults(**EVERYTHING, worker_crashes=[(0, 13), (1, 50), (1, 51)], centre_crashes=[20], nans=[(2, 36)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = sample(carrier, coupling, dynamics=dynamics, warmup=20, faults=faults, snapshot_every=8)
    assert {type(warning.message) for warning in told} == {hk.HookeanWarning}
    assert run.info["telemetry"].rebuilds == 1 and run.info["telemetry"].restarts == 3
    assert_rules(run)
    assert_replays(run)


def test_chains_without_a_centre_replay_and_do_not_depend_on_crashes(carrier: str) -> None:
    """20 errors at random points of one chain: its draws, and the others', are those of a run without any."""
    points = np.random.default_rng(0).integers(1, 2000, 20)
    settings = {"num_steps": 2000, "thin": 7}
    crashing = Faults(worker_crashes=[(1, int(point)) for point in points])
    run = sample(carrier, hk.Independent(), faults=crashing, max_restarts=20, **settings)
    plain = sample(carrier, hk.Independent(), **settings)
    assert run.info["restarts"] == [0, 20, 0] and run.info["telemetry"].restarts == 20
    assert run.info["telemetry"].redone > 0 and run.info["telemetry"].goodput < 1
    assert same(run.draws, plain.draws) and same(run.stats, plain.stats)
    assert np.ptp(np.asarray(run.draws), axis=1).min() > 0
    assert_replays(run)


def test_springs_without_strength_leave_chains_alone(carrier: str) -> None:
    """Bit for bit, in whatever order they exchange."""
    settings = {"num_steps": 400, "faults": Faults(**EVERYTHING)}
    coupled = sample(carrier, hk.Elastic(0.0, 4), **settings)
    assert count(coupled, Kind.REPORT) > 250
    free = sample(carrier, hk.Independent(), **settings)
    assert same(coupled.draws, free.draws) and same(free.draws, vectorised(num_steps=400).draws)


def vectorised(**settings: Any) -> hk.Run:
    return hk.sample(
        TARGET,
        start,
        dynamics=hk.SGHMC(0.05, 1.0),
        chains=3,
        thin=5,
        engine=hk.Vectorised(),
        progress=False,
        **settings,
    )


# -- workers and centres that raise ------------------------------------------------------------------------------------


class Pulse:
    """How long the machine itself makes a thread wait that only wants to look at the clock."""

    def __enter__(self) -> Pulse:
        self.longest, self.ends = 0.0, threading.Event()
        self.thread = threading.Thread(target=self.beat)
        self.thread.start()
        return self

    def beat(self) -> None:
        before = time.monotonic()
        while not self.ends.wait(0.002):
            now = time.monotonic()
            self.longest, before = max(self.longest, now - before), now

    def __exit__(self, *details: Any) -> None:
        self.ends.set()
        self.thread.join()


def test_a_worker_that_raises_twenty_times_keeps_nobody_waiting(carrier: str) -> None:
    """The others' largest gap between exchanges is below 250 ms, beyond what the machine itself makes threads wait."""
    points = np.random.default_rng(1).integers(1, 1500, 20)
    faults = Faults(worker_crashes=[(1, int(point)) for point in points])
    gaps = []
    for _ in range(3):
        with Pulse() as pulse:
            run = sample(
                carrier,
                hk.Elastic(1.0, 2),
                num_steps=1500,
                thin=50,
                faults=faults,
                max_restarts=20,
                snapshot_every=1000,
            )
        times = defaultdict(list)
        for event in run.log():
            if event.kind is Kind.REPORT:
                times[event.worker].append(event.time)
        assert run.info["restarts"] == [0, 20, 0] and count(run, Kind.JOIN, 1) == 20
        assert len(times[0]) == len(times[2]) == 750 and np.all(np.isfinite(run.draws))
        gaps.append(max(float(np.diff(times[worker]).max()) for worker in (0, 2)) - 2 * pulse.longest)
        if gaps[-1] < 0.25:
            break
    assert min(gaps) < 0.25
    assert_rules(run)
    assert_replays(run)


def test_a_centre_that_raises_is_rebuilt_and_little_is_forgotten(carrier: str) -> None:
    faults = Faults(centre_crashes=[5, 40, 41, 90, 150])
    with pytest.warns(hk.HookeanWarning, match=r"the centre raised .* generation \d begins") as told:
        run = sample(carrier, hk.Elastic(1.0, 2), num_steps=300, faults=faults, snapshot_every=10)
    rebuilt = [event for event in run.log() if event.kind is Kind.REBUILD]
    telemetry = run.info["telemetry"]
    assert [event.seq for event in rebuilt] == [1, 2, 3, 4, 5] and telemetry.rebuilds == len(told) == 5
    assert max(event.steps for event in rebuilt) <= 10
    assert sum(event.steps for event in rebuilt) == telemetry.rolled_back > 0
    assert telemetry.resyncs >= 5 and np.all(np.isfinite(run.draws))
    assert_rules(run)
    assert_replays(run)


def test_a_centre_that_always_raises_ends_the_run(carrier: str) -> None:
    faults = Faults(centre_crashes=range(0, 1000))
    with warnings.catch_warnings(), pytest.raises(InjectedFault, match="the centre was to raise"):
        warnings.simplefilter("ignore", hk.HookeanWarning)
        sample(carrier, hk.Elastic(1.0, 2), faults=faults, max_restarts=3)


def test_a_worker_that_always_raises_is_given_up_and_the_rest_goes_on(carrier: str) -> None:
    faults = Faults(worker_crashes=[(1, 40)] * 4)
    with pytest.warns(hk.HookeanWarning, match=r"1 of 3 chains raised more than max_restarts=3 .* chain 1: Injected"):
        run = sample(carrier, hk.Elastic(1.0, 2), faults=faults, max_restarts=3)
    draws = np.asarray(run.draws)
    assert np.all(np.isfinite(draws[[0, 2]])) and draws.shape[1] == 24
    assert np.all(np.isfinite(draws[1, :7])) and np.all(np.isnan(draws[1, 8:]))  # the window up to 40 was never kept
    assert run.info["restarts"] == [0, 4, 0] and count(run, Kind.LEAVE, 1) == 1
    assert_replays(run)


def test_when_all_are_lost_the_run_ends_with_the_error(carrier: str) -> None:
    faults = Faults(worker_crashes=[(chain, 30) for chain in range(3) for _ in range(2)])
    with pytest.raises(InjectedFault, match="was to raise at step 30"):
        sample(carrier, hk.Elastic(1.0, 2), faults=faults, max_restarts=1)


def test_nan_from_one_worker_is_refused_and_the_chain_named(carrier: str) -> None:
    with pytest.warns(hk.HookeanWarning, match="^a report with NaN or Inf was refused: chain 1, at step 40$"):
        run = sample(carrier, hk.Elastic(1.0, 2), faults=Faults(nans=[(1, 40)]))
    assert run.info["telemetry"].refused == 1
    assert [count(run, Kind.REPORT, worker) for worker in range(3)] == [60, 59, 60]
    assert max(event.steps for event in run.log() if event.kind is Kind.REPORT and event.worker == 1) == 4
    assert np.all(np.isfinite(run.draws)) and run.info["restarts"] == [0, 0, 0]
    assert_replays(run)


# -- slow ones, silent ones, and none that moves -----------------------------------------------------------------------


def slow_down(monkeypatch: pytest.MonkeyPatch, before: Callable[[int, int], None]) -> None:
    """Call `before(chain, step)` before each window."""
    run = Pieces.run

    def slowly(self: Pieces, data: Any, place: Any, chain: int, lengths: Any) -> Any:
        if lengths:
            before(int(chain), int(place.step))
        return run(self, data, place, chain, lengths)

    monkeypatch.setattr(Pieces, "run", slowly)


def test_a_worker_ten_times_slower_costs_the_others_nothing(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 5 % of their rate. Windows sleep, so that cores are no matter; medians, and the best of four pairs."""
    slow_down(monkeypatch, lambda chain, step: time.sleep(0.02))
    ratios = []
    for _ in range(4):
        intervals = []
        for factor in (1, 10):

            def end(window: hk.Window) -> None:
                if window.chain == 0 and window.step >= 90:
                    window.run.remove_chain(2)

            run = sample(
                carrier,
                hk.Elastic(1.0, 2),
                num_steps=100,
                thin=50,
                callbacks=[end],
                faults=Faults(stragglers={2: factor}),
            )
            times = [[e.time for e in run.log() if e.kind is Kind.REPORT and e.worker == w] for w in (0, 1)]
            intervals.append(np.median(np.concatenate([np.diff(each) for each in times])))
            clock, changes = parallel_steps(run.log(), 3, 2)
            assert int(run.info["final"][1].clock) == clock
            if factor == 10:
                slow = sum(e.steps for e in run.log() if e.kind is Kind.REPORT and e.worker == 2)
                assert slow <= 30 and 200 + slow >= clock * 2 and clock >= (200 + slow) / 3 - changes - 2
        ratios.append(intervals[1] / intervals[0])
        if ratios[-1] < 1.05:
            break
    assert min(ratios) < 1.05


def test_a_silent_worker_leaves_the_mean_and_comes_back(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K_live is recorded with the draws: three, two while one is silent, three again."""
    back, silent = threading.Event(), threading.Event()

    def wait(chain: int, step: int) -> None:
        if chain == 2 and step == 40 and not back.is_set():
            silent.set()
            assert back.wait(60)
        if chain != 2 and step >= 60 and not back.is_set():
            time.sleep(0.02)  # so that there are steps left when the lease ends
        if chain != 2 and back.is_set():
            time.sleep(0.001)

    def watch(window: hk.Window) -> None:
        if window.run.telemetry.evictions and window.chain != 2:
            seen.append(window.step)
            if len(seen) > 10:
                back.set()

    seen: list[int] = []
    slow_down(monkeypatch, wait)
    run = sample(carrier, hk.Elastic(1.0, 2), num_steps=400, thin=2, callbacks=[watch], lease=0.5)
    assert silent.is_set() and run.info["telemetry"].evictions >= 1
    leave = next(i for i, e in enumerate(run.log()) if e.kind is Kind.LEAVE)
    again = next(e for e in run.log()[leave:] if e.kind is Kind.REPORT and e.worker == 2)
    assert run.log()[leave].worker == 2 and again.steps == 0  # it starts at no new steps
    live = np.asarray(run.stats["live"])
    assert live[0, 0] == 3 and 2 in live[0] and live[2, 19] == 3
    assert live[2, 30] == 3  # it was told that it counts again
    assert int(run.info["final"][1].clock) == parallel_steps(run.log(), 3, 2)[0]
    assert_replays(run)


def test_no_worker_goes_on_too_long_without_an_answer(carrier: str) -> None:
    """With seven of ten messages lost and max_staleness=2, copies are never older than that."""
    every = 2
    run = sample(carrier, hk.Elastic(1.0, every), num_steps=600, thin=1, faults=Faults(loss=0.7), max_staleness=2)
    steps, asked, oldest = [0] * 3, [0] * 3, 0
    for event in run.log():
        if event.kind is Kind.RUN:
            steps[event.worker] += event.steps
            oldest = max(oldest, steps[event.worker] - asked[event.worker])
        elif event.kind in (Kind.ADOPT, Kind.JOIN):
            asked[event.worker] = steps[event.worker]
    assert every < oldest <= every * 2
    assert np.nanmax(run.stats["staleness"]) == oldest - 1
    assert count(run, Kind.SEND) > 10
    assert_replays(run)


def test_an_answer_that_was_due_is_taken_with_the_next_report(carrier: str) -> None:
    """Stale gradients are reported each step and refreshed every fourth: a lost refresh does not wait for the next."""
    run = sample(carrier, hk.StaleGradient(4, 1), num_steps=600, faults=Faults(loss=0.7), max_staleness=2)
    steps, asked, oldest = [0] * 3, [0] * 3, 0
    for event in run.log():
        if event.kind is Kind.RUN:
            steps[event.worker] += event.steps
            oldest = max(oldest, steps[event.worker] - asked[event.worker])
        elif event.kind is Kind.ADOPT:
            asked[event.worker] = steps[event.worker]
    assert 4 < oldest <= 4 + 1
    assert_replays(run)


def test_a_likelihood_that_hangs_is_no_run_that_hangs(carrier: str) -> None:
    """StalledError in bounded time, with what there is; the chains are named."""
    goes_on = threading.Event()

    def hang(x: np.ndarray) -> np.ndarray:
        if float(x[0]) > -1e6 and counted.append(0) is None and len(counted) > 30:
            goes_on.wait(60)
        return np.zeros((), np.float32)

    def log_density(x: jax.Array) -> jax.Array:
        felt = jax.pure_callback(hang, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(x))
        return -jnp.sum(x**2) / 2 + felt

    counted: list[int] = []
    began = time.monotonic()
    try:
        with pytest.raises(hk.StalledError, match=r"no worker has finished a window for 1 s \(chain \d at step"):
            sample(carrier, hk.Elastic(1.0, 2), hk.Target.from_log_density(log_density), patience=1.0)
        assert time.monotonic() - began < 50  # a second, five for threads that may end, and compilation
    finally:
        goes_on.set()
        time.sleep(0.2)


def test_messages_that_never_arrive_end_the_run(carrier: str) -> None:
    began = time.monotonic()
    with pytest.raises(hk.StalledError) as error:
        sample(carrier, hk.Elastic(1.0, 2), faults=Faults(loss=0.999999), patience=0.5, max_staleness=2)
    assert time.monotonic() - began < 50
    assert "no answer from the centre for 0.5 s" in str(error.value) or "no worker has finished" in str(error.value)
    draws = np.asarray(error.value.run.draws)  # two rounds without an answer, and that is all
    assert draws.shape[1] == 0 or np.all(np.isfinite(draws))


# -- coming and going --------------------------------------------------------------------------------------------------


def test_chains_come_and_go_as_callbacks_ask(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added, removed = threading.Event(), threading.Event()
    asked: list[int] = []

    def wait(chain: int, step: int) -> None:
        """All wait for the new one, and one for its own end: else they might be done before."""
        if chain < 3 and step >= 100:
            assert added.wait(60)
        if chain == 1 and step >= 200:
            assert removed.wait(60)
            time.sleep(0.002)

    def change(window: hk.Window) -> None:
        if window.step >= 50 and not asked:
            asked.append(window.chain)
            window.run.add_chain()
        if window.chain == 3:
            added.set()
        if window.chain == 1 and window.step >= 200 and not removed.is_set():
            window.run.remove_chain(1)
            removed.set()

    slow_down(monkeypatch, wait)
    run = sample(carrier, hk.Elastic(1.0, 2), num_steps=1000, thin=10, callbacks=[change], spare=2)
    draws = np.isfinite(np.asarray(run.draws)).all(-1)
    assert draws.shape == (5, 100)
    assert draws[[0, 2, 3]].all() and not draws[4].any()  # the first free seat begins from its own start, and ends
    assert draws[1, :20].all() and not draws[1, -1]
    kept = int(draws[1].sum())
    assert draws[1, :kept].all()
    joins = [event.worker for event in run.log() if event.kind is Kind.JOIN]
    assert joins == [3] and [e.worker for e in run.log() if e.kind is Kind.LEAVE][:2] == [3, 4]
    live = np.asarray(run.stats["live"])
    assert live[0, 0] == 3 and np.nanmax(live) == 4
    assert_rules(run)
    assert_replays(run)


def test_no_chain_is_added_where_no_seat_is_free(carrier: str) -> None:
    with pytest.raises(hk.HookeanError, match=r"no seat is free .*spare="):
        sample(carrier, hk.Elastic(1.0, 2), callbacks=[lambda window: window.run.add_chain()])


def test_a_callback_that_raises_stops_the_run_and_keeps_the_draws(carrier: str, tmp_path: Path) -> None:
    def complain(window: hk.Window) -> None:
        if window.step >= 100:
            raise ZeroDivisionError("mine")

    path = tmp_path / "run"
    settings: dict[str, Any] = {"num_steps": 20_000, "thin": 10}
    with pytest.raises(ZeroDivisionError, match="mine"):
        sample(carrier, hk.Elastic(1.0, 2), store=str(path), callbacks=[complain], **settings)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("chain ")]
    steps = np.isfinite(np.asarray(hk.load(path).draws[:])).all(-1).sum(1) * 10
    assert steps.max() >= 100 and steps.shape == (3,)
    resumed = hk.resume(path, TARGET, progress=False, callbacks=[lambda window: window.run.stop()])
    assert resumed.info["steps"] > 0


# -- errors that are the user's ----------------------------------------------------------------------------------------


def test_a_divergence_names_chain_step_and_leaf(carrier: str) -> None:
    def begin(key: jax.Array) -> Any:
        first = jax.random.normal(key, ()) * 0
        return {"steady": jnp.ones(2) + first, "steep": first}

    def log_density(x: Any) -> jax.Array:
        steep = jnp.where(x["steep"] > 0.5, jnp.inf, x["steep"])  # reached with certainty: the potential slopes down
        return -jnp.sum(x["steady"] ** 2) / 2 + steep

    with pytest.raises(hk.DivergenceError, match="potential") as error:
        hk.sample(
            hk.Target.from_log_density(log_density),
            begin,
            dynamics=hk.SGLD(0.05, temperature=0.0),
            coupling=hk.Independent(),
            chains=2,
            num_steps=100,
            engine=CARRIERS[carrier](),
            progress=False,
        )
    # 0.05 a step: above 0.5 after 11 steps (10 times 0.05 is 0.5 in float32 or a rounding beside it)
    assert error.value.chain in (0, 1) and error.value.step in (10, 11) and error.value.leaf is None
    kept = np.asarray(error.value.run.draws["steep"])
    finite = np.isfinite(kept[error.value.chain])
    assert finite.sum() == error.value.step and np.all(np.diff(kept[error.value.chain][finite]) > 0)

    def explode(x: Any) -> jax.Array:
        return -jnp.sum(x["steady"] ** 2) / 2 + jnp.sqrt(jnp.abs(x["steep"]))  # a slope without end at its start

    with pytest.raises(hk.DivergenceError, match="leaf 'steep'") as error:
        hk.sample(
            hk.Target.from_log_density(explode),
            begin,
            dynamics=hk.SGLD(0.05, temperature=0.0),
            coupling=hk.EASGD(0.5, 2),
            chains=2,
            num_steps=100,
            engine=CARRIERS[carrier](),
            progress=False,
        )
    assert error.value.leaf == "steep" and error.value.step == 1


def test_batches_that_fail_are_told_as_such(carrier: str) -> None:
    def batches(chain: int) -> Iterator[Any]:
        for i in range(1000):
            if chain == 1 and i == 60:
                raise OSError("the disk is gone")
            yield np.full(5, i % 3, np.float32)

    target = hk.Target.from_batches(
        lambda x, batch: -((batch - x[0]) ** 2) / 2, lambda x: -jnp.sum(x**2) / 2, batches, 50
    )
    with pytest.raises(hk.BatchError, match="the disk is gone") as error:
        sample(carrier, hk.Elastic(1.0, 2), target, dynamics=hk.SGHMC(0.01, 1.0))
    assert error.value.chain == 1 and isinstance(error.value.__cause__, OSError)
    assert np.isfinite(np.asarray(error.value.run.draws)[1, :10]).all()


# -- telemetry ---------------------------------------------------------------------------------------------------------


def test_telemetry_agrees_with_the_log(carrier: str) -> None:
    faults = Faults(**EVERYTHING, worker_crashes=[(0, 40), (2, 80)])
    run = sample(carrier, hk.Elastic(1.0, 2), num_steps=200, faults=faults)
    told = run.info["telemetry"]
    assert told.steps == sum(event.steps for event in run.log() if event.kind is Kind.RUN) == 600
    assert told.redone > 0 and told.goodput == 600 / (600 + told.redone)
    assert told.exchanges == count(run, Kind.REPORT) and told.bytes == told.exchanges * 2 * 16
    assert told.restarts == sum(run.info["restarts"]) == 2 <= count(run, Kind.JOIN)
    assert sum(told.staleness) == count(run, Kind.ADOPT)
    assert told.rebuilds == told.rolled_back == told.refused == told.evictions == 0
    assert told.lost > 0 and told.stepping > 0 and told.exchanging > 0
    ages, steps, asked = [0] * len(told.staleness), [0] * 3, [0] * 3
    for event in run.log():
        if event.kind is Kind.RUN:
            steps[event.worker] += event.steps
        elif event.kind in (Kind.ADOPT, Kind.JOIN):
            if event.kind is Kind.ADOPT:
                ages[(steps[event.worker] - 1 - asked[event.worker]).bit_length()] += 1
            asked[event.worker] = steps[event.worker]
    assert ages == told.staleness


# -- several devices ---------------------------------------------------------------------------------------------------

ON_FOUR_DEVICES = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    sys.path.insert(0, {tests!r})
    import hookean as hk
    import test_threads
    from hookean.engines.faults import Faults
    assert len(jax.local_devices()) == 4
    for coupling in (hk.Elastic(1.0, 2), hk.StaleGradient(2, 2)):
        run = test_threads.sample(
            {carrier!r}, coupling, chains=5, faults=Faults(**test_threads.EVERYTHING, worker_crashes=[(3, 20)])
        )
        assert np.isfinite(np.asarray(run.draws)).all() and run.info["restarts"][3] == 1
        test_threads.assert_rules(run)
        test_threads.assert_replays(run)
    print("replayed")
"""


def test_several_devices(carrier: str) -> None:
    """Four that XLA makes of one processor; the replay takes one."""
    program = textwrap.dedent(ON_FOUR_DEVICES).format(tests=str(Path(__file__).parent), carrier=carrier)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": source}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.stdout.strip() == "replayed", ran.stderr[-3000:]
