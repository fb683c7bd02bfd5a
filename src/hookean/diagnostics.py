"""What can be said of a run afterwards, and of a potential beforehand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from hookean.job import Job, Result
from hookean.schedules import value_at
from hookean.tree import row, size, tree_map
from hookean.types import Params

LANCZOS_STEPS = 24
"""Enough for the extreme curvatures; the mean over the spectrum needs fewer."""
FEWEST_FOR_ERRORS = 40
"""Draws below which no Monte-Carlo error is stated."""


def human_bytes(count: float) -> str:
    """`count` in a unit that a person would choose."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def spectrum(job: Job, position: Params) -> tuple[np.ndarray, np.ndarray]:
    """Curvatures of the potential at `position`, and the share of all directions that each stands for.

    Lanczos quadrature from one random direction: Gauss nodes and weights of the Hessian's spectral density, exact where
    there are no more parameters than LANCZOS_STEPS; the largest node is a close lower bound of the largest curvature.
    """
    flat, unravel = ravel_pytree(position)
    gradient = jax.grad(lambda x, batch: job.target.potential(unravel(x), batch))

    @jax.jit
    def product(x: jax.Array, batch: Any, vector: jax.Array) -> jax.Array:
        return jax.jvp(lambda x: gradient(x, batch), (x,), (vector,))[1]

    batch = job.target.large_batch()
    start = np.random.default_rng(0).choice([-1.0, 1.0], flat.size)
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(LANCZOS_STEPS, flat.size)):
        image = np.asarray(product(flat, batch, jnp.asarray(basis[-1], flat.dtype)), float)
        diagonal.append(float(basis[-1] @ image))
        for _ in range(2):  # twice is enough to keep the basis orthogonal
            for vector in basis:
                image -= (vector @ image) * vector
        length = float(np.linalg.norm(image))
        if not length > 1e-5 * max(abs(max(diagonal, key=abs)), 1e-30):
            break
        beside.append(length)
        basis.append(image / length)
    size = len(diagonal)
    matrix = np.diag(diagonal) + np.diag(beside[: size - 1], 1) + np.diag(beside[: size - 1], -1)
    nodes, vectors = np.linalg.eigh(matrix)
    return nodes, vectors[0] ** 2


def sharpest_curvature(job: Job) -> float:
    """Largest curvature of the potential where the first chain starts."""
    return float(spectrum(job, row(job.starts, 0))[0].max())


def expected_shrinkage(job: Job, position: Params) -> float | None:
    """Variance of the kept draws over that of the target, mean over directions, by the curvature at `position`.

    As on a Gaussian of that curvature; directions that curve downwards count as flat. None where no law is claimed.
    """
    nodes, weights = spectrum(job, position)
    floor = 1e-6 * max(float(np.abs(nodes).max()), 1e-30)
    ratio = 0.0
    for curvature, weight in zip(np.maximum(nodes, floor), weights, strict=True):
        covariance = job.coupling.covariance(float(curvature), job.chains, 1.0)
        if covariance is None:
            return None
        ratio += weight * covariance[0, 0] * curvature
    return float(ratio)


def mean_and_error(series: Any, batches: int = 20) -> tuple[float, float]:
    """Mean of [chain, draw] and its Monte-Carlo error, from the means of `batches` stretches of time; NaN if short."""
    over_chains = np.nanmean(np.asarray(series, float), 0)
    mean = float(np.mean(over_chains))
    if len(over_chains) < FEWEST_FOR_ERRORS:
        return mean, float("nan")
    means = np.array([part.mean() for part in np.array_split(over_chains, batches)])
    return mean, float(means.std(ddof=1) / np.sqrt(batches))


