"""Fourteen real posteriors, full batch, against the reference draws of posteriordb (Magnusson et al. 2024).

The mean and the standard deviation of every parameter of every model, on the model's own scale, must lie within LIMIT
of the reference, in posterior standard deviations. The chains move in coordinates of mean 0 and covariance I
(`whitened`), and all begin at the same point, one standard deviation off the mean in every direction: a sampler that
does not move has a standard deviation of 0. Posteriors of one step size are sampled together, as one product of
densities, because compilation costs more than sampling.

False alarms. Both sides have a Monte-Carlo error, measured from independent parts: 256 chains here, 100 stretches of
100 nearly independent draws there. The error of a mean is the spread of the parts' means over the square root of their
number, that of a standard deviation half the relative error of the variance. `compare` demands that both errors
together (the reference's alone is 0.010 for a mean, 0.007 to 0.014 for a standard deviation) are at most LIMIT / 5.5.
Then a right sampler fails one check with probability at most 2 Phi(-5.5) = 4e-8, and one that is off by a tenth of the
limit, more than the step sizes account for, with at most Phi(-0.9 x 5.5) + Phi(-1.1 x 5.5) = 4e-7. Both settings
together make 4 x 86 checks, so a right sampler fails any of them with probability at most 1.3e-5.

Step sizes. At curvature h the standard deviation of this integrator is about 1 + eps^2 h / 8 of the right one. In the
whitened regressions h is about 1 (0.1 to 3 over the reference draws), which makes 0.3 % at eps = 0.15. The other three
have sharper corners (h to 16 in garch, 44 in eight schools, 900 in the Gaussian process). There, with 1,024 chains for
a time of 250, halving the step moved no mean by more than 0.010 (errors 0.004 to 0.008), and no standard deviation by
more than 0.8 % (errors 0.3 to 0.6 %).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hookean as hk
from posteriordb import DATA, NAMES, Density, load, whitened

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no reference draws in {DATA}: set HOOKEAN_DATA_DIR to the folder that holds posteriordb"
)

LIMIT = 0.1
ERRORS_IN_LIMIT = 5.5
CHAINS = 256
FRICTION = 1.0
SPRING = 1.0  # alpha / K, beside a curvature of about 1


@dataclasses.dataclass(frozen=True)
class Together:
    """Posteriors that are sampled in one run; times are steps times step size."""

    names: tuple[str, ...]
    step_size: float
    time: float
    warmup: float = 60.0
    between_draws: float = 0.75


SCHOOLS, GARCH, PROCESS = "eight_schools-eight_schools_noncentered", "garch-garch11", "gp_pois_regr-gp_pois_regr"
GROUPS = {
    "regressions": Together(tuple(n for n in NAMES if n not in (SCHOOLS, GARCH, PROCESS)), step_size=0.15, time=90),
    "schools and garch": Together((SCHOOLS, GARCH), step_size=0.08, time=150),
    "gaussian process": Together((PROCESS,), step_size=0.03, time=200),
}


def product(names: tuple[str, ...]) -> tuple[Density, np.ndarray]:
    """Log density of all whitened posteriors side by side in one vector, and where one ends and the next begins."""
    densities = [whitened(load(name)).log_density for name in names]
    cuts = np.cumsum([len(load(name).centre) for name in names])

    def log_density(w: jax.Array) -> jax.Array:
        parts = jnp.split(w, cuts[:-1])
        return sum(density(part) for density, part in zip(densities, parts, strict=True))

    return log_density, cuts


def sample(group: Together, coupling: hk.Coupling, seed: int) -> dict[str, jax.Array]:
    """Draws [chain, draw, coordinate] of each posterior, whitened."""
    log_density, cuts = product(group.names)
    thin = round(group.between_draws / group.step_size)
    warmup = round(group.warmup / group.step_size / thin) * thin
    run = hk.sample(
        hk.Target.from_log_density(log_density),
        jnp.ones(cuts[-1]),
        dynamics=hk.SGHMC(group.step_size, friction=FRICTION),
        coupling=coupling,
        chains=CHAINS,
        num_steps=warmup + round(group.time / group.step_size),
        warmup=warmup,
        thin=thin,
        seed=seed,
        engine=hk.Vectorised(),
        progress=False,
    )
    return dict(zip(group.names, jnp.split(run.draws, cuts[:-1], axis=-1), strict=True))


def elastic(schedule: hk.CouplingSchedule) -> hk.Elastic:
    """Springs as stiff as the posteriors, and a centre as heavy as all chains, so that it keeps their pace."""
    return hk.Elastic(SPRING * CHAINS, every=2, friction=FRICTION * CHAINS, mass=CHAINS, schedule=schedule)


SETTINGS = {"independent": hk.Independent(), "released": elastic(hk.release())}


def moments(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Means and standard deviations of [part, draw, parameter], and their relative errors: parts are independent."""
    mean = parts.mean((0, 1))
    squares = (parts - mean) ** 2
    variance = squares.mean((0, 1))
    root = np.sqrt(len(parts))
    error_of_mean = parts.mean(1).std(0, ddof=1) / root / np.sqrt(variance)
    error_of_sd = squares.mean(1).std(0, ddof=1) / root / (2 * variance)
    return mean, np.sqrt(variance), error_of_mean, error_of_sd


