"""What a run reports of itself: curvatures, expected shrinkage, errors of means, and words that must be true.

False alarms: each statistical check fails by chance once in 10^6; there are fewer than 20.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import hookean as hk
from hookean import diagnostics
from hookean.diagnostics import expected_shrinkage, human_bytes, mean_and_error, spectrum
from hookean.engines import Engine
from hookean.job import STATISTICS, Job, Result
from hookean.preparation import prepare
from hookean.random import Noise

FALSE_ALARM = 1e-6
SGHMC = hk.SGHMC(0.1)


class Stub(Engine):
    """Compiles and runs nothing."""

    summary = "nothing is run"

    def run(self, job: Job, recorder: Any, saved: Any = None) -> dict[str, Any]:
        raise NotImplementedError


def quadratic(matrix: Any) -> hk.Target:
    A = jnp.asarray(matrix, jnp.float32)
    return hk.Target.from_log_density(lambda p: -0.5 * _flat(p) @ (A * _flat(p) if A.ndim == 1 else A @ _flat(p)))


def _flat(params: Any) -> jax.Array:
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])


def job_of(target: hk.Target, init: Any, coupling: Any = None, **changes: Any) -> Job:
    settings: dict[str, Any] = dict(
        dynamics=SGHMC, chains=4, num_steps=1000, warmup=100, thin=1, engine=Stub(), seed=0, **changes
    )
    return prepare(target, init, coupling=coupling or hk.Independent(), **settings)


# -- curvature ---------------------------------------------------------------------------------------------------------


def signs(size: int) -> np.ndarray:
    return np.random.default_rng(0).choice([-1.0, 1.0], size) / np.sqrt(size)


def test_the_spectrum_of_a_small_quadratic_is_exact() -> None:
    random = np.random.default_rng(1)
    directions = np.linalg.qr(random.standard_normal((10, 10)))[0]
    curvatures = np.linspace(-1.0, 8.0, 10)
    target = quadratic(directions @ np.diag(curvatures) @ directions.T)
    position = {"a": np.ones((2, 3)), "b": np.ones(4)}
    nodes, weights = spectrum(job_of(target, position), position)
    np.testing.assert_allclose(nodes, curvatures, atol=1e-4)
    np.testing.assert_allclose(weights, (directions.T @ signs(10)) ** 2, atol=1e-4)


def test_repeated_curvatures_count_by_their_share() -> None:
    job = job_of(quadratic(np.repeat([2.0, 5.0], [9, 3])), np.ones(12))
    nodes, weights = spectrum(job, np.ones(12))
    np.testing.assert_allclose(nodes, [2, 5], atol=1e-4)
    np.testing.assert_allclose(weights, [0.75, 0.25], atol=1e-4)  # signs weigh all coordinates alike
    assert diagnostics.sharpest_curvature(job) == pytest.approx(5, rel=1e-4)


def test_the_spectrum_of_a_large_quadratic_is_close() -> None:
    curvatures = np.linspace(0.5, 20.0, 600)
    nodes, weights = spectrum(job_of(quadratic(curvatures), np.ones(600)), np.ones(600))
    assert len(nodes) == diagnostics.LANCZOS_STEPS
    assert 0.99 * 20 < nodes.max() <= 20 * (1 + 1e-5)
    assert weights.sum() == pytest.approx(1)
    assert weights @ (1 / (1 + nodes)) == pytest.approx(np.mean(1 / (1 + curvatures)), rel=1e-4)


def test_a_stream_and_a_large_set_have_a_curvature_too() -> None:
    """Of U~ on a batch, scaled up to all examples."""

    def log_likelihood(params: Any, batch: Any) -> jax.Array:
        return -0.5 * batch * params**2

    targets = {
        "set": hk.Target(log_likelihood, lambda p: -0.5 * p**2, np.full(5000, 3.0), batch_size=2),
        "stream": hk.Target.from_batches(log_likelihood, lambda p: -0.5 * p**2, [np.full(8, 3.0)], 5000),
    }
    for target in targets.values():
        assert diagnostics.sharpest_curvature(job_of(target, 0.3)) == pytest.approx(3.0 * 5000 + 1, rel=1e-4)


def test_where_there_is_no_curvature_none_is_stated() -> None:
    job = job_of(hk.Target.from_log_density(lambda x: jnp.sqrt(-1 - x**2)), 1.0, hk.Elastic())
    assert np.isnan(spectrum(job, jnp.ones(()))[0]).all()
    assert expected_shrinkage(job, jnp.ones(())) is None


@pytest.mark.parametrize(("chains", "alpha"), [(4, 1.0), (2, 7.0), (1, 3.0)])
def test_the_expected_shrinkage_is_that_of_the_hamiltonian(chains: int, alpha: float) -> None:
    """Var(theta_i) = T [(1/K)/h + (1 - 1/K)/(h + alpha/K)], over T/h, mean over directions."""
    curvatures = np.array([0.3, 1.0, 4.0, 11.0])
    job = prepare(quadratic(curvatures), np.ones(4), SGHMC, hk.Elastic(alpha), chains, 10, 0, 1, Stub(), 0)
    variances = (1 / chains) / curvatures + (1 - 1 / chains) / (curvatures + alpha / chains)
    assert expected_shrinkage(job, np.ones(4)) == pytest.approx(np.mean(variances * curvatures), rel=1e-4)


def test_the_expected_shrinkage_of_the_case_in_the_tables() -> None:
    one = quadratic(np.ones(1))
    assert expected_shrinkage(job_of(one, np.ones(1), hk.Elastic(1.0)), np.ones(1)) == pytest.approx(0.85, rel=1e-5)
    assert expected_shrinkage(job_of(one, np.ones(1), hk.Elastic(lambda step: 1.0)), np.ones(1)) is None
    for free in (hk.Independent(), hk.Elastic(0.0), hk.Elastic(1.0, schedule=hk.release())):
        assert expected_shrinkage(job_of(one, np.ones(1), free), np.ones(1)) == pytest.approx(1)


def test_directions_that_curve_down_count_as_flat() -> None:
    job = job_of(quadratic(np.array([-3.0, 4.0])), np.ones(2), hk.Elastic(1.0))
    flat = 0.25  # where the springs alone hold the chains together, only the mean is as wide as the target
    assert expected_shrinkage(job, np.ones(2)) == pytest.approx((flat + (0.25 + 0.75 * 4 / 4.25)) / 2, rel=1e-3)


# -- errors of means ---------------------------------------------------------------------------------------------------


def test_the_error_of_a_mean_of_white_noise() -> None:
    """Means of 20 stretches: the mean over its error follows Student's law with 19 degrees of freedom."""
    noise = np.random.default_rng(3).standard_normal((2000, 3, 200))
    found = np.array([mean_and_error(series + 5.0) for series in noise])
    np.testing.assert_allclose(found[:, 0], noise.mean((1, 2)) + 5.0)
    assert stats.kstest((found[:, 0] - 5.0) / found[:, 1], stats.t(19).cdf).pvalue > FALSE_ALARM


