"""Every dynamics x coupling x integrator on Gaussian targets, against its exact law in discrete time.

The target has blocks of 1, 2 and 10 coordinates, each repeated COPIES times. No rule here mixes coordinates beyond the
gradient (but SGNHT's thermostat, which has its own test), so the copies are independent replicas of one small system
and a single run gives an ordinary sample of its law, transient and stationary alike. Delays, stragglers and crashes
are part of the law: it is computed for the very log that the run executed.

False alarms. Where the law is Gaussian the likelihood-ratio statistic of mean and covariance together is chi-square
(Wilks; COPIES is more than 60 times the dimension, so that Bartlett's correction is below 1 %). Where it is not, each
entry of mean and covariance is compared with that of plain NumPy replicas by its z score, Bonferroni over the entries.
Each comparison fails by chance once in 10^7; there are fewer than 2,500 of them: 3 in 10,000 for the whole file.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import hookean as hk
import reference
from hookean import coupling as couplings
from hookean.dynamics import Dynamics
from hookean.engines import simulated, vectorised
from hookean.engines.faults import Faults
from hookean.exchange import Kind, num_boxes
from hookean.random import Noise
from hookean.testing import gaussian_p_value, linear_system

COPIES = 2000
CHAINS = 3
FALSE_ALARM = 1e-7
START = (0.7, 0.5)  # mean and standard deviation

RANDOM = np.random.default_rng(0)
BLOCKS = {"one": slice(0, 1), "two": slice(1, 3), "ten": slice(3, 13)}
PRECISION = np.zeros((13, 13))
for where in BLOCKS.values():  # curvatures from 0.5 to 2.5, in random directions
    size = where.stop - where.start
    directions = np.linalg.qr(RANDOM.standard_normal((size, size)))[0]
    PRECISION[where, where] = directions @ np.diag(np.linspace(0.5, 2.5, size + 2)[1:-1]) @ directions.T


def log_density(x: jax.Array) -> jax.Array:
    return -jnp.sum(x * (x @ jnp.asarray(PRECISION, x.dtype))) / 2


def start(key: jax.Array) -> jax.Array:
    return START[0] + START[1] * jax.random.normal(key, (COPIES, 13))


TARGET = hk.Target.from_log_density(log_density)
SCENARIO = hk.Scenario(
    step_time=(1.0, 1.7, 2.6),
    latency=0.8,
    jitter=0.2,
    stragglers=[hk.Straggler(0, 3.0, 10.0, 30.0)],
    crashes=[hk.Crash(1, 20, restart_after=5.0)],
    joins=[hk.Join(2, 6.0)],
)
ENGINES = {"vectorised": hk.Vectorised(), "simulated": hk.Simulated(SCENARIO)}
SETTINGS: dict[str, Any] = {"chains": CHAINS, "num_steps": 45, "warmup": 9, "thin": 18, "progress": False}


def affine_dynamics() -> list[Dynamics]:
    found = [v for cls, rule in reference.RULES.items() if rule.affine for v in cls.variants(0.3, temperature=0.8)]
    changing = hk.SGHMC(
        step_size=lambda t: 0.35 / (1 + 0.02 * t),
        friction=lambda t: 1.0 + 0.02 * t,
        temperature=lambda t: 1.5 - 0.01 * t,
    )
    return [*found, changing, hk.SGHMC(0.3, 1.5, noise_estimate=2.0)]


def other_dynamics() -> list[Dynamics]:
    return [v for cls, rule in reference.RULES.items() if not rule.affine for v in cls.variants(0.2, temperature=0.8)]


def sampling_couplings() -> list[Any]:
    found = [v for cls in couplings.ALL.values() if not cls.optimises for v in cls.variants()]
    return [*found, hk.Elastic(lambda t: 2.0 + jnp.cos(t * 1.0), 5)]


def slowed(dynamics: Dynamics, coupling: Any) -> Dynamics:
    """Stale gradients need smaller steps."""
    if not isinstance(coupling, hk.StaleGradient):
        return dynamics
    step_size = dynamics.step_size
    return dynamics.replace(step_size=(lambda t: 0.2 * step_size(t)) if callable(step_size) else 0.2 * step_size)


def fits(dynamics: Dynamics, coupling: Any) -> bool:
    if isinstance(coupling, hk.ElasticAsPrinted):
        return isinstance(dynamics, hk.SGHMC)
    if isinstance(coupling, hk.Elastic) and coupling.friction is not None:
        return hasattr(dynamics, "friction")
    if isinstance(coupling, hk.Elastic) and coupling.mass is not None:
        return hasattr(dynamics, "mass")
    return not (isinstance(coupling, hk.StaleGradient) and dynamics.uses_curvature)


def name_of(setting: Any) -> str:
    fields = {f.name: getattr(setting, f.name) for f in dataclasses.fields(setting)}
    defaults = {f.name: f.default for f in dataclasses.fields(setting)}
    shown = [
        f"{k}={'f(t)' if callable(v) else getattr(v, 'kind', v)}"
        for k, v in fields.items()
        if v != defaults[k] and k not in ("step_size", "temperature")
    ]
    return f"{type(setting).__name__}({','.join(shown)})"


def pairs(all_dynamics: list[Dynamics], all_couplings: list[Any]) -> list[Any]:
    return [
        pytest.param(slowed(d, c), c, id=f"{name_of(d)}-{name_of(c)}")
        for d in all_dynamics
        for c in all_couplings
        if fits(d, c)
    ]


def on_engines(found: list[Any]) -> list[Any]:
    """Every pair with delays and crashes; without, once for each two classes, for test_engines.py has equalities."""
    seen: set[tuple[type, type]] = set()
    cases = [pytest.param(*pair.values, "simulated", id=f"{pair.id}-simulated") for pair in found]
    for pair in found:
        classes = type(pair.values[0]), type(pair.values[1])
        if classes not in seen:
            seen.add(classes)
            cases.append(pytest.param(*pair.values, "vectorised", id=f"{pair.id}-vectorised"))
    return cases


def log_of(run: hk.Run) -> list[Any]:
    """What the engine executed, or the plain synchronous order."""
    job = run.job
    return run.info.get("log") or reference.barrier_log(job.coupling, job.chains, job.num_steps, list(job.kept_steps))


def sample(dynamics: Dynamics, coupling: Any, engine: Any, **changes: Any) -> hk.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hk.HookeanWarning)  # settings near the edge are meant
        return hk.sample(TARGET, start, dynamics=dynamics, coupling=coupling, engine=engine, **SETTINGS, **changes)


def samples_of(run: hk.Run, block: str) -> dict[str, np.ndarray]:
    """Rows: copies. Columns: all chains (at a draw), or all chains' states and the centre (at the end)."""
    draws = np.asarray(run.draws[..., BLOCKS[block]], float)
    found = {f"draw {k}": np.concatenate(list(draws[:, k]), 1) for k in range(draws.shape[1])}
    workers, centre = run.info["final"]
    parts = []
    if run.job.coupling.server_owns_chain:
        states = [centre.state]
    else:
        states = [jax.tree.map(lambda leaf, i=i: leaf[i], workers.state) for i in range(CHAINS)]
        if centre is not None:
            parts.append(centre.state.position[:, BLOCKS[block]])
    for state in states:
        parts += [getattr(state, name)[:, BLOCKS[block]] for name in ("position", "momentum") if hasattr(state, name)]
    found["end"] = np.concatenate([np.asarray(p, float) for p in parts], 1)
    return found


