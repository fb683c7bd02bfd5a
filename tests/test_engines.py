"""Equalities between engines, schedules and couplings: two ways to the same numbers.

Nothing here is statistical. Where both ways do the same operations in the same order, bits are compared; where the
order of a sum differs, float64 and a tolerance that says how many roundings it allows.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hookean as hk
from hookean import coupling as couplings
from hookean.dynamics import Dynamics
from hookean.engines.base import carry_out
from hookean.preparation import prepare
from hookean.random import Noise, Stream, stream_key
from hookean.types import ArgumentError

BARRIER = hk.Simulated(hk.Scenario(barrier=True))
EPSILON = float(np.finfo(np.float64).eps)
ROUNDINGS = 1e4
"""Rounding errors of unit size that a path in float64 may gather: a few hundred operations in each of some 40 steps."""


def line(w: Any, batch: Any) -> jax.Array:
    x, y = batch
    return -((y - x @ w["slope"] - w["level"]) ** 2) / 2


def prior(w: Any) -> jax.Array:
    return -jnp.sum(w["slope"] ** 2) / 2 - w["level"] ** 4 / 4


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 3)).astype(np.float32)
DATA = (X, (X @ [1.0, -1.0, 0.5] + RANDOM.normal(size=40)).astype(np.float32))
REGRESSION = hk.Target(line, prior, DATA, batch_size=8)


def start(key: jax.Array) -> Any:
    return {"slope": jax.random.normal(key, (3,)), "level": jnp.ones(())}


def sample(target: hk.Target = REGRESSION, init: Any = start, **settings: Any) -> hk.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hk.HookeanWarning)
        return hk.sample(target, init, progress=False, **{"engine": hk.Vectorised(), **settings})


def assert_same_bits(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_same_path(found: Any, wanted: Any) -> None:
    def one(x: Any, y: Any) -> None:
        tolerance = ROUNDINGS * EPSILON
        assert np.asarray(x).dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)

    jax.tree.map(one, found, wanted)


# -- one engine and another --------------------------------------------------------------------------------------------


def at_a_barrier() -> list[Any]:
    """Every variant of every coupling over SGHMC; over a dynamics whose centre walks and that needs curvature, some."""
    found = []
    for dynamics in (hk.SGHMC(0.01, 1.5), hk.PSGLD(0.003)):
        for coupling in (v for cls in couplings.ALL.values() for v in cls.variants()):
            suited = dynamics.replace(temperature=0.0 if coupling.optimises else 1.0)
            try:
                coupling.check(suited, 3, 48)
            except ArgumentError:
                continue
            name = f"{type(dynamics).__name__}-{type(coupling).__name__}"
            if not (isinstance(dynamics, hk.PSGLD) and coupling.optimises):
                found.append(pytest.param(suited, coupling, id=f"{name}{sum(p.id.startswith(name) for p in found)}"))
    return found


@pytest.mark.parametrize(("dynamics", "coupling"), at_a_barrier())
def test_engines_agree_at_a_barrier(dynamics: Dynamics, coupling: Any) -> None:
    """Bit for bit, with minibatches: draws, and all statistics but one.

    Two sums XLA takes in another order within another program: the product of the Hessian with a vector, which PSGLD
    needs (draws are below 2 and the steps contract: 64 roundings of float32), and the statistic theta . grad U / n (8
    roundings of terms below 100).
    """
    settings = {"dynamics": dynamics, "coupling": coupling, "chains": 3, "num_steps": 48, "warmup": 6, "thin": 3}
    one, other = (sample(engine=engine, **settings) for engine in (hk.Vectorised(), BARRIER))
    assert np.ptp(np.asarray(one.draws["slope"]), axis=1).min() > 0
    rounding = float(np.finfo(np.float32).eps)
    if dynamics.uses_curvature:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=128 * rounding), one.draws, other.draws)
        return
    assert_same_bits(one.draws, other.draws)
    for name in one.stats:
        if name == "configurational_temperature":
            np.testing.assert_allclose(one.stats[name], other.stats[name], rtol=0, atol=800 * rounding)
        else:
            np.testing.assert_array_equal(one.stats[name], other.stats[name], name)


LATE = hk.Scenario(step_time=(1.0, 1.7, 2.6), latency=0.8, jitter=0.2, stragglers=[hk.Straggler(0, 3.0, 10.0, 30.0)])


@pytest.mark.parametrize("engine", [hk.Vectorised(), hk.Simulated(LATE)], ids=["vectorised", "simulated"])
@pytest.mark.parametrize(
    "dynamics",
    [hk.SGLD(0.003), hk.SGHMC(0.01, 1.5), hk.SGHMC(0.01, 1.5, integrator="obabo"), hk.PSGLD(0.003), hk.SGNHT(0.01)],
    ids=["SGLD", "SGHMC", "OBABO", "PSGLD", "SGNHT"],
)
def test_springs_of_no_strength_change_no_bit(dynamics: Dynamics, engine: Any) -> None:
    """The centre draws from a stream of its own, and 0 times a distance adds nothing."""
    settings = {"dynamics": dynamics, "engine": engine, "chains": 3, "num_steps": 48, "warmup": 6, "thin": 3}
    free, tied, pulled = (
        sample(coupling=coupling, **settings).draws
        for coupling in (hk.Independent(), hk.Elastic(0.0, 3), hk.Elastic(1.0, 3))
    )
    assert_same_bits(free, tied)
    assert not np.array_equal(free["slope"], pulled["slope"])


# -- stale gradients that are fresh ------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["replacement", "epochs"])
@pytest.mark.parametrize("workers", [1, 3])
def test_fresh_gradients_are_those_of_one_chain_with_a_larger_batch(workers: int, batching: Any) -> None:
    """Synchronous SGHMC by hand: the mean of K gradients, then a step. Every state of both is compared, in float64."""
    dynamics, steps, seed = hk.SGHMC(0.02, 1.5), 40, 3
    with jax.enable_x64(True):
        target = hk.Target(line, prior, DATA, batch_size=8, batching=batching)
        coupling = hk.StaleGradient(every=1, wait_for=workers)
        run = sample(target, start, dynamics=dynamics, coupling=coupling, chains=workers, num_steps=steps, seed=seed)
        key = jax.random.key(seed)

        @jax.jit
        def once(state: Any, t: Any) -> Any:
            gradients = [
                jax.grad(target.potential)(
                    state.position, target.batch(target.data, stream_key(key, Stream.BATCH, i), i, t)
                )
                for i in range(workers)
            ]
            mean = jax.tree.map(lambda *each: sum(each) / workers, *gradients)
            return dynamics.step(state, mean, Noise(stream_key(key, Stream.NOISE, 0), t), t)

        state = dynamics.init(
            jax.tree.map(jnp.asarray, start(stream_key(key, Stream.START, 0))),
            Noise(stream_key(key, Stream.MOMENTUM, 0)),
        )
        for t in range(steps):
            state = once(state, t)
            assert_same_path(jax.tree.map(lambda leaf, t=t: leaf[0, t], run.draws), state.position)
    assert not np.any(run.stats["staleness"])


@pytest.mark.parametrize("dynamics", [hk.SGHMC(0.02, 1.5), hk.SGNHT(0.02)], ids=["SGHMC", "SGNHT"])
def test_fresh_whole_gradients_are_those_of_a_free_chain(dynamics: Dynamics) -> None:
    """Two workers with all the data send the same gradient twice, and their mean is that gradient.

    In float64: gradients at one position are compiled to other products of matrices than gradients at two.
    """
    settings = {"dynamics": dynamics, "chains": 2, "num_steps": 40}
    with jax.enable_x64(True):
        target = hk.Target(line, prior, DATA)
        served, free = (
            sample(target, start, coupling=coupling, **settings).draws
            for coupling in (hk.StaleGradient(every=1, wait_for=2), hk.Independent())
        )
        assert_same_path(served, jax.tree.map(lambda leaf: leaf[:1], free))


# -- temperature 0: optimisers -----------------------------------------------------------------------------------------


def test_easgd_is_elastic_sgld_at_temperature_0() -> None:
    """every=1, moving_rate = eps alpha: after every step, with minibatches, in float64."""
    eps, alpha = 0.004, 30.0
    with jax.enable_x64(True):
        target = hk.Target(line, prior, DATA, batch_size=8)
        one, other = (
            sample(target, start, dynamics=hk.SGLD(eps, temperature=0.0), coupling=coupling, chains=3, num_steps=40)
            for coupling in (hk.EASGD(eps * alpha, 1), hk.Elastic(alpha, 1, simultaneous=True))
        )
        assert_same_path(one.draws, other.draws)
        sequential = sample(
            target, start, dynamics=hk.SGLD(eps, temperature=0.0), coupling=hk.Elastic(alpha), chains=3, num_steps=40
        )
    assert np.abs(sequential.draws["slope"] - other.draws["slope"]).max() > 1e-4  # another order is another path


def bend(x: jax.Array) -> jax.Array:
    return -(jnp.sum(x**4) / 4 + jnp.sum(x) ** 2 / 2)


def slope(x: np.ndarray) -> np.ndarray:
    """Gradient of minus `bend`, of chains [chain, parameter]."""
    return x**3 + x.sum(1, keepdims=True)


def cold_run(dynamics: Dynamics, coupling: Any, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Starts, the chains after every step, and the centre at the end."""
    with jax.enable_x64(True):
        run = sample(
            hk.Target.from_log_density(bend),
            lambda key: jax.random.normal(key, (2,)),
            dynamics=dynamics,
            coupling=coupling,
            chains=3,
            num_steps=steps,
        )
    return np.asarray(run.job.starts), np.asarray(run.draws).swapaxes(0, 1), run.info["final"][1].state.position