def test_the_error_of_a_mean_of_correlated_draws() -> None:
    """x' = 0.9 x + noise: stretches of 200 draws see 95 % of the variance of the mean, which 19 times white noise's."""
    phi, length, stretches, count = 0.9, 4000, 20, 400
    random = np.random.default_rng(4)
    series = np.empty((count, length))
    series[:, 0] = random.standard_normal(count)
    for t in range(1, length):
        series[:, t] = phi * series[:, t - 1] + np.sqrt(1 - phi**2) * random.standard_normal(count)
    covariance = phi ** np.abs(np.subtract.outer(np.arange(length), np.arange(length)))
    cells = covariance.reshape(stretches, length // stretches, stretches, -1).mean((1, 3))  # of the stretches' means
    expected = (np.trace(cells) - cells.mean() * stretches) / (stretches - 1) / stretches
    truth = cells.mean()
    assert 0.9 * truth < expected < truth
    squares = np.array([mean_and_error(one[None])[1] ** 2 for one in series])
    z = (squares.mean() - expected) / (squares.std(ddof=1) / np.sqrt(count))
    assert abs(z) < stats.norm.isf(FALSE_ALARM / 2)


def test_no_error_is_stated_for_few_draws_and_none_are_counted_that_are_missing() -> None:
    mean, error = mean_and_error(np.arange(39.0)[None])
    assert mean == 19 and np.isnan(error)
    series = np.ones((2, 100))
    series[0, 50:] = np.nan  # a worker that was lost
    series[:, 90:] = np.nan  # and then the other
    assert mean_and_error(series) == (1, 0)
    assert np.isnan(mean_and_error(np.full((2, 50), np.nan))).all()


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536 * 1024, 3 * 2**30, 2**45)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "3.0 GiB",
        "32.0 TiB",
    ]


# -- the summary -------------------------------------------------------------------------------------------------------