def columns_of(system: reference.System, block: str) -> dict[str, np.ndarray]:
    """The same of the reference: rows are the above's columns."""
    where = BLOCKS[block]
    owners = range(1 if system.kind is hk.StaleGradient else CHAINS)
    indices = sorted({draw for _, draw in system.draws})
    found = {f"draw {k}": np.concatenate([system.draws[i, k][where] for i in owners]) for k in indices}
    parts = []
    if system.kind is hk.StaleGradient:
        states = [system.server]
    else:
        states = system.workers
        if system.kind is not hk.Independent:
            parts.append(system.centre.x[where])
    for state in states:
        parts += [getattr(state, name)[where] for name in ("x", "p") if hasattr(state, name)]
    found["end"] = np.concatenate(parts)
    return found


@pytest.mark.parametrize(("dynamics", "coupling", "engine"), on_engines(pairs(affine_dynamics(), sampling_couplings())))
def test_the_law_is_the_exact_one(dynamics: Dynamics, coupling: Any, engine: str) -> None:
    assert_exact(sample(dynamics, coupling, ENGINES[engine]))


def assert_exact(run: hk.Run) -> None:
    mean, spread = reference.law(run.job.dynamics, run.job.coupling, PRECISION, CHAINS, log_of(run), START)
    for block in BLOCKS:
        means, roots = columns_of(mean, block), columns_of(spread, block)
        for moment, samples in samples_of(run, block).items():
            covariance = roots[moment] @ roots[moment].T
            if moment == "end" and block == "ten":
                continue  # too many dimensions for so few copies; the draws of this block are compared
            p = gaussian_p_value(samples, means[moment][:, 0], covariance)
            assert p > FALSE_ALARM, (
                f"block {block}, {moment}: p = {p:.1e}\nmean {samples.mean(0).round(3)}"
                f"\nlaw  {means[moment][:, 0].round(3)}"
                f"\ncov {np.cov(samples.T).round(3)}\nlaw {covariance.round(3)}"
            )