@pytest.mark.parametrize("simultaneous", [True, False], ids=["simultaneous", "in turn"])
@pytest.mark.parametrize("order", ["explicit", "semi_implicit"])
def test_elastic_sghmc_at_temperature_0_is_equation_7(order: Any, simultaneous: bool) -> None:
    """In the velocities v = eps p / M and h = eps r / M_c of that equation, with the springs alpha / K of Eq. 5.

    v_i' = (1 - eps V / M) v_i - eps^2 / M (grad U(theta_i) + alpha / K (theta_i - c))
    h'   = (1 - eps C / M_c) h - eps^2 / M_c alpha (c - mean theta)
    """
    eps, V, M, C, centre_mass, alpha, K, steps = 0.1, 1.5, 1.2, 0.7, 2.0, 3.0, 3, 40
    dynamics = hk.SGHMC(eps, V, mass=M, integrator=order, temperature=0.0)
    coupling = hk.Elastic(alpha, 1, friction=C, mass=centre_mass, simultaneous=simultaneous)
    theta, path, centre = cold_run(dynamics, coupling, steps)
    c, v, h = theta.mean(0), np.zeros((3, 2)), np.zeros(2)
    for t in range(steps):
        pull = slope(theta) + alpha / K * (theta - c)
        new_v = (1 - eps * V / M) * v - eps**2 / M * pull
        new_theta = theta + (v if order == "explicit" else new_v)
        mean = (theta if simultaneous else new_theta).mean(0)
        new_h = (1 - eps * C / centre_mass) * h - eps**2 / centre_mass * alpha * (c - mean)
        c, h, theta, v = c + (h if order == "explicit" else new_h), new_h, new_theta, new_v
        assert_same_path(path[t], theta)
    assert_same_path(centre, c)


