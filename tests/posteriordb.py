"""Posteriors with reference draws (posteriordb), as JAX log densities on unconstrained parameters.

`load(name)` gives a `Posterior` in the model's own coordinates u, badly scaled and correlated where the
model is; `whitened(posterior)` gives the same law in coordinates w, u = m + L w, of mean 0 and covariance I.
Densities are up to a constant, include the log-Jacobian of `constrain`, take one vector (`jax.vmap` for
more), and keep its dtype. Data, draws and densities: section `posteriordb` of shared/data/README.md.

float32 is enough everywhere, because each density is written about a point inside the posterior: `near(d)` is
the log density at u = centre + d, and `whitened` passes d = (m - centre) + L w without ever forming u.
"""

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
DATA = Path(os.environ.get("HOOKEAN_DATA_DIR", SHARED)) / "posteriordb"

Density = Callable[[jax.Array], jax.Array]
Model = tuple[Density, np.ndarray, Density, Callable[[np.ndarray], np.ndarray]]


@dataclass(frozen=True, eq=False)
class Posterior:
    name: str
    log_density: Density  # u -> log density, one unconstrained vector
    constrain: Density  # u -> parameters, in the order of `reference`
    reference: np.ndarray  # (draws, parameters), constrained scale, chains stacked
    unconstrain: Callable[[np.ndarray], np.ndarray]  # (draws, parameters) -> (draws, dim), numpy float64
    centre: np.ndarray
    near: Density  # d -> log density at u = centre + d


def _dot(matrix: np.ndarray, vector: jax.Array) -> jax.Array:
    # Highest precision: by default a GPU may round the factors of a float32 product to 11 bits (TF32).
    return jnp.matmul(jnp.asarray(matrix, vector.dtype), vector, precision="highest")


def _plus(constant: np.ndarray, vector: jax.Array) -> jax.Array:
    return jnp.asarray(constant, vector.dtype) + vector


def _half_cauchy(scale: float) -> Callable:
    return lambda beta, sigma: -jnp.log1p((sigma / scale) ** 2)


def _linear(response: np.ndarray, columns: list, log_prior: Callable = lambda beta, sigma: 0.0) -> Model:
    """response ~ N(X beta, sigma), u = (beta, log sigma), about least squares.

    With s = log(sigma / sigma_hat), sigma_hat^2 = rss / n, and X = QR, the likelihood is
    -n s - (n + |R (beta - beta_hat)|^2 / sigma_hat^2) exp(-2s) / 2; the constant n / 2 is taken out.
    """
    design = np.stack([np.broadcast_to(c, response.shape) for c in columns], 1).astype(float)
    n = len(response)
    q, r = np.linalg.qr(design)
    beta_hat = np.linalg.solve(r, q.T @ response)
    sigma_hat = float(np.sqrt(np.mean((response - design @ beta_hat) ** 2)))
    root = r / sigma_hat

    def near(d):
        s = d[-1]
        misfit = jnp.sum(_dot(root, d[:-1]) ** 2)
        log_likelihood = -n * s - 0.5 * (n * jnp.expm1(-2 * s) + misfit * jnp.exp(-2 * s))
        return log_likelihood + log_prior(_plus(beta_hat, d[:-1]), sigma_hat * jnp.exp(s)) + s

    def constrain(u):
        return u.at[-1].set(jnp.exp(u[-1]))

    def unconstrain(draws):
        return np.column_stack([draws[:, :-1], np.log(draws[:, -1])])

    return near, np.append(beta_hat, np.log(sigma_hat)), constrain, unconstrain


def kidscore_momiq(data: dict) -> Model:
    return _linear(data["kid_score"], [1, data["mom_iq"]], _half_cauchy(2.5))


def kidscore_interaction(data: dict) -> Model:
    hs, iq = data["mom_hs"], data["mom_iq"]
    return _linear(data["kid_score"], [1, hs, iq, hs * iq], _half_cauchy(2.5))


def kidscore_mom_work(data: dict) -> Model:
    return _linear(data["kid_score"], [1, *(data["mom_work"] == level for level in (2, 3, 4))])


def earn_height(data: dict) -> Model:
    return _linear(data["earn"], [1, data["height"]])


def logearn_height_male(data: dict) -> Model:
    return _linear(np.log(data["earn"]), [1, data["height"], data["male"]])


def logearn_interaction(data: dict) -> Model:
    height, male = data["height"], data["male"]
    return _linear(np.log(data["earn"]), [1, height, male, height * male])