FAULTS = Faults(
    loss=0.2,
    duplication=0.2,
    reordering=0.2,
    delay=0.2,
    worker_crashes=[(0, 7), (1, 20), (1, 33), (2, 40)],
    centre_crashes=[10, 25],
    nans=[(2, 12)],
)


def few_couplings() -> list[Any]:
    """All of free chains, stale gradients and springs; one of those as printed, which are springs to an engine."""
    printed = [c for c in sampling_couplings() if isinstance(c, hk.ElasticAsPrinted)]
    return [c for c in sampling_couplings() if c not in printed[1:] and not callable(getattr(c, "alpha", None))]


@pytest.mark.parametrize(
    ("dynamics", "coupling"),
    pairs([hk.SGHMC(0.3, 1.5, temperature=0.8)], few_couplings())
    + pairs([hk.SGLD(0.1, temperature=0.8)], [hk.Elastic(1.0, 1, simultaneous=True), hk.StaleGradient(4, 1)]),
)
def test_the_law_of_threads_is_the_exact_one_whatever_goes_wrong(dynamics: Dynamics, coupling: Any) -> None:
    """In the order in which it happened. That order owes nothing to what was drawn."""
    run = sample(dynamics, coupling, hk.Threads(faults=FAULTS, snapshot_every=6, max_staleness=2))
    assert run.info["telemetry"].restarts == 4
    assert coupling.rhythm is None or run.info["telemetry"].rebuilds > 0
    assert_exact(run)