def test_eamsgd_is_equation_8() -> None:
    """Springs displace positions and leave velocities alone; the centre has none. Both use the same c and theta.

    The centre moves right after it has answered, so that at the end it is a step ahead of the chains' copies.
    """
    eps, V, M, rate, K, steps = 0.1, 1.5, 1.2, 0.3, 3, 40
    dynamics = hk.SGHMC(eps, V, mass=M, integrator="semi_implicit", temperature=0.0)
    theta, path, centre = cold_run(dynamics, hk.EAMSGD(rate, 1), steps)
    c, v = theta.mean(0), np.zeros((3, 2))

    def pulls() -> np.ndarray:
        return rate / K * (theta - c)

    for t in range(steps):
        v = (1 - eps * V / M) * v - eps**2 / M * slope(theta)
        moved = pulls()
        theta, c = theta + v - moved, c + moved.sum(0)
        assert_same_path(path[t], theta)
    assert_same_path(centre, c + pulls().sum(0))


# -- workers are alike -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "coupling",
    [hk.Elastic(2.0, 4, friction=0.7), hk.EASGD(0.9, 3), hk.StaleGradient(2, 3)],
    ids=lambda coupling: type(coupling).__name__,
)
def test_workers_may_change_places(coupling: Any) -> None:
    """At T = 0 a worker is its start and its speed: who is called by which number is all the same.

    Sums over workers are taken in another order, hence float64 and a tolerance. No two events fall on one moment.
    """
    order = [2, 0, 3, 1]
    speeds = (1.0, 1.7173, 2.6419, 1.3217)
    called = {old: new for new, old in enumerate(order)}  # worker `old` of the first run is `called[old]` in the second

    def scenario(number: Callable[[int], int], step_times: Any) -> hk.Scenario:
        return hk.Scenario(
            step_time=step_times,
            latency=0.8,
            stragglers=[hk.Straggler(number(0), 3.0, 10.0, 30.0)],
            crashes=[hk.Crash(number(1), 20, restart_after=5.0), hk.Crash(number(3), 30)],
            joins=[hk.Join(number(2), 6.05)],
        )

    scenarios = scenario(lambda i: i, speeds), scenario(called.__getitem__, [speeds[i] for i in order])
    dynamics = hk.SGHMC(0.05, 1.5, temperature=0.0)
    with jax.enable_x64(True):
        target = hk.Target.from_log_density(bend)
        job = prepare(target, jnp.zeros(2), dynamics, coupling, 4, 40, 0, 4, hk.Simulated(scenarios[0]), 0)
        starts = np.random.default_rng(1).normal(size=(4, 2))
        if coupling.server_owns_chain:
            starts = np.broadcast_to(starts[0], (4, 2))
        one, other = (
            carry_out(hk.Simulated(each), dataclasses.replace(job, starts=jnp.asarray(first))).draws
            for each, first in zip(scenarios, (starts, starts[order]), strict=True)
        )
        assert np.isfinite(one).any()
        assert_same_path(other, one if coupling.server_owns_chain else one[jnp.asarray(order)])


