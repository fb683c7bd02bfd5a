"""Numbers and schedules, and how a coupling is scheduled: when springs act, and which draws are kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hookean as hk
from hookean.schedules import CouplingSchedule, Derived, check, check_number, value_at


def factors(schedule: CouplingSchedule, num_steps: int) -> np.ndarray:
    """As compiled code sees them."""
    return np.asarray(jax.jit(jax.vmap(lambda step: jnp.asarray(schedule.factor(step))))(np.arange(num_steps)))


def test_a_number_and_a_schedule() -> None:
    assert value_at(0.5, 7) == 0.5
    assert value_at(lambda step: 2 * step, 7) == 14


# -- what may be a schedule --------------------------------------------------------------------------------------------


def test_every_step_is_looked_at() -> None:
    for dip in (0, 1, 617, 999):
        with pytest.raises(hk.ArgumentError, match=f"alpha: is -1 at step {dip}. It must be at least 0"):
            check("alpha", lambda step, dip=dip: jnp.where(step == dip, -1.0, 1.0), 1000, 0.0)
    check("alpha", lambda step: jnp.where(step == 1000, -1.0, 1.0), 1000, 0.0)  # beyond the last


def test_long_schedules_are_sampled_with_both_ends() -> None:
    count = 2**31 - 1
    for dip in (0, count - 1):
        with pytest.raises(hk.ArgumentError, match=f"is nan at step {dip}"):
            check("alpha", lambda step, dip=dip: jnp.where(step == dip, jnp.nan, 1.0), count, 0.0)


def test_a_positive_schedule_may_touch_0() -> None:
    def rests(steps: int) -> Any:
        return lambda step: jnp.where(step < steps, 0.0, 0.1)

    check("step_size", rests(10), 1000, 0.0, exclusive=True)
    with pytest.raises(hk.ArgumentError, match=r"step_size: is 0 at 1% of all steps, first at step 0\. Nothing"):
        check("step_size", rests(11), 1000, 0.0, exclusive=True)
    check("step_size", rests(1), 3, 0.0, exclusive=True)  # one step is not too many
    check("friction", rests(500), 1000, 0.0)  # where 0 is as good as any
    with pytest.raises(hk.ArgumentError, match=r"is -1 at step 5\. It must be greater than 0"):
        check("step_size", lambda step: jnp.where(step == 5, -1.0, 1.0), 1000, 0.0, exclusive=True)
    with pytest.raises(hk.ArgumentError, match="is 0 at 100%"):
        check("step_size", lambda step: 0.0 * step, 1000, 0.0, exclusive=True)


def test_a_derived_schedule_speaks_of_its_sources() -> None:
    def sources(num_steps: int) -> None:
        check("rate", lambda step: 3.0 - step, num_steps, 0.0)

    derived = Derived(lambda step: jnp.sqrt(3.0 - step), sources)
    assert derived(2) == 1
    check("step_size", derived, 4, 0.0)
    with pytest.raises(hk.ArgumentError, match="rate: is -1 at step 4"):
        check("step_size", derived, 10, 0.0)


def test_learning_rates_are_translated_exactly() -> None:
    """lr = eps^2 N / M, 1 - momentum = eps V / M, at every step; for SGLD lr = eps N."""
    target = hk.Target(lambda p, b: b * p, lambda p: 0.0, np.ones(50))
    rate, momentum, mass = optax.cosine_decay_schedule(0.2, 100), optax.linear_schedule(0.5, 0.9, 80), 2.5
    found = hk.SGHMC.from_learning_rate(rate, momentum, target=target, mass=mass, integrator="obabo", temperature=0.5)
    fixed = hk.SGHMC.from_learning_rate(0.2, 0.9, target=target, mass=mass)
    assert found.integrator == "obabo" and found.temperature == 0.5 and found.mass == fixed.mass == mass
    for step in (0, 30, 99):
        eps, V = float(found.step_size(step)), float(found.friction(step))
        assert eps**2 * 50 / mass == pytest.approx(float(rate(step)), rel=1e-5)
        assert 1 - eps * V / mass == pytest.approx(float(momentum(step)), rel=1e-5)
    assert fixed.step_size**2 * 50 / mass == pytest.approx(0.2)
    assert 1 - fixed.step_size * fixed.friction / mass == pytest.approx(0.9)
    assert hk.SGLD.from_learning_rate(0.2, target=target).step_size * 50 == pytest.approx(0.2)
    assert hk.SGLD.from_learning_rate(rate, target=target).step_size(30) * 50 == pytest.approx(float(rate(30)))


def test_numbers_and_trees_of_numbers() -> None:
    check_number("mass", {"a": np.ones(3), "b": 2}, 0.0, exclusive=True, tree=True)
    check_number("decay", 0.0, 0.0, below=1.0)
    for value, below, message in ((1.0, 1.0, "less than 1"), (0, np.inf, "greater than 0"), ({}, np.inf, "is {}")):
        with pytest.raises(hk.ArgumentError, match=message):
            check_number("decay", value, 0.0, exclusive=True, below=below)
    with pytest.raises(hk.ArgumentError, match=r"is None\. Give a number, or a pytree"):
        check_number("mass", None, 0.0, tree=True)


# -- when springs act --------------------------------------------------------------------------------------------------


def test_hold() -> None:
    schedule = hk.hold().bind(10)
    assert np.all(factors(schedule, 50) == 1) and schedule.draws_are_coupled
    assert schedule.kept_steps(50, 10, 4).tolist() == list(range(14, 51, 4))


def test_release_lets_go_within_the_warmup() -> None:
    schedule = hk.release(0.5, 0.75).bind(80)
    np.testing.assert_allclose(factors(schedule, 200), np.clip((60 - np.arange(200)) / 20, 0, 1), atol=1e-6)
    assert factors(schedule, 200)[39] == 1 and 0 < factors(schedule, 200)[59] and factors(schedule, 200)[60] == 0
    assert not schedule.draws_are_coupled
    assert schedule.kept_steps(200, 80, 40).tolist() == [120, 160, 200]


def test_release_over_steps_of_ones_own() -> None:
    schedule = hk.release(0.5, 0.75, over=40)
    assert np.array_equal(factors(schedule.bind(30), 100) > 0, np.arange(100) < 30)
    assert not schedule.bind(30).draws_are_coupled
    assert schedule.bind(29).draws_are_coupled  # the first draw may be after 30 steps, the last of which still felt it


def test_cycle_keeps_only_what_settled_without_springs() -> None:
    period, coupled, settle = 20, 0.25, 0.3
    schedule = hk.cycle(period, coupled, settle).bind(0)
    assert not schedule.draws_are_coupled
    acts = factors(schedule, 100)
    assert np.array_equal(acts, np.tile([1.0] * 5 + [0.0] * 15, 5))
    kept = schedule.kept_steps(100, 0, 1)
    # The state after s steps made its last one at s - 1, which must be 6 steps or more after the springs were off.
    free = np.array([(s - 1) % period >= 5 + 6 for s in range(1, 101)])
    assert np.array_equal(kept, np.arange(1, 101)[free])
    assert all(not acts[step - 1 - 6 : step].any() for step in kept)
    assert schedule.kept_steps(100, 50, 7).tolist() == [s for s in range(57, 101, 7) if s in kept]


def test_a_schedule_knows_its_warmup_only_when_bound() -> None:
    unbound = hk.release()
    assert unbound.period is None and unbound.bind(40).period == 40 and unbound.bind(8).period == 8
    assert hk.release(over=16).bind(40).period == 16
    assert hk.cycle(10).bind(3).period == 10


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (hk.hold(), "COUPLED: kept draws feel the springs"),
        (hk.release(), "uncoupled: the chains were let go before draws were kept"),
        (hk.cycle(10), "uncoupled: the chains were let go before draws were kept"),
    ],
)
def test_couplings_tell_whether_draws_are_coupled(schedule: CouplingSchedule, words: str) -> None:
    elastic = hk.Elastic(1.0, schedule=schedule).bind(20)
    assert elastic.couples_draws == words.startswith("COUPLED")
    spread = elastic.covariance(2.0, 4, 1.0)
    assert (spread[0, 0] < 0.5) == elastic.couples_draws and (spread[0, 1] > 0) == elastic.couples_draws
    assert not hk.Elastic(0.0, schedule=schedule).bind(20).couples_draws
    assert not hk.Independent(schedule=schedule).bind(20).couples_draws


def test_no_law_is_claimed_for_draws_on_the_way_from_coupled_to_free() -> None:
    assert hk.Elastic(1.0, schedule=hk.release(over=90)).bind(20).covariance(2.0, 4, 1.0) is None


@pytest.mark.parametrize("schedule", [hk.release(), hk.cycle(8)], ids=["release", "cycle"])
def test_the_force_follows_the_schedule(schedule: CouplingSchedule) -> None:
    """Chains that feel nothing but their springs move until these are off, and in a cycle again when they are on."""
    run = hk.sample(
        hk.Target.from_log_density(lambda x: 0.0 * x),
        lambda key: jax.random.normal(key),
        dynamics=hk.SGLD(0.1, temperature=0),
        coupling=hk.Elastic(2.0, schedule=schedule),
        chains=2,
        num_steps=16,
        warmup=8 if schedule.kind == "release" else 0,
        progress=False,
    )
    draws, starts = np.asarray(run.draws), np.asarray(run.job.starts)
    first, second = draws[:, :4], draws[:, 4:]
    assert second.shape == (2, 4)  # after steps 9 to 16, or 5 to 8 and 13 to 16
    assert np.ptp(first, axis=1).max() == np.ptp(second, axis=1).max() == 0
    assert np.ptp(first[:, 0]) < 0.9 * np.ptp(starts)
    assert (np.ptp(second[:, 0]) < 0.9 * np.ptp(first[:, 0])) == (schedule.kind == "cycle")
