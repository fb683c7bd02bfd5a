"""Bayesian linear regression with minibatches: the posterior, and what the noise of the gradient makes of it, exactly.

    y_n = x_n . theta + N(0, 1),   theta ~ N(0, 1 / PRECISION)   so that   U = sum_n (y_n - x_n . theta)^2 / 2 + ...

The gradient on a batch is affine, g = A theta - b, with A and b means over the examples that were drawn. A step is
linear in (state, g), hence y' = F y + noise with y = (theta, p, 1) and a random matrix F. The law of y after any number
of steps has moments that obey S' = E[F S F'] + Q, S = E[y y']: no limit of small steps, no Gaussian approximation. With
replacement F is drawn anew at each step, and E[F S F'] needs no more than the moments of single examples. An epoch of
a few examples is taken as one step, and E is the mean over all orders of the data.

Chains that share nothing are independent replicates: their states after the last step, all moments of them, are
compared with that law.

False alarms. Each entry of mean and covariance is a mean of CHAINS independent terms, (z - m)_i or
(z - m)_i (z - m)_j - C_ij, of expectation 0 under the law; its standard score uses the terms' own spread, so states
need not be Gaussian. A comparison fails if one of its k scores exceeds the two-sided normal quantile of 1e-7 / k. The
scores are not quite normal so far out: for the square of a normal, skewness 2.83, the lower tail at 5.9 is larger by
exp(5.9^3 x 2.83 / (3 sqrt(CHAINS))), which is 4.5-fold for 16,384 chains (the upper tail is
smaller). So a comparison fails by chance with less than 1e-6.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import hookean as hk

PRECISION = 5.0
CHAINS = 16_384
BATCH = 10
START = np.array([1.5, -1.0])
STEPS, EARLY = 200, 20  # close to stationary, and far from it
FRICTION = 10.0
FAR = 9.0
"""Score of a law that is certainly refused; those of the wrong laws below are expected to be 14 or more."""


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    x: np.ndarray
    y: np.ndarray

    def target(self, batch_size: int | None, batching: str = "replacement") -> hk.Target:
        def log_likelihood(theta, batch):
            x, y = batch
            return -0.5 * (y - x @ theta) ** 2

        def log_prior(theta):
            return -0.5 * PRECISION * jnp.sum(theta**2)

        data = (jnp.asarray(self.x, jnp.float32), jnp.asarray(self.y, jnp.float32))
        return hk.Target(log_likelihood, log_prior, data, batch_size=batch_size, batching=batching)

    def gradients(self, factor: float = 1.0) -> np.ndarray:
        """[example, d, d + 1]: g = gradients @ (theta, 1), were the batch this example. `factor` spoils N/|B|."""
        ours = np.concatenate([self.x, -self.y[:, None]], 1)
        likelihood = factor * len(self.x) * self.x[:, :, None] * ours[:, None, :]
        return likelihood + PRECISION * np.eye(2, 3)

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        covariance = np.linalg.inv(self.x.T @ self.x + PRECISION * np.eye(2))
        return covariance @ self.x.T @ self.y, covariance


def make_data(count: int) -> Data:
    """The two examples that weigh most come first and last, so that no range can leave them out unseen."""
    random = np.random.default_rng(7)
    x = random.normal(size=(count, 2)) @ np.array([[1.0, 0.4], [0.0, 0.8]])
    y = x @ [0.8, -0.5] + random.normal(size=count)
    order = np.roll(np.argsort(np.sum(x**2, 1) * y**2), 1)
    return Data(x[order].astype(np.float32).astype(float), y[order].astype(np.float32).astype(float))


DATA = make_data(100)


# -- the oracle --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """z' = stay z + push g + N(0, noise), for one coordinate; z = (theta, p), or theta alone."""

    stay: np.ndarray
    push: np.ndarray
    noise: np.ndarray

    @property
    def order(self) -> int:
        return len(self.stay)


def step_of(dynamics: hk.Dynamics, estimate: float = 0.0) -> Step:
    """The printed rules at T = M = 1, once more."""
    eps = dynamics.step_size
    if isinstance(dynamics, hk.SGLD):
        return Step(np.eye(1), np.array([-eps]), np.full((1, 1), 2 * eps))
    V = dynamics.friction
    if dynamics.integrator == "obabo":
        keep = np.exp(-V * eps)
        spread, push = 1 - keep**2, -eps / 2 * (1 + keep)
    else:
        keep = 1 - eps * V
        spread, push = 2 * eps * V - eps**2 * estimate, -eps
    if dynamics.integrator == "explicit":
        return Step(np.array([[1, eps], [0, keep]]), np.array([0, push]), np.diag([0, spread]))
    drift = np.array([eps, 1.0])  # theta' = theta + eps p'
    return Step(np.array([[1, eps * keep], [0, keep]]), push * drift, spread * np.outer(drift, drift))