def nes(data: dict) -> Model:
    ages = [data["age_discrete"] == level for level in (2, 3, 4)]
    rest = [data[key] for key in ("educ1", "gender", "income")]
    return _linear(data["partyid7"], [1, data["real_ideo"], data["race_adj"], *ages, *rest])


def mesquite(data: dict) -> Model:
    keys = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
    return _linear(data["weight"], [1, *(data[key] for key in keys)])


def blr(data: dict) -> Model:
    def log_prior(beta, sigma):
        return -0.5 * (jnp.sum(beta**2) + sigma**2) / 10.0**2

    return _linear(data["y"], list(data["X"].T), log_prior)


def kilpisjarvi(data: dict) -> Model:
    mean, sd = ([float(data[kind + key]) for key in ("alpha", "beta")] for kind in ("pmu", "ps"))

    def log_prior(beta, sigma):
        return -0.5 * sum(((beta[i] - mean[i]) / sd[i]) ** 2 for i in range(2))

    return _linear(data["y"], [1, data["x"]], log_prior)


def autoregression(data: dict) -> Model:
    y, order = data["y"], int(data["K"])

    def log_prior(beta, sigma):
        return -0.5 * jnp.sum(beta**2) / 10.0**2 + _half_cauchy(2.5)(beta, sigma)

    return _linear(y[order:], [1, *(y[order - k : -k] for k in range(1, order + 1))], log_prior)


def eight_schools(data: dict) -> Model:
    """u = (z, mu, log tau), theta = mu + tau z: non-centred. The reference holds theta itself."""

    def split(u):
        return u[:-2], u[-2], jnp.exp(u[-1])

    def near(u):
        z, mu, tau = split(u)
        misfit = _plus(-data["y"], mu + tau * z) / jnp.asarray(data["sigma"], u.dtype)
        log_prior = -0.5 * (jnp.sum(z**2) + (mu / 5) ** 2) - jnp.log1p((tau / 5) ** 2)
        return log_prior - 0.5 * jnp.sum(misfit**2) + u[-1]

    def constrain(u):
        z, mu, tau = split(u)
        return jnp.concatenate([mu + tau * z, mu[None], tau[None]])

    def unconstrain(draws):
        theta, mu, tau = draws[:, :-2], draws[:, -2:-1], draws[:, -1:]
        return np.column_stack([(theta - mu) / tau, mu, np.log(tau)])

    return near, np.zeros(len(data["y"]) + 2), constrain, unconstrain


def garch(data: dict) -> Model:
    """u = (mu, log alpha0, logit alpha1, logit of beta1 / (1 - alpha1))."""

    def constrain(u):
        alpha1 = jax.nn.sigmoid(u[2])
        return jnp.stack([u[0], jnp.exp(u[1]), alpha1, (1 - alpha1) * jax.nn.sigmoid(u[3])])

    def near(u):
        mu, alpha0, alpha1, beta1 = constrain(u)
        squares = _plus(data["y"], -mu) ** 2

        def step(variance, square):
            return alpha0 + alpha1 * square + beta1 * variance, variance

        first = jnp.asarray(data["sigma1"] ** 2, u.dtype)
        _, variances = jax.lax.scan(step, first, squares, unroll=8)
        log_likelihood = -0.5 * jnp.sum(jnp.log(variances) + squares / variances)
        yes, no = jax.nn.log_sigmoid(u[2:]), jax.nn.log_sigmoid(-u[2:])
        return log_likelihood + u[1] + jnp.sum(yes + no) + no[0]

    def unconstrain(draws):
        mu, alpha0, alpha1, beta1 = draws.T
        left = 1 - alpha1
        return np.column_stack([mu, np.log(alpha0), np.log(alpha1 / left), np.log(beta1 / (left - beta1))])

    return near, np.zeros(4), constrain, unconstrain