@pytest.mark.parametrize("coupling", [hk.Elastic(3.0, 2), hk.Elastic(3.0, 1, friction=0.7)], ids=["every 2", "every 1"])
def test_a_crash_every_fifty_exchanges_leaves_the_law_alone(coupling: Any) -> None:
    """Mean and covariance of all chains' last draw within 3 Monte-Carlo standard errors of the exact coupled law.

    The deviations of all entries together, with the covariance of their errors, have a chi-square distribution (Wilks):
    its root mean square above 3 happens once in 10^46 (27 entries), so that the sharper limit of this file is asked for
    as well. With so many copies 3 errors are few: the law of uncoupled chains is farther away.
    """
    chains, num_steps, copies = 3, 400, 4000
    exchanges = chains * num_steps // coupling.every
    crashes = [(i % chains, (2 * i + 1) * 25 * coupling.every // chains) for i in range(exchanges // 50)]
    precision = PRECISION[1:3, 1:3]
    run = hk.sample(
        hk.Target.from_log_density(lambda x: -jnp.sum(x * (x @ jnp.asarray(precision, x.dtype))) / 2),
        lambda key: START[0] + START[1] * jax.random.normal(key, (copies, 2)),
        dynamics=hk.SGHMC(0.2, 1.0),
        coupling=coupling,
        chains=chains,
        num_steps=num_steps,
        thin=num_steps,
        engine=hk.Threads(faults=Faults(worker_crashes=crashes), max_restarts=len(crashes)),
        progress=False,
    )
    assert run.info["telemetry"].restarts == len(crashes) == exchanges // 50
    draws = np.concatenate(list(np.asarray(run.draws, float)[:, 0]), 1)
    size = draws.shape[1]
    entries = size + size * (size + 1) // 2

    def deviation(coupling: Any, log: list[Any]) -> tuple[float, float]:
        mean, spread = reference.law(run.job.dynamics, coupling, precision, chains, log, START)
        means, roots = (np.concatenate([system.draws[i, 0] for i in range(chains)]) for system in (mean, spread))
        p = gaussian_p_value(draws, means[:, 0], roots @ roots.T)
        return p, float(np.sqrt(stats.chi2.isf(max(p, 1e-300), entries) / entries))

    p, errors = deviation(run.job.coupling, run.log())
    assert errors < 3 and p > FALSE_ALARM, f"{errors:.2f} standard errors, p = {p:.1e}"
    free = [event for event in run.log() if event.kind is Kind.RUN]
    assert deviation(hk.Independent(), free)[1] > 5


def largest_z(left: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """Two samples, rows replicas: largest z of all differences of means and covariances, and the limit for it."""

    def entries(x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(0)
        i, j = np.triu_indices(x.shape[1])
        return np.concatenate([x, centred[:, i] * centred[:, j]], 1)

    a, b = entries(left), entries(right)
    z = (a.mean(0) - b.mean(0)) / np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
    return float(np.abs(z).max()), float(stats.norm.isf(FALSE_ALARM / 2 / len(z)))


@pytest.mark.parametrize(
    ("dynamics", "coupling", "engine"),
    on_engines(pairs([d for d in other_dynamics() if not isinstance(d, hk.SGNHT)], sampling_couplings())),
)
def test_the_law_is_that_of_plain_replicas(dynamics: Dynamics, coupling: Any, engine: str) -> None:
    run = sample(dynamics, coupling, ENGINES[engine])
    job = run.job
    twin = reference.replicas(job.dynamics, job.coupling, PRECISION, CHAINS, log_of(run), START, 6000)
    for block in ("one", "two"):
        columns = columns_of(twin, block)
        for moment, samples in samples_of(run, block).items():
            z, limit = largest_z(samples, columns[moment].T)
            assert z < limit, f"block {block}, {moment}: off by {z:.1f} standard errors"


def many_runs(run: hk.Run, count: int) -> np.ndarray:
    """Draws of the same run with `count` other seeds, in one program: [run, chain, draw, ...]."""
    job = run.job
    keys = jax.vmap(lambda i: jax.random.fold_in(job.key, i))(jnp.arange(count))
    if isinstance(run.config["engine"], hk.Simulated):
        log = run.info["log"]
        kinds = sorted({event.kind for event in log})
        kept = [event for event in log if event.draw >= 0]
        numbers = {id(event): slot for slot, event in enumerate(kept)}
        columns = {n: jnp.array([getattr(e, n) for e in log]) for n in ("kind", "worker", "steps", "box")}
        events = simulated.Columns(slot=jnp.array([numbers.get(id(e), -1) for e in log]), **columns)
        served = job.coupling.server_owns_chain
        slots = np.zeros((job.num_sampled, len(job.kept_steps)), int)
        for slot, event in enumerate(kept):  # of a draw that was kept again, the last
            slots[0 if served else event.worker, event.draw] = slot

        def one(key: jax.Array) -> jax.Array:
            seeded = dataclasses.replace(job, key=key)
            carry = simulated._open(seeded, num_boxes(log), True)
            room = simulated._room(seeded, len(kept))
            return simulated._run(seeded, kinds, carry, room, None, events, len(log))[1].draws[slots]

    else:
        length = vectorised.segment_length(job)

        def one(key: jax.Array) -> jax.Array:
            seeded = dataclasses.replace(job, key=key)
            carry, room = vectorised._open(seeded), vectorised._room(seeded, len(job.kept_steps))
            return vectorised._segments(seeded, carry, room, None, length, job.num_steps // length)[1].draws

    return np.asarray(jax.jit(jax.vmap(one))(keys), float)


@pytest.mark.parametrize(
    ("dynamics", "coupling", "engine"),
    on_engines(pairs([d for d in other_dynamics() if isinstance(d, hk.SGNHT)], sampling_couplings())),
)
def test_the_thermostat_has_the_law_of_plain_replicas(dynamics: Dynamics, coupling: Any, engine: str) -> None:
    """One thermostat for all coordinates of a chain, so that replicas are whole runs."""
    precision = PRECISION[1:3, 1:3]
    target = hk.Target.from_log_density(lambda x: -x @ jnp.asarray(precision, x.dtype) @ x / 2)
    run = hk.sample(target, jnp.full(2, 0.7), dynamics=dynamics, coupling=coupling, engine=ENGINES[engine], **SETTINGS)
    draws = many_runs(run, 3000)
    twin = reference.replicas(run.job.dynamics, run.job.coupling, precision, CHAINS, log_of(run), (0.7, 0.0), 6000)
    for k in range(draws.shape[2]):
        owners = range(draws.shape[1])
        z, limit = largest_z(
            np.concatenate([draws[:, i, k] for i in owners], 1),
            np.concatenate([twin.draws[i, k] for i in owners]).T,
        )
        assert z < limit, f"draw {k}: off by {z:.1f} standard errors"


# -- temperature 0 -----------------------------------------------------------------------------------------------------


def cold_pairs() -> list[Any]:
    cold = [v for cls in reference.RULES for v in cls.variants(0.1, temperature=0.0)]
    everything = [v for cls in couplings.ALL.values() for v in cls.variants()]
    slow_enough = [p for p in pairs(cold, everything)]
    return [p for p in slow_enough if not isinstance(p.values[1], hk.EAMSGD) or "momentum" in p.values[0].phase]


@pytest.mark.parametrize(("dynamics", "coupling"), cold_pairs())
def test_without_noise_the_path_is_that_of_the_equations(dynamics: Dynamics, coupling: Any) -> None:
    """In float64, over 40 steps of contracting maps: 10^-11 allows 10^3 rounding errors of unit size at each step."""
    with jax.enable_x64(True):
        target = hk.Target.from_log_density(log_density)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hk.HookeanWarning)
            run = hk.sample(
                target,
                lambda key: jax.random.normal(key, (1, 13)),
                dynamics=dynamics,
                coupling=coupling,
                engine=hk.Simulated(SCENARIO),
                chains=CHAINS,
                num_steps=40,
                warmup=4,
                thin=3,
                progress=False,
            )
        assert run.draws.dtype == jnp.float64
    starts = [np.asarray(x, float).T for x in run.job.starts]
    with jax.enable_x64(True):  # for schedules, which are JAX's
        path = reference.trajectory(run.job.dynamics, run.job.coupling, PRECISION, CHAINS, run.info["log"], starts)
    assert path.draws
    for (chain, draw), x in path.draws.items():
        np.testing.assert_allclose(run.draws[chain, draw].T, x, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("subtract_noise", [False, True])
def test_masses_adapt_as_the_equations_say(subtract_noise: bool) -> None:
    """Scale-adapted SGHMC in plain NumPy, with the same normals and gradients of changing size: while it adapts, after.

        m' = m + (g - m) / (tau + 1),   v' = v + (g^2 - v) / (tau + 1),   tau' = tau (1 - m'^2 / v') + 1,   tau_0 = 0
        M = sqrt(v') + lambda,   p' = (1 - d) p - eps g + N(0, 2 d M T - eps^2 v'),   theta' = theta + eps p' / M

    A few operations in each of 12 steps: 10^-13 is 450 roundings.
    """
    eps, d, T, damping, adapt = 0.1, 0.3, 0.8, 0.02, 8
    dynamics = hk.ScaleAdaptedSGHMC(eps, d, damping, subtract_noise, adapt_steps=adapt, temperature=T)
    with jax.enable_x64(True):
        x = np.array([0.5, -1.0, 2.0])
        key = jax.random.key(0)
        state = dynamics.init(jnp.asarray(x), Noise(key))
        p, tau, mean, v = np.asarray(state.momentum), np.zeros(3), np.zeros(3), np.ones(3)
        masses = []
        for t in range(12):
            g = np.array([1.0, 0.1, 10.0]) * (1 + np.sin(1.7 * t + np.arange(3)))
            state = dynamics.step(state, jnp.asarray(g), Noise(key, t), jnp.asarray(t))
            if t < adapt:
                mean, v = mean + (g - mean) / (tau + 1), v + (g**2 - v) / (tau + 1)
                tau = tau * (1 - mean**2 / np.maximum(v, damping**2)) + 1
            M = np.sqrt(v) + damping
            variance = np.maximum(2 * d * M * T - (eps**2 * v if subtract_noise else 0), 0)
            p = (1 - d) * p - eps * g + np.sqrt(variance) * np.asarray(Noise(key, t).normal(jnp.zeros(3)))
            x = x + eps * p / M
            np.testing.assert_allclose(state.momentum, p, rtol=1e-13, atol=1e-13)
            np.testing.assert_allclose(state.position, x, rtol=1e-13, atol=1e-13)
            masses.append(M)
    assert np.all(np.diff(masses, axis=0)[: adapt - 1] != 0) and not np.any(np.diff(masses[adapt - 1 :], axis=0))


# -- numbers worked out beforehand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coupling", "variance", "covariance"),
    [
        (hk.Independent(), 1.0101, 0.0),
        (hk.ElasticAsPrinted(1.0, 1), 0.0150, 0.0048),
        (hk.ElasticAsPrinted(1.0, 1, noise="sde"), 1.4998, 0.4794),
        (hk.ElasticAsPrinted(1.0, 1, noise="chain"), 0.9793, 0.4691),
        (hk.Elastic(1.0, 1, simultaneous=True), 0.8602, 0.0500),
    ],
    ids=["uncoupled", "printed", "sde", "chain", "derived"],
)
def test_the_table_of_stationary_variances(coupling: Any, variance: float, covariance: float) -> None:
    """N(0, 1), K = 4, alpha = 1, eps = 0.01, V = C = M = T = 1, explicit order. No sampling: the digits shown."""
    dynamics = hk.SGHMC(0.01, 1.0, integrator="explicit")
    law = linear_system(dynamics, coupling, 1.0, 4).stationary()
    np.testing.assert_allclose(law, np.where(np.eye(4), variance, covariance), atol=5.1e-5)


def test_one_elastic_chain_and_its_centre_are_two_bodies() -> None:
    """K = 1: with c integrated out the chain is exact whatever the spring, for the Hamiltonian is U + alpha d^2 / 2."""
    laws = [
        linear_system(hk.SGHMC(eps, 1.0), hk.Elastic(3.0, 1, simultaneous=True), 0.6, 1).stationary()[0, 0]
        for eps in (2e-3, 1e-3)
    ]
    assert 2 * laws[1] - laws[0] == pytest.approx(1 / 0.6, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "variance"),
    [(hk.hold(), 0.85), (hk.release(), 1.0), (hk.cycle(1600, coupled=0.2, settle=0.5), 1.0)],
    ids=["hold", "release", "cycle"],
)
def test_released_chains_have_the_exact_marginals(schedule: Any, variance: float) -> None:
    """K = 4, alpha = 1 on N(0, 1). The copies' variances are independent, so that their spread gives the error.

    The step's own bias, from the exact law of the same map, is taken off: what is left is a question of chance alone.
    """
    dynamics = hk.SGHMC(0.02, 1.0)
    run = hk.sample(
        hk.Target.from_log_density(lambda x: -jnp.sum(x**2) / 2),
        jnp.zeros(4000),
        dynamics=dynamics,
        engine=hk.Vectorised(),
        coupling=hk.Elastic(1.0, 8, schedule=schedule),
        chains=4,
        num_steps=3200,
        warmup=1600,
        thin=200,
        progress=False,
    )
    assert ("COUPLED" in run.summary()) == (schedule.kind == "hold")
    coupling = hk.Elastic(1.0, 8) if schedule.kind == "hold" else hk.Independent()
    exact = linear_system(dynamics, coupling, 1.0, 4).stationary()[0, 0]
    assert exact == pytest.approx(variance, abs=0.01)
    each = np.mean(np.asarray(run.draws, float) ** 2, (0, 1))
    error = each.std(ddof=1) / np.sqrt(len(each))
    assert abs(each.mean() - exact) < stats.norm.isf(FALSE_ALARM / 2) * error
    assert 8 * error < 0.15  # else hold and release could not be told apart