# -- many workers, lost workers ----------------------------------------------------------------------------------------


def test_a_thousand_workers_finish_in_seconds() -> None:
    """With jitter, stragglers, crashes and joins; the same seed gives the same log and bits."""
    lost = set(range(0, 1000, 50))
    scenario = hk.Scenario(
        step_time=tuple(1 + (i % 7) / 5 for i in range(1000)),
        latency=0.5,
        jitter=0.3,
        stragglers=[hk.Straggler(i, 4.0, 2.0, 15.0) for i in range(3, 1000, 50)],
        crashes=[hk.Crash(i, 7) for i in lost] + [hk.Crash(i, 7, restart_after=3.0) for i in range(1, 1000, 50)],
        joins=[hk.Join(i, 5.0 + i / 100) for i in range(2, 1000, 50)],
        lease=40.0,
    )

    def run(seed: int) -> hk.Run:
        return sample(
            hk.Target.from_log_density(lambda x: -jnp.sum(x**2) / 2),
            jnp.zeros(2),
            dynamics=hk.SGHMC(0.1),
            coupling=hk.Elastic(100.0, 5),
            chains=1000,
            num_steps=20,
            thin=5,
            engine=hk.Simulated(scenario),
            seed=seed,
        )

    began = time.perf_counter()
    one = run(0)
    assert time.perf_counter() - began < 60  # 5 on two free cores
    again, other = run(0), run(1)
    draws = np.asarray(one.draws)
    for worker in range(1000):
        finite = np.isfinite(draws[worker]).all(1)
        assert finite.tolist() == ([True, False, False, False] if worker in lost else [True] * 4), worker
    assert f"{3 * len(lost)} of 4000 draws are missing (NaN): their workers were lost or late" in one.summary()
    assert again.info["log"] == one.info["log"] and other.info["log"] != one.info["log"]
    assert_same_bits(again.draws, one.draws)
    assert_same_bits(again.stats, one.stats)


@pytest.mark.parametrize("barrier", [True, False], ids=["barrier", "no barrier"])
@pytest.mark.parametrize("coupling", [hk.Independent(), hk.Elastic(1.0, 4)], ids=["independent", "elastic"])
def test_draws_of_lost_workers_are_missing_and_said_to_be(coupling: Any, barrier: bool) -> None:
    """Worker 1 dies after 20 of 40 steps. What it kept before stands, and the others miss nothing."""
    joins = () if barrier else [hk.Join(2, 9.0)]  # who begins late, ends late
    scenario = hk.Scenario(crashes=[hk.Crash(1, 20)], joins=joins, barrier=barrier)
    run = sample(
        dynamics=hk.SGHMC(0.01), coupling=coupling, chains=3, num_steps=40, thin=5, engine=hk.Simulated(scenario)
    )
    there = np.ones((3, 8), bool)
    there[1, 4:] = False
    for leaf in jax.tree.leaves(run.draws):
        np.testing.assert_array_equal(np.isfinite(leaf).reshape(3, 8, -1).all(2), there)
        np.testing.assert_array_equal(np.isnan(leaf).reshape(3, 8, -1).all(2), ~there)
    np.testing.assert_array_equal(np.isnan(run.stats["potential"]), ~there)
    assert "4 of 24 draws are missing (NaN): their workers were lost or late" in run.summary()