def gp_poisson(data: dict) -> Model:
    """k ~ Poisson(exp f), f = alpha C w, C C' = exp(-(x_i - x_j)^2 / (2 rho^2)); u = (log rho, log alpha, w).

    rho ~ Gamma(25, rate 4), alpha ~ N(0, 2) on alpha > 0, w ~ N(0, I). For equally spaced x the Cholesky
    factor is known, with q = exp(-(spacing / rho)^2) and P_n = (1 - q) ... (1 - q^n), i, j = 0, 1, ...:
    C_ij = q^((i-j)^2 / 2) P_i / (P_(i-j) sqrt(P_j)) for i >= j.
    It is accurate in float32, and leaves out the jitter of 1e-10 that the reference's model has.
    """
    x, k = data["x"], data["k"]
    n = len(x)
    spacing = float(x[1] - x[0])
    if not np.allclose(np.diff(x), spacing):
        raise ValueError("gp_poisson: the closed-form factor needs equally spaced x")
    lag = np.arange(n)[:, None] - np.arange(n)
    lower, lag = lag >= 0, np.maximum(lag, 0)

    def latent(u):
        rate = jnp.exp(2 * (np.log(spacing).item() - u[0]))  # q = exp(-rate)
        logs = jnp.log(-jnp.expm1(-rate * jnp.arange(1, n, dtype=u.dtype)))
        log_p = jnp.concatenate([jnp.zeros(1, u.dtype), jnp.cumsum(logs)])
        squared_lag = jnp.asarray(lag**2, u.dtype)
        log_c = -0.5 * rate * squared_lag + log_p[:, None] - log_p[lag] - 0.5 * log_p
        factor = jnp.where(lower, jnp.exp(jnp.where(lower, log_c, 0)), 0)
        return jnp.exp(u[1]) * jnp.matmul(factor, u[2:], precision="highest")

    def near(u):
        rho, alpha = jnp.exp(u[0]), jnp.exp(u[1])
        log_prior = 24 * u[0] - 4 * rho - 0.5 * (alpha / 2) ** 2 - 0.5 * jnp.sum(u[2:] ** 2)
        excess = _plus(-np.log(k), latent(u))  # every count is positive
        log_likelihood = jnp.sum(jnp.asarray(k, u.dtype) * (excess - jnp.expm1(excess)))
        return log_prior + log_likelihood + u[0] + u[1]

    def constrain(u):
        return jnp.concatenate([jnp.exp(u[:2]), latent(u)])

    def unconstrain(draws):
        rho, alpha, f = draws[:, 0], draws[:, 1], draws[:, 2:]
        kernel = np.exp(-0.5 * ((x[:, None] - x) / rho[:, None, None]) ** 2)
        factor = alpha[:, None, None] * np.linalg.cholesky(kernel)
        return np.column_stack([np.log(draws[:, :2]), np.linalg.solve(factor, f[..., None])[..., 0]])

    return near, np.zeros(n + 2), constrain, unconstrain


MODELS: dict[str, Callable[[dict], Model]] = {
    "kidiq-kidscore_momiq": kidscore_momiq,
    "kidiq-kidscore_interaction": kidscore_interaction,
    "kidiq_with_mom_work-kidscore_mom_work": kidscore_mom_work,
    "earnings-earn_height": earn_height,
    "earnings-logearn_height_male": logearn_height_male,
    "earnings-logearn_interaction": logearn_interaction,
    "nes1980-nes": nes,
    "mesquite-mesquite": mesquite,
    "sblri-blr": blr,
    "kilpisjarvi_mod-kilpisjarvi": kilpisjarvi,
    "eight_schools-eight_schools_noncentered": eight_schools,
    "arK-arK": autoregression,
    "garch-garch11": garch,
    "gp_pois_regr-gp_pois_regr": gp_poisson,
}
NAMES = tuple(MODELS)


@functools.cache
def load(name: str) -> Posterior:
    if name not in MODELS:
        raise ValueError(f"no posterior {name!r}; the names are {', '.join(NAMES)}")
    if not DATA.is_dir():
        raise FileNotFoundError(f"no folder {DATA}: set HOOKEAN_DATA_DIR to the folder that holds posteriordb/")
    data = json.loads((DATA / f"{name.split('-')[0]}.json").read_text())
    near, centre, constrain, unconstrain = MODELS[name]({k: np.asarray(v, float) for k, v in data.items()})
    draws = np.load(DATA / f"{name}.npz")["draws"]
    return Posterior(
        name=name,
        log_density=lambda u: near(_plus(-centre, u)),
        constrain=constrain,
        reference=draws.reshape(-1, draws.shape[-1]),
        unconstrain=unconstrain,
        centre=centre,
        near=near,
    )


def whitened(posterior: Posterior) -> Posterior:
    """The same law in w, u = m + L w: m and L L' are mean and covariance of the unconstrained reference."""
    draws = posterior.unconstrain(posterior.reference)
    mean, factor = draws.mean(0), np.linalg.cholesky(np.cov(draws.T))
    start = mean - posterior.centre

    def near(w):
        return posterior.near(_plus(start, _dot(factor, w)))

    def unconstrain(reference):
        u = posterior.unconstrain(reference)
        return np.linalg.solve(factor, (u - mean).T).T

    return Posterior(
        name=posterior.name,
        log_density=near,
        constrain=lambda w: posterior.constrain(_plus(mean, _dot(factor, w))),
        reference=posterior.reference,
        unconstrain=unconstrain,
        centre=np.zeros_like(mean),
        near=near,
    )