def report(
    coupling: Any, dynamics: Any = SGHMC, kinetic: float = 1.0, configurational: float = 1.0, staleness: float = np.nan
) -> str:
    """The summary of a run that would have had these statistics, with errors of about 0.3 %."""
    job = prepare(quadratic(np.ones(2)), np.ones(2), dynamics, coupling, 4, 600, 100, 1, Stub(), 0)
    draws, empty = job.empty_draws()
    shape = empty["potential"].shape
    random = np.random.default_rng(5)
    means = dict(
        zip(STATISTICS, (1.0, kinetic, configurational, 0.5, staleness, 4.0 + 0 * staleness), strict=True)
    )  # NaN where there is no centre
    noise = {"kinetic_temperature": 0.1, "configurational_temperature": 0.1}
    values = {n: m + noise.get(n, 0.0) * random.standard_normal(shape) for n, m in means.items()}
    return diagnostics.summary(job, Result(jnp.ones_like(draws), values, {"steps": job.num_steps}))


def line(text: str, name: str) -> str:
    (found,) = [one for one in text.splitlines() if one.startswith(f"{name} ")]
    return found.removeprefix(name).strip()


def cautions(text: str) -> list[str]:
    return [one.removeprefix("careful").strip() for one in text.splitlines() if one.startswith("careful")]


COLD = hk.SGHMC(0.1, temperature=0)


@pytest.mark.parametrize(
    ("coupling", "draws", "spread"),
    [
        (hk.Independent(), "uncoupled: no chain felt another", ""),
        (hk.Elastic(0.0), "uncoupled: no chain felt another", "no springs act on the draws"),
        (hk.Elastic(1.0, schedule=hk.release()), "were let go before draws were kept (release)", "no springs act"),
        (hk.Elastic(1.0, schedule=hk.cycle(20)), "were let go before draws were kept (cycle)", "no springs act"),
    ],
    ids=["independent", "alpha 0", "release", "cycle"],
)
def test_the_summary_of_free_draws(coupling: Any, draws: str, spread: str) -> None:
    text = report(coupling)
    assert draws in line(text, "draws") and "COUPLED" not in text
    assert spread in line(text, "spread") and re.search(r"1\.00\d \+- 0\.00\d measured", line(text, "spread"))
    assert re.search(r"^target 1, kinetic (0\.99|1\.00)\d \+- 0\.00\d", line(text, "temperature"))
    assert cautions(text) == []


def test_the_summary_of_coupled_draws() -> None:
    text = report(hk.Elastic(1.0), configurational=0.85, staleness=3.0)
    assert line(text, "draws") == "COUPLED: kept draws feel the springs"
    assert "variance 0.850 of the posterior's expected" in line(text, "spread")
    assert "narrower than the posterior" in line(text, "law")
    assert "staleness 3.0 steps on average, 3 at most; live workers 4 to 4" in line(text, "exchange")
    (caution,) = cautions(text)  # and none of the configurational temperature, which has to be low
    assert "not draws from the posterior; schedule=hk.release() or hk.cycle()" in caution


def test_the_summary_of_draws_that_were_let_go_too_late() -> None:
    with pytest.warns(hk.HookeanWarning, match="let go at step 300"):
        text = report(hk.Elastic(1.0, schedule=hk.release(over=400)))
    assert line(text, "draws") == "COUPLED: the first kept draws feel the springs"
    assert "no law is claimed" in line(text, "spread")


def test_the_summary_of_the_system_as_printed() -> None:
    text = report(hk.ElasticAsPrinted(), kinetic=0.02)
    assert "COUPLED" in line(text, "draws") and "no posterior" in line(text, "law")
    assert "no law is claimed" in line(text, "spread")
    coupled, cold = cautions(text)
    assert "hk.release" not in coupled  # which would not help
    assert "the momenta are 0.02 times as hot as asked, too cold" in cold


@pytest.mark.parametrize("staleness", [0.0, 2.0])
def test_the_summary_of_a_server(staleness: float) -> None:
    """Bias comes from gradients that were stale, on batches or not; fresh ones are just parallel."""
    text = report(hk.StaleGradient(2, 2), staleness=staleness)
    assert "one chain, gradients from 4 workers" in text
    assert line(text, "draws").endswith("moved by stale gradients" if staleness else "moved by fresh gradients")
    assert ("stale gradients bias the law" in "".join(cautions(text))) == (staleness > 0)