def summary(job: Job, result: Result) -> str:
    """A page about a run: what was sampled, how hot it was, how narrow it should be, and what to be careful about."""
    coupling, dynamics = job.coupling, job.dynamics
    stats = {name: np.asarray(values) for name, values in result.stats.items()}
    chains, draws = stats["potential"].shape
    temperature = float(value_at(dynamics.temperature, job.num_steps - 1))
    names = f"{type(dynamics).__name__} x {type(coupling).__name__}"
    workers = f"one chain, gradients from {job.chains} workers" if coupling.server_owns_chain else f"{chains} chains"
    lines = [
        f"{names}: {workers}, {result.info['steps']:,} steps, {draws:,} draws of each kept; "
        f"{size(row(job.starts, 0)):,} parameters, N = {job.target.num_examples:,}, batch {job.target.batch_size:,}",
        f"law         {dynamics.law}" + (f"; together {coupling.law}" if not _is_free(job) else ""),
    ]
    if draws == 0:
        return "\n".join([*lines, "No draw was kept."])
    warnings = _cautions(job, temperature)
    lines.append(f"draws       {_coupled_in_words(job)}")
    lines.append(f"temperature {_temperatures(stats, temperature, warnings)}")
    if not coupling.optimises:
        lines.append(f"spread      {_spread(job, result, stats, temperature)}")
    if np.isfinite(stats["staleness"]).any():
        ages, live = stats["staleness"], stats["live"]
        unit = "steps of the server" if coupling.server_owns_chain else "steps"
        lines.append(
            f"exchange    staleness {np.nanmean(ages):.1f} {unit} on average, {np.nanmax(ages):.0f} at most; "
            f"live workers {np.nanmin(live):.0f} to {np.nanmax(live):.0f}"
        )
    missing = int(np.isnan(stats["potential"]).sum())
    if missing:
        warnings.append(f"{missing} of {chains * draws} draws are missing (NaN): their workers were not there")
    return "\n".join([*lines, *(f"careful     {warning}" for warning in warnings)])


def _is_free(job: Job) -> bool:
    return job.coupling.rhythm is None


def _coupled_in_words(job: Job) -> str:
    coupling = job.coupling
    if coupling.optimises:
        return "not draws from a law: the path of an optimiser"
    if coupling.server_owns_chain:
        return "from the server's chain, moved by gradients that may be stale"
    if coupling.couples_draws:
        return "COUPLED: the kept draws feel the springs"
    if _is_free(job) or coupling.schedule.kind == "hold":
        return "uncoupled: no chain felt another"
    return f"uncoupled: the chains were let go before draws were kept ({coupling.schedule.kind})"


def _cautions(job: Job, temperature: float) -> list[str]:
    coupling, found = job.coupling, []
    if coupling.couples_draws and not coupling.optimises:
        found.append(
            "coupled draws are not draws from the posterior; "
            "schedule=hk.release() or hk.cycle() gives its marginals back"
        )
    if coupling.server_owns_chain and not job.target.is_exact:
        found.append("stale gradients bias the law; compare with every=1, wait_for=chains at a barrier, or Independent")
    if temperature != 1 and not coupling.optimises:
        found.append(
            f"at temperature {temperature:g} the target is the posterior to the power {1 / temperature:.4g}"
            if temperature > 0
            else "at temperature 0 there is no noise: an optimiser"
        )
    if job.warmup == 0:
        found.append("no warm-up: the first draws still remember where they started")
    return found


def _temperatures(stats: dict[str, np.ndarray], temperature: float, warnings: list[str]) -> str:
    words = [f"target {temperature:g}"]
    for name, label in (("kinetic_temperature", "kinetic"), ("configurational_temperature", "configurational")):
        if not np.isfinite(stats[name]).any():
            continue
        mean, error = mean_and_error(stats[name])
        words.append(f"{label} {mean:.3f}" + (f" +- {error:.3f}" if np.isfinite(error) else ""))
        off = abs(mean - temperature)
        if label == "kinetic" and np.isfinite(error) and off > 4 * error and off > 0.1 * max(temperature, 1e-12):
            way = "hot: gradient noise or too large a step" if mean > temperature else "cold"
            warnings.append(
                f"the momenta are {mean / temperature:.2f} times as hot as asked ({way}); take a smaller step, "
                "a larger batch or more friction"
                if temperature > 0
                else f"the momenta still move ({mean:.3g})"
            )
    return ", ".join(words)


def _spread(job: Job, result: Result, stats: dict[str, np.ndarray], temperature: float) -> str:
    """Expected shrinkage beside what was measured: theta . grad U / n over T is h Var(theta) / T on a Gaussian."""
    words = []
    if not job.coupling.server_owns_chain and job.coupling.rhythm is not None:
        last = tree_map(lambda leaf: jnp.asarray(leaf)[0, -1], result.draws)
        finite = all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(last))
        expected = expected_shrinkage(job, last) if finite else None
        words.append(
            "no law is claimed"
            if expected is None
            else f"variance {expected:.3f} of the posterior's expected, by the curvature measured at the last draw"
        )
    if temperature > 0 and np.isfinite(stats["configurational_temperature"]).any():
        mean, error = mean_and_error(stats["configurational_temperature"])
        words.append(
            f"{mean / temperature:.3f}"
            + (f" +- {error / temperature:.3f}" if np.isfinite(error) else "")
            + " measured "
            "(configurational temperature over target)"
        )
    return "; ".join(words) or "not measured"
