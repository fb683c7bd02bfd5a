"""What can be said of a run afterwards, and of a potential beforehand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from hookean.job import Job, Result
from hookean.schedules import release, value_at
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
    NaN where the curvature is not finite.
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
        image = np.array(product(flat, batch, jnp.asarray(basis[-1], flat.dtype)), float)
        diagonal.append(float(basis[-1] @ image))
        if not np.all(np.isfinite(image)):
            return np.array([np.nan]), np.ones(1)
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

    As on a Gaussian of that curvature; directions that curve downwards count as flat. None where no law is claimed, or
    where the curvature is not finite.
    """
    nodes, weights = spectrum(job, position)
    if not np.all(np.isfinite(nodes)):
        return None
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
    series = np.asarray(series, float)
    series = series[:, ~np.all(np.isnan(series), 0)]
    if series.size == 0:
        return float("nan"), float("nan")
    over_chains = np.nanmean(series, 0)
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
    temperature = float(np.mean([value_at(dynamics.temperature, step - 1) for step in _some(job.kept_steps)]))
    names = f"{type(dynamics).__name__} x {type(coupling).__name__}"
    workers = f"one chain, gradients from {job.chains} workers" if coupling.server_owns_chain else f"{chains} chains"
    lines = [
        f"{names}: {workers}, {result.info['steps']:,} steps, {draws:,} draws of each kept; "
        f"{size(row(job.starts, 0)):,} parameters, N = {job.target.num_examples:,}, batch {job.target.batch_size:,}",
        f"law         {dynamics.law}" + (f"; together {coupling.law}" if not _is_free(job) else ""),
    ]
    if draws == 0:
        return "\n".join([*lines, "No draw was kept."])
    warnings = _cautions(job, stats, temperature)
    lines.append(f"draws       {_coupled_in_words(job, stats)}")
    lines.append(f"temperature {_temperatures(job, stats, temperature, warnings)}")
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
        warnings.append(f"{missing} of {chains * draws} draws are missing (NaN): their workers were lost or late")
    return "\n".join([*lines, *(f"careful     {warning}" for warning in warnings)])


def _is_free(job: Job) -> bool:
    return job.coupling.rhythm is None


def _is_stale(stats: dict[str, np.ndarray]) -> bool:
    return bool(np.any(stats["staleness"] > 0))


def _coupled_in_words(job: Job, stats: dict[str, np.ndarray]) -> str:
    coupling = job.coupling
    if coupling.optimises:
        return "not draws from a law: the path of an optimiser"
    if coupling.server_owns_chain:
        return f"from the server's chain, moved by {'stale' if _is_stale(stats) else 'fresh'} gradients"
    if coupling.couples_draws:
        which = "kept draws" if coupling.schedule.kind == "hold" else "the first kept draws"
        return f"COUPLED: {which} feel the springs"
    if _is_free(job) or coupling.schedule.kind == "hold":
        return "uncoupled: no chain felt another"
    return f"uncoupled: the chains were let go before draws were kept ({coupling.schedule.kind})"


def _cautions(job: Job, stats: dict[str, np.ndarray], temperature: float) -> list[str]:
    coupling, found = job.coupling, []
    if coupling.couples_draws and not coupling.optimises:
        found.append("coupled draws are not draws from the posterior")
        if not dataclasses.replace(coupling, schedule=release().bind(1)).couples_draws:
            found[-1] += "; schedule=hk.release() or hk.cycle() gives its marginals back"
    if coupling.server_owns_chain and _is_stale(stats):
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


def _some(steps: np.ndarray, most: int = 100) -> np.ndarray:
    return steps if len(steps) <= most else steps[np.linspace(0, len(steps) - 1, most).astype(int)]


def _temperatures(job: Job, stats: dict[str, np.ndarray], temperature: float, warnings: list[str]) -> str:
    words = [f"target {temperature:g}"]
    remedy = "take a smaller step, a larger batch or more friction"
    for name, label, things in (
        ("kinetic_temperature", "kinetic", "momenta"),
        ("configurational_temperature", "configurational", "positions"),
    ):
        mean, error = mean_and_error(stats[name])
        if not np.isfinite(mean):
            continue
        words.append(f"{label} {mean:.3f}" + (f" +- {error:.3f}" if np.isfinite(error) else ""))
        if job.coupling.optimises or (label == "configurational" and job.coupling.couples_draws):
            continue
        if np.isfinite(error) and abs(mean - temperature) > max(4 * error, 0.1 * temperature):
            times = f"are {mean / max(temperature, 1e-30):.2f} times"
            if temperature == 0:
                why = f"still move ({mean:.3g})"
            elif mean > temperature:
                why = f"{times} as hot as asked (gradient noise, or too large a step); {remedy}"
            else:
                why = f"{times} as hot as asked, too cold; check the noise that is injected"
            warnings.append(f"the {things} {why}" + ("; or run longer" if label == "configurational" else ""))
    return ", ".join(words)


def _spread(job: Job, result: Result, stats: dict[str, np.ndarray], temperature: float) -> str:
    """Expected shrinkage beside what was measured: theta . grad U / n over T is h Var(theta) / T on a Gaussian."""
    words = []
    there = np.flatnonzero(np.isfinite(stats["potential"][0]))
    if job.coupling.couples_draws and len(there) > 0:
        last = tree_map(lambda leaf: jnp.asarray(leaf[0, int(there[-1])]), result.draws)
        expected = expected_shrinkage(job, last)
        words.append(
            "no law is claimed"
            if expected is None
            else f"variance {expected:.3f} of the posterior's expected, by the curvature measured at the last draw"
        )
    elif not _is_free(job) and not job.coupling.server_owns_chain:
        words.append("variance as the posterior's expected: no springs act on the draws")
    mean, error = mean_and_error(stats["configurational_temperature"])
    if temperature > 0 and np.isfinite(mean):
        words.append(
            f"{mean / temperature:.3f}"
            + (f" +- {error / temperature:.3f}" if np.isfinite(error) else "")
            + " measured (configurational temperature over target)"
        )
    return "; ".join(words) or "not measured"