def compare(draws: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Deviations of means and standard deviations of [part, draw, parameter], in standard deviations of the reference.

    Refuses runs too short to tell.
    """
    mean, sd, error_of_mean, error_of_sd = moments(draws)
    right_mean, right_sd, reference_error_of_mean, reference_error_of_sd = moments(reference)
    error = max(
        np.hypot(error_of_mean, reference_error_of_mean).max(), np.hypot(error_of_sd, reference_error_of_sd).max()
    )
    assert error * ERRORS_IN_LIMIT < LIMIT, f"Monte-Carlo error {error:.4f}: the run is too short to tell"
    return (mean - right_mean) / right_sd, sd / right_sd - 1


def in_parts(reference: np.ndarray) -> np.ndarray:
    """Ten chains of a thousand draws, each chain cut into ten."""
    return reference.reshape(100, 100, -1)


@functools.cache
def reference_scores(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The reference in whitened coordinates, and the gradient of the log density there."""
    posterior = whitened(load(name))
    w = posterior.unconstrain(posterior.reference)
    scores = jax.jit(jax.vmap(jax.grad(posterior.log_density)))(jnp.asarray(w, jnp.float32))
    return w, np.asarray(scores, float)


def disagreement(w: np.ndarray, scores: np.ndarray) -> float:
    """Largest standard score of the identities E[score] = 0 and E[(w - E w) score'] = -I, over all entries."""
    products = w[:, :, None] * scores[:, None, :] + np.eye(w.shape[1])
    entries = np.concatenate([scores, products.reshape(len(w), -1)], 1)
    return float(np.abs(entries.mean(0) / entries.std(0) * np.sqrt(len(w))).max())


@pytest.mark.parametrize("name", NAMES)
def test_a_density_is_that_of_its_draws(name):
    """The score of the right density has mean 0 and is paired with its variable as E[(w - E w) score'] = -I.

    Each entry is a mean over 10,000 nearly independent draws, and its standard score is normal: one of 172 (d = 13,
    the most) exceeds 6 with probability 172 x 2 Phi(-6) = 3.4e-7. (The whitened draws have mean 0 by construction.)
    """
    w, scores = reference_scores(name)
    assert disagreement(w, scores) < 6
    # What would move a mean or a standard deviation by the limit is found: a tilted density, a flatter one.
    assert disagreement(w, scores + LIMIT) > 6
    assert disagreement(w, scores / (1 + LIMIT) ** 2) > 6


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("group", GROUPS)
def test_draws_have_the_moments_of_the_reference(group, setting):
    draws = sample(GROUPS[group], SETTINGS[setting], seed=[*SETTINGS].index(setting))

    @jax.jit
    def constrained(draws: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: jax.vmap(jax.vmap(whitened(load(name)).constrain))(values) for name, values in draws.items()}

    wrong = []
    for name, values in constrained(draws).items():
        off, wider = compare(np.asarray(values, float), in_parts(load(name).reference))
        if max(np.abs(off).max(), np.abs(wider).max()) >= LIMIT:
            wrong.append(f"{name}: means off by {off.round(3)}, standard deviations by {wider.round(3)}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_held_chains_are_narrower_than_the_reference():
    """So the limits can tell coupled draws from free ones.

    At curvature 1 a held chain has the variance 1/K + (1 - 1/K) / (1 + alpha/K), here 0.502, in every whitened
    direction. The regressions are close enough to Gaussian for the same limits about that: reference draws weighted by
    exp(-|w - m|^2 alpha / 2K), m their own weighted mean, differ from it by 4.4 % at most, and the errors are
    0.010, so a right sampler fails one check with at most Phi(-5.6) = 1e-8. (Where a posterior is skewed, springs move
    the mean as well, towards the mode: that of mesquite's log sigma by 0.4.)
    """
    expected = np.sqrt(1 / CHAINS + (1 - 1 / CHAINS) / (1 + SPRING))
    for name, draws in sample(GROUPS["regressions"], elastic(hk.hold()), seed=2).items():
        posterior = whitened(load(name))
        reference = posterior.unconstrain(posterior.reference)
        _, wider = compare(np.asarray(draws, float), in_parts(reference))
        assert np.all(wider < -2 * LIMIT), f"{name}: {wider.round(3)}"
        assert np.abs((1 + wider) / expected - 1).max() < LIMIT, f"{name}: {wider.round(3)}"