@pytest.mark.parametrize("coupling", [hk.EASGD(), hk.EAMSGD()])
def test_the_summary_of_an_optimiser(coupling: Any) -> None:
    text = report(coupling, COLD, kinetic=0.3, configurational=0.1)
    assert line(text, "draws") == "not draws from a law: the path of an optimiser"
    assert "no law: an optimiser" in line(text, "law") and "spread" not in text
    assert cautions(text) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kinetic": 1.2}, "the momenta are 1.20 times as hot as asked (gradient noise, or too large a step)"),
        ({"kinetic": 0.8}, "the momenta are 0.80 times as hot as asked, too cold"),
        ({"configurational": 1.5}, "the positions are 1.50 times as hot as asked"),
        ({"configurational": 0.6}, "the positions are 0.60 times as hot as asked, too cold"),
    ],
)
def test_a_temperature_that_is_off_is_told(changes: dict[str, float], words: str) -> None:
    (caution,) = cautions(report(hk.Independent(), **changes))
    assert words in caution


def test_a_temperature_is_compared_with_the_one_asked_for() -> None:
    (caution,) = cautions(report(hk.Independent(), hk.SGHMC(0.1, temperature=0.5), kinetic=0.5, configurational=0.5))
    assert caution == "at temperature 0.5 the target is the posterior to the power 2"
    # Where it falls in time, with its mean over the draws: from 1 at the start to 0.4 at step 600.
    falling = hk.SGHMC(0.1, temperature=lambda step: 1 - step / 1000)
    text = report(hk.Independent(), falling, kinetic=0.65, configurational=0.65)
    assert line(text, "temperature").startswith("target 0.65") and not any("hot" in one for one in cautions(text))


def test_no_draws_and_missing_draws() -> None:
    job = job_of(quadratic(np.ones(2)), np.ones(2))
    draws, values = job.empty_draws()
    none = Result(draws[:, :0], {name: value[:, :0] for name, value in values.items()}, {"steps": 7})
    assert diagnostics.summary(job, none).endswith("No draw was kept.")
    some = {
        name: np.where(np.arange(value.shape[1]) < 100, 1.0, np.nan) * np.ones(value.shape)
        for name, value in values.items()
    }
    assert "3200 of 3600 draws are missing (NaN)" in diagnostics.summary(job, Result(draws, some, {"steps": 7}))
    nothing = diagnostics.summary(job, Result(draws, values, {"steps": 7}))
    assert "3600 of 3600 draws are missing" in nothing and "not measured" in nothing


# -- on real runs ------------------------------------------------------------------------------------------------------


DYNAMICS = hk.SGHMC(0.1, integrator="obabo")  # whose momenta have no bias of first order


def run(coupling: Any) -> str:
    """A Gaussian with curvature 1 in 20 directions."""
    settings: dict[str, Any] = dict(chains=4, num_steps=20_000, warmup=2000, thin=10, progress=False)
    target = hk.Target.from_log_density(lambda x: -0.5 * jnp.sum(x**2))
    settings["engine"] = hk.Vectorised()
    return hk.sample(target, np.zeros(20), dynamics=DYNAMICS, coupling=coupling, **settings).summary()


def measured(text: str, name: str, pattern: str) -> tuple[float, float]:
    return tuple(float(number) for number in re.search(pattern, line(text, name)).groups())  # type: ignore[union-attr]


LIMIT = float(stats.t(19).isf(FALSE_ALARM / 2))
ROUNDING = 0.001  # of the text
BIAS = 0.1**2  # of the integrator, to second order in the step: relative, on a curvature of 1


def test_a_held_run_measures_the_shrinkage_that_is_expected() -> None:
    text = run(hk.Elastic(1.0))
    assert "variance 0.850 of the posterior's expected" in line(text, "spread")
    for expected, found in (
        (0.85, measured(text, "spread", r"; (\S+) \+- (\S+) measured")),
        (1.0, measured(text, "temperature", r"kinetic (\S+) \+- ([^,]+)")),
    ):
        assert 0 < found[1] < 0.02
        assert abs(found[0] - expected) < LIMIT * (found[1] + ROUNDING) + BIAS
    assert len(cautions(text)) == 1


def test_wrong_noise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise of 1.2 times its variance heats momenta and positions to 1.2."""
    normal = Noise.normal
    monkeypatch.setattr(Noise, "normal", lambda self, like: jax.tree.map(lambda z: 1.2**0.5 * z, normal(self, like)))
    momenta, positions = cautions(run(hk.Independent()))
    assert re.search(r"the momenta are 1\.(1[6-9]|2[0-4]) times as hot as asked", momenta)
    assert re.search(r"the positions are 1\.(1[5-9]|2[0-5]) times as hot as asked", positions)