def matrices(steps: tuple[Step, Step], gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For y = (theta_1, theta_2, p_1, p_2, 1): F without gradient, F's gradient part [..., y, y], and Q.

    One `Step` for each coordinate, as each may have its own injected noise.
    """
    order = steps[0].order
    size = 2 * order + 1
    free, noise, push = np.zeros((size, size)), np.zeros((size, size)), np.zeros((size, 2))
    free[-1, -1] = 1
    for i, step in enumerate(steps):
        own = np.arange(i, 2 * order, 2)
        free[np.ix_(own, own)], noise[np.ix_(own, own)], push[own, i] = step.stay, step.noise, step.push
    slopes = np.zeros((*gradients.shape[:-1], size))
    slopes[..., :2], slopes[..., -1] = gradients[..., :2], gradients[..., 2]
    return free, push @ slopes, noise


@dataclasses.dataclass(frozen=True)
class Law:
    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def of(cls, moments: np.ndarray) -> "Law":
        mean = moments[:-1, -1]
        return cls(mean, moments[:-1, :-1] - np.outer(mean, mean))

    def positions(self) -> "Law":
        return Law(self.mean[:2], self.covariance[:2, :2])


def opening(order: int) -> np.ndarray:
    """E[y y'] at the start: theta known, p from N(0, 1)."""
    y = np.concatenate([START, np.zeros(2 * (order - 1)), [1]])
    return np.outer(y, y) + np.diag([0, 0, *[1.0] * (2 * (order - 1)), 0])


def replacement_law(steps: tuple[Step, Step], gradients: np.ndarray, batch: float, count: int) -> Law:
    """After `count` steps with batches of `batch` independent examples; np.inf for the whole data."""
    free, each, noise = matrices(steps, gradients)
    mean = free + each.mean(0)
    around = each - each.mean(0)
    moments = opening(steps[0].order)
    for _ in range(count):
        scatter = np.einsum("nij,jk,nlk->il", around, moments, around) / len(each) / batch
        moments = mean @ moments @ mean.T + scatter + noise
    return Law.of(moments)


def epoch_law(steps: tuple[Step, Step], gradients: np.ndarray, batch: int, epochs: int) -> Law:
    """After so many epochs of len(gradients) // batch steps, each in a random order of the data."""
    free, each, noise = matrices(steps, gradients)
    orders = np.array(list(itertools.permutations(range(len(gradients)))))
    whole, spread = np.eye(len(free))[None], np.zeros_like(noise)[None]
    for first in range(0, len(gradients) // batch * batch, batch):
        one = free + each[orders[:, first : first + batch]].mean(1)
        whole, spread = one @ whole, one @ spread @ one.transpose(0, 2, 1) + noise
    moments = opening(steps[0].order)
    for _ in range(epochs):
        moments = np.mean(whole @ moments @ whole.transpose(0, 2, 1) + spread, 0)
    return Law.of(moments)


# -- the comparison ----------------------------------------------------------------------------------------------------


def scores(z: np.ndarray, law: Law) -> np.ndarray:
    """Standard scores of all entries of mean and covariance of the replicates z [chain, coordinate]."""
    off = z - law.mean
    i, j = np.triu_indices(z.shape[1])
    terms = np.concatenate([off, off[:, i] * off[:, j] - law.covariance[i, j]], 1)
    return terms.mean(0) / terms.std(0) * np.sqrt(len(z))


def agrees(z: np.ndarray, law: Law) -> None:
    found = scores(z, law)
    limit = norm.isf(1e-7 / (2 * len(found)))
    assert np.abs(found).max() < limit, f"standard scores {found.round(1)}, limit {limit:.2f}"


def sample(
    target: hk.Target, dynamics: hk.Dynamics, num_steps: int = STEPS, *, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions after EARLY steps, and the whole state after the last; all chains begin at START."""
    run = hk.sample(
        target,
        jnp.asarray(START, jnp.float32),
        dynamics=dynamics,
        chains=CHAINS,
        num_steps=num_steps,
        thin=EARLY,
        seed=seed,
        engine=hk.Vectorised(),
        progress=False,
    )
    state = run.info["final"][0].state
    final = np.concatenate([np.asarray(getattr(state, name), float) for name in dynamics.phase], 1)
    return np.asarray(run.draws[:, 0], float), final


# At curvatures of 40 to 110 the noise of the gradient widens the variances by 30 to 80 per cent, and the explicit order
# alone by up to 18. OBABO takes a smaller step, so that its full-batch law is the posterior's.
DYNAMICS = {
    "sgld": hk.SGLD(0.002),
    "semi_implicit": hk.SGHMC(0.02, friction=FRICTION),
    "explicit": hk.SGHMC(0.02, friction=FRICTION, integrator="explicit"),
    "obabo": hk.SGHMC(0.01, friction=FRICTION, integrator="obabo"),
}


def twice(step: Step) -> tuple[Step, Step]:
    return step, step


@pytest.mark.parametrize("name", DYNAMICS)
def test_full_batch(name):
    dynamics, steps = DYNAMICS[name], twice(step_of(DYNAMICS[name]))
    early, final = sample(DATA.target(None), dynamics, seed=[*DYNAMICS].index(name))
    agrees(early, replacement_law(steps, DATA.gradients(), np.inf, EARLY).positions())
    agrees(final, replacement_law(steps, DATA.gradients(), np.inf, STEPS))
    if name == "obabo":
        # Its variance is 1 / (1 - eps^2 h / 4) of the posterior's, a quarter of a standard error here.
        agrees(final[:, :2], Law(*DATA.posterior()))


@pytest.mark.parametrize("name", DYNAMICS)
def test_minibatches(name):
    dynamics, steps = DYNAMICS[name], twice(step_of(DYNAMICS[name]))
    early, final = sample(DATA.target(BATCH), dynamics, seed=4 + [*DYNAMICS].index(name))
    agrees(early, replacement_law(steps, DATA.gradients(), BATCH, EARLY).positions())
    agrees(final, replacement_law(steps, DATA.gradients(), BATCH, STEPS))
    # What this would find: the factor N/|B| left out, gradients without noise, or with half the noise.
    for factor, batch in ((BATCH / len(DATA.x), BATCH), (1.0, np.inf), (1.0, 2 * BATCH)):
        wrong = replacement_law(steps, DATA.gradients(factor), batch, STEPS)
        assert np.abs(scores(final, wrong)).max() > FAR


def gradient_noise(data: Data) -> np.ndarray:
    """Covariance of the stochastic gradient, averaged over the posterior."""
    mean, covariance = data.posterior()
    moments = np.block([[covariance + np.outer(mean, mean), mean[:, None]], [mean[None], np.ones((1, 1))]])
    gradients = data.gradients()
    around = gradients - gradients.mean(0)
    return np.einsum("nij,jk,nlk->il", around, moments, around) / len(around) / BATCH


def test_a_noise_estimate_takes_the_first_order_away():
    """In coordinates in which the gradient's noise is diagonal, as the estimate is one number for each."""
    data = Data(DATA.x @ np.linalg.eigh(gradient_noise(DATA))[1], DATA.y)
    known, unknown = np.diag(gradient_noise(data)), np.zeros(2)
    _, posterior = data.posterior()

    def law(eps: float, estimate: np.ndarray, num_steps: int) -> Law:
        first, second = (step_of(hk.SGHMC(eps, friction=FRICTION), float(each)) for each in estimate)
        return replacement_law((first, second), data.gradients(), BATCH, num_steps)

    def excess(eps: float, estimate: np.ndarray) -> float:
        """Of the stationary variances over the posterior's."""
        stationary = law(eps, estimate, round(10 / eps)).positions().covariance
        return float(np.linalg.norm(np.linalg.solve(posterior, stationary) - np.eye(2)))

    eps = 0.01
    assert 1.8 < excess(eps, unknown) / excess(eps / 2, unknown) < 2.2
    assert 3.6 < excess(eps, known) / excess(eps / 2, known) < 4.4
    assert excess(eps, known) < 0.01 * excess(eps, unknown)

    estimate = jnp.asarray(known, jnp.float32)
    _, final = sample(data.target(BATCH), hk.SGHMC(eps, friction=FRICTION, noise_estimate=estimate), seed=9)
    agrees(final, law(eps, known, STEPS))
    for wrong in (unknown, known[::-1]):
        assert np.abs(scores(final, law(eps, wrong, STEPS))).max() > FAR


def test_epochs():
    """Within an epoch the later batches make up for the earlier ones, so the variance grows less.

    Seven examples in batches of two: three steps an epoch, and one example sits out.
    """
    data, batch, per_epoch, epochs = make_data(7), 2, 3, 20
    gradients, num_steps = data.gradients(), epochs * per_epoch
    dynamics = hk.SGHMC(0.1, friction=2.0)
    steps = twice(step_of(dynamics))
    _, final = sample(data.target(batch, "epochs"), dynamics, num_steps, seed=10)
    right = epoch_law(steps, gradients, batch, epochs)
    agrees(final, right)

    exact, drawn_anew = (replacement_law(steps, gradients, size, num_steps) for size in (np.inf, batch))
    extra, extra_anew = (np.trace((law.covariance - exact.covariance)[:2, :2]) for law in (right, drawn_anew))
    assert 0 < extra < 0.3 * extra_anew
    for factor in (1.0, batch / len(data.x)):
        wrong = replacement_law(steps, data.gradients(factor), batch, num_steps)
        assert np.abs(scores(final, wrong)).max() > FAR
