"""Checks that any dynamics or coupling must pass, yours included.

    import pytest
    from hookean import testing

    @pytest.mark.parametrize("check", testing.checks_of(MyDynamics))
    def test_my_dynamics(check):
        check()

`checks_of` gives one function for each thing to check and each of the class's `variants`; `check_dynamics` and
`check_coupling` run them all. A failed check raises `AssertionError` and says by how much. They ask whether the code
has the law that the class states, not whether it equals some other code:

dynamics   its `recipe` leaves exp(-H/T) invariant, with theta from exp(-U/T); its step has the drift and the diffusion
           of the recipe, and is its `linear_map` where there is one; what a chain starts with beside its position has
           the law; at T = 0 the step is free of chance; types are kept; no key is used twice; chains on a Gaussian
           have the covariance of the law.
coupling   the exact stationary covariance of coupled chains, in the limit of small steps, is the one that the coupling
           states; sampled runs have the exact law; chains are exchangeable; no key is used twice; workers that leave
           count no longer.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from scipy import stats

from hookean.api import sample
from hookean.coupling import Coupling, Worker
from hookean.dynamics import SGHMC, SGLD, Dynamics, pack  # type: ignore[attr-defined]
from hookean.engines import Vectorised  # type: ignore[attr-defined]
from hookean.engines.base import carry_out
from hookean.exchange import Copy
from hookean.job import Job, new_seen
from hookean.preparation import prepare
from hookean.random import Noise
from hookean.targets import Target
from hookean.tree import row, stack, tree_map
from hookean.types import ArgumentError, HookeanWarning, Params

FALSE_ALARM_Z = 6.0
"""Statistical checks fail at so many standard errors: by chance once in 5 x 10^8 comparisons."""
SMALL_STEP = 1e-5
"""Step at which drift and diffusion are read off, in float64."""


# -- noise as data -----------------------------------------------------------------------------------------------------


class _Tape:
    """Stands in for `Noise`: hands out given normals and given signs, in order, as if they had been drawn."""

    def __init__(self, normals: jax.Array | None = None, signs: Sequence[float] | None = None) -> None:
        self._given = {"normal": normals, "signs": None if signs is None else jnp.asarray(signs)}
        self.used = {"normal": 0, "signs": 0}

    def _take(self, kind: str, like: Params) -> Params:
        def take(leaf: jax.Array) -> jax.Array:
            start = self.used[kind]
            self.used[kind] += leaf.size
            given = self._given[kind]
            if given is None:
                return jnp.full(leaf.shape, float(kind == "signs"), leaf.dtype)
            return jnp.reshape(given[start : self.used[kind]], leaf.shape).astype(leaf.dtype)

        return tree_map(take, like)

    def __enter__(self) -> _Tape:
        self._patches = [
            mock.patch.object(Noise, kind, lambda _, like, kind=kind: self._take(kind, like)) for kind in self.used
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def _of_normals(function: Callable[[], jax.Array]) -> tuple[Callable[[jax.Array], jax.Array], int]:
    """The value of `function` as a function of all the normals that it draws, and how many these are."""
    with _Tape() as counting:
        jax.eval_shape(function)

    def of_normals(normals: jax.Array) -> jax.Array:
        with _Tape(normals):
            return function()

    return of_normals, counting.used["normal"]


def _noise_derivative(function: Callable[[], jax.Array]) -> np.ndarray:
    of_normals, count = _of_normals(function)
    return np.asarray(jax.jacfwd(of_normals)(jnp.zeros(count)))


def _mean_over_chance(function: Callable[[], jax.Array]) -> jax.Array:
    """All normals 0, and the mean over all patterns of signs."""
    with _Tape() as counting:
        jax.eval_shape(function)
    found = []
    for pattern in itertools.product((-1.0, 1.0), repeat=counting.used["signs"]):
        with _Tape(signs=pattern):
            found.append(function())
    return jnp.mean(jnp.stack(found), 0)


# -- the exact law of a linear system ----------------------------------------------------------------------------------


class LinearSystem(NamedTuple):
    """One round of all workers and the centre as z' = matrix z + N(0, covariance); `positions` are the chains' rows."""

    matrix: np.ndarray
    covariance: np.ndarray
    positions: np.ndarray

    def stationary(self) -> np.ndarray:
        """Covariance between the chains' positions in equilibrium: a discrete Lyapunov equation, by doubling."""
        A, total = self.matrix, self.covariance.copy()
        growth = float(np.abs(np.linalg.eigvals(A)).max())
        if growth >= 1 - 1e-12:
            raise ValueError(f"the system has no stationary law: its spectral radius is {growth:.6g}")
        while np.abs(A).max() > 1e-18:
            total = total + A @ total @ A.T
            A = A @ A
        return total[np.ix_(self.positions, self.positions)]


def linear_system(
    dynamics: Dynamics, coupling: Coupling, stiffness: float, chains: int, step: int = 0, warmup: int = 1
) -> LinearSystem:
    """What the library's own code does, from step `step`, to chains on the potential stiffness x^2 / 2.

    Valid where dynamics and coupling are affine in the state and in the noise, for chains that exchange together, and
    where all is as before after a round: no report or gradient is left over that waits for the next.
    `stationary()` of the result is the law of the sampler with its step size, exactly: no sampling is involved.
    """
    with jax.enable_x64(True):
        target = Target.from_log_density(lambda x: -stiffness * jnp.sum(x**2) / 2)
        job = _job(target, jnp.zeros(()), dynamics, coupling, chains, num_steps=step + 10_000, warmup=warmup)
        shared, centre = job.open()
        workers = [_worker(shared, i) for i in range(chains)]
        rhythm = job.coupling.rhythm
        round_length = 1 if rhythm is None else rhythm.refresh
        length = int(np.lcm(round_length, dynamics.cycle))
        if step % length:
            raise ValueError(f"step is {step}. Give a multiple of {length}, the steps after which everything repeats.")
        leaves, structure = jax.tree.flatten((workers, centre))
        moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
        z, unravel = ravel_pytree([leaves[i] for i in moving])

        def after_a_round(z: jax.Array) -> jax.Array:
            filled = list(leaves)
            for i, leaf in zip(moving, unravel(z), strict=True):
                filled[i] = leaf
            now = jax.tree.unflatten(structure, filled)
            state = _round(job, now[0], now[1], step, length)
            return ravel_pytree([jax.tree.leaves(state)[i] for i in moving])[0]

        def of_all(z: jax.Array, normals: jax.Array) -> jax.Array:
            return _of_normals(lambda: after_a_round(z))[0](normals)

        count = _of_normals(lambda: after_a_round(z))[1]
        jacobian = jax.jit(jax.jacfwd(of_all, (0, 1)))(jnp.zeros_like(z), jnp.zeros(count))
        matrix, root = (np.asarray(part) for part in jacobian)
        owners = [centre] if job.coupling.server_owns_chain else workers
        offsets = np.cumsum([0, *(leaves[i].size for i in moving)])
        found = [next(j for j, i in enumerate(moving) if leaves[i] is owner.state.position) for owner in owners]
    return LinearSystem(matrix, root @ root.T, offsets[found])


def _round(job: Job, workers: list[Worker], centre: Any, step: int, length: int) -> tuple[list[Worker], Any]:
    """`length` steps of every worker, with their exchanges."""
    rhythm, seen = job.coupling.rhythm, row(new_seen(1), 0)
    for now in range(step, step + length):
        workers = [job.advance(None, w, seen, i, now, False)[0] for i, w in enumerate(workers)]
        done = now + 1
        if rhythm is None or done % rhythm.report:
            continue
        reports = [job.report(w, i, rhythm.report) for i, w in enumerate(workers)]
        if job.coupling.server_owns_chain:  # one after the other, which is what receive_all does in a loop
            for report in reports:
                centre, copy = job.coupling.receive(job.roles[1], centre, report, job.key)
        else:
            centre, copy = job.coupling.receive_all(job.roles[1], centre, stack(reports), job.key)
        if done % rhythm.refresh == 0:
            workers = [job.coupling.adopt(w, copy, done) for w in workers]
    return workers, centre


def _worker(shared: Worker, chain: int) -> Worker:
    """One of the workers that `Job.open` stacks, with a copy of the centre of its own."""
    own: Copy | None = tree_map(lambda leaf: leaf + 0 if leaf.dtype != bool else leaf, shared.copy)
    return shared._replace(state=row(shared.state, chain), copy=own)


def _job(
    target: Target,
    init: Any,
    dynamics: Dynamics,
    coupling: Coupling,
    chains: int,
    num_steps: int = 10,
    warmup: int = 0,
    seed: int = 0,
) -> Job:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HookeanWarning)
        return prepare(target, init, dynamics, coupling, chains, num_steps, warmup, 1, Vectorised(), seed)


# -- checks of a dynamics ----------------------------------------------------------------------------------------------


def _curved(x: Params) -> jax.Array:
    """A potential of three coordinates that is neither quadratic nor separable."""
    a, b = x["a"], x["b"]
    return jnp.sum(a**4) / 4 + jnp.sum((a - b) ** 2) / 2 + a[0] * a[1] * b / 3 + jnp.cos(b)


def _states(dynamics: Dynamics, count: int = 3) -> list[Any]:
    """States at random phases."""
    random = np.random.default_rng(0)
    state = dynamics.init({"a": jnp.zeros(2), "b": jnp.zeros(())}, Noise(jax.random.key(0)))
    z, unpack = pack(dynamics, state)
    return [unpack(jnp.asarray(random.uniform(-1.5, 1.5, z.shape))) for _ in range(count)]


def _cycle(
    dynamics: Dynamics, state: Any, potential: Callable[[Params], jax.Array] = _curved, length: int | None = None
) -> Any:
    """A few steps: as many as the rule takes to repeat."""
    gradient = jax.grad(potential)
    for step in range(dynamics.cycle if length is None else length):
        x = state.position

        def curvature(vector: Params, x: Params = x) -> Params:
            return jax.jvp(gradient, (x,), (vector,))[1]

        noise = Noise(jax.random.key(1), step)
        state = dynamics.step(state, gradient(x), noise, jnp.asarray(step), curvature)
    return state


def _recipe_is_stationary(make: Callable[..., Dynamics]) -> None:
    dynamics = make(SMALL_STEP, temperature=0.7)
    for state in _states(dynamics):
        recipe = dynamics.recipe(_curved, state)
        z, unpack = pack(dynamics, state)
        D, Q = np.asarray(recipe.diffusion(z)), np.asarray(recipe.curl(z))
        _close(D, D.T, "D is not symmetric")
        assert np.linalg.eigvalsh(D).min() > -1e-9, f"D has a negative eigenvalue: {np.linalg.eigvalsh(D).min():.3g}"
        _close(Q, -Q.T, "Q is not skew-symmetric")
        _close(recipe.residual(recipe.drift, z), 0.0, "exp(-H/T) is not stationary under the recipe")
        slope = unpack(jax.grad(recipe.energy)(z)).position
        wanted = tree_map(lambda g: g / 0.7, jax.grad(_curved)(state.position))
        _close(ravel_pytree(slope)[0], ravel_pytree(wanted)[0], "theta does not follow exp(-U/T): dH/dtheta is off")


def _step_follows_recipe(make: Callable[..., Dynamics]) -> None:
    dynamics = make(SMALL_STEP, temperature=0.7)
    duration = SMALL_STEP * dynamics.cycle
    for state in _states(dynamics):
        recipe = dynamics.recipe(_curved, state)
        z, unpack = pack(dynamics, state)

        def after(z: jax.Array, unpack: Callable[[jax.Array], Any] = unpack) -> jax.Array:
            return pack(dynamics, _cycle(dynamics, unpack(z)))[0]

        drift = (_mean_over_chance(lambda z=z, after=after: after(z)) - z) / duration  # type: ignore[misc]
        _close(drift, recipe.drift(z), "the step's drift is not -(D + Q) grad H + Gamma")
        root = _noise_derivative(lambda z=z, after=after: after(z))  # type: ignore[misc]
        _close(root @ root.T / (2 * duration), recipe.diffusion(z), "the step's noise is not that of D")


def _linear_map_is_the_step(make: Callable[..., Dynamics]) -> None:
    dynamics = make(0.1, temperature=0.7)
    for stiffness in (0.0, 0.5, 3.0):
        for step in range(2 * dynamics.cycle):
            stated = dynamics.linear_map(jnp.asarray(stiffness), jnp.asarray(step))
            if stated is None:
                return
            z, unpack = pack(dynamics, dynamics.init(jnp.zeros(()), Noise(jax.random.key(0))))

            def after(z: jax.Array, unpack: Any = unpack, h: float = stiffness, step: int = step) -> jax.Array:
                state = unpack(z)
                gradient = h * state.position
                new = dynamics.step(state, gradient, Noise(jax.random.key(1)), jnp.asarray(step), lambda v: h * v)
                return pack(dynamics, new)[0]

            where = f"at stiffness {stiffness}, step {step}"
            with _Tape():
                matrix = jax.jacfwd(after)(z)
            _close(matrix, stated.matrix, f"linear_map has another matrix {where}")
            root = _noise_derivative(lambda z=z, after=after: after(z))  # type: ignore[misc]
            _close(root @ root.T, stated.covariance, f"linear_map has another covariance {where}")


def _start_has_the_law(make: Callable[..., Dynamics]) -> None:
    """What `init` draws beside the position, momenta for instance, has the covariance that the energy gives it."""
    dynamics = make(0.1, temperature=0.7)
    position = {"a": jnp.array([0.3, -1.0]), "b": jnp.asarray(0.5)}

    def start() -> Any:
        return dynamics.init(position, Noise(jax.random.key(0)))

    root = _noise_derivative(lambda: pack(dynamics, start())[0])
    covariance = root @ root.T
    drawn = np.ix_(*2 * [np.flatnonzero(np.diag(covariance))])
    with _Tape():
        state = start()
    curvature = np.asarray(jax.hessian(dynamics.recipe(_curved, state).energy)(pack(dynamics, state)[0]))
    wanted = np.linalg.inv(curvature[drawn])
    _close(covariance[drawn], wanted, "what a chain starts with, beside its position, does not have the law")


def _no_chance_at_temperature_zero(make: Callable[..., Dynamics]) -> None:
    dynamics = make(0.1, temperature=0.0)
    state = _states(dynamics, 1)[0]
    root = _noise_derivative(lambda: pack(dynamics, _cycle(dynamics, state))[0])
    _close(root, 0.0, "noise moves the chain at temperature 0")


def _types_are_kept(make: Callable[..., Dynamics]) -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        dynamics = make(0.1)
        state = dynamics.init({"a": jnp.ones(2, dtype), "b": jnp.ones((), dtype)}, Noise(jax.random.key(0)))
        after = _cycle(dynamics, state)
        before_and_after = [tree_map(lambda x: (jnp.shape(x), jnp.result_type(x)), s) for s in (state, after)]
        assert before_and_after[0] == before_and_after[1], f"shapes or types change in a step: {before_and_after}"


def _dynamics_keys_are_used_once(make: Callable[..., Dynamics]) -> None:
    dynamics = make(0.1)
    state = _states(dynamics, 1)[0]
    _assert_distinct(_drawn_keys(lambda: _cycle(dynamics, state, length=3 * dynamics.cycle)))


def _chains_have_the_law(make: Callable[..., Dynamics]) -> None:
    """Many chains on a Gaussian, at two steps; the bias of first order is extrapolated away.

    What is left is of second order and less than a quarter of the difference between the two; Monte-Carlo errors come
    from the spread between chains, which are independent.
    """
    temperature, chains = 0.7, 1024
    precision = np.array([[1.5, 0.5], [0.5, 0.8]])
    target = Target.from_log_density(lambda x: -x @ jnp.asarray(precision, x.dtype) @ x / 2)

    def moments(step_size: float) -> tuple[np.ndarray, np.ndarray]:
        steps = round(15 / step_size)
        run = sample(
            target,
            lambda key: jax.random.normal(key, (2,)),
            dynamics=make(step_size, temperature=temperature),
            chains=chains,
            num_steps=2 * steps,
            warmup=steps,
            thin=max(steps // 10, 1),
            engine=Vectorised(),
            progress=False,
        )
        x = np.asarray(run.draws, float)
        each = np.stack([x[..., 0], x[..., 1], x[..., 0] ** 2, x[..., 1] ** 2, x[..., 0] * x[..., 1]], -1).mean(1)
        return each.mean(0), each.std(0, ddof=1) / np.sqrt(chains)

    (coarse, coarse_error), (fine, fine_error) = moments(0.1), moments(0.05)
    covariance = temperature * np.linalg.inv(precision)
    wanted = np.array([0, 0, covariance[0, 0], covariance[1, 1], covariance[0, 1]])
    limit = FALSE_ALARM_Z * np.sqrt(4 * fine_error**2 + coarse_error**2) + np.abs(coarse - fine) / 4
    found = 2 * fine - coarse
    assert np.all(np.abs(found - wanted) <= limit), (
        f"means and second moments are {found.round(4)} where the law has {wanted.round(4)}, +- {limit.round(4)}"
    )


# -- checks of a coupling ----------------------------------------------------------------------------------------------

PLENTY = 25_200
"""A step by which every schedule of a `release` is over; a multiple of all rhythms up to 10."""


def _partners(coupling: Coupling, chains: int, step_size: float) -> list[Dynamics]:
    """Dynamics that the coupling takes."""
    temperature = 0.0 if coupling.optimises else 0.7
    found = []
    for dynamics in (SGLD(step_size, temperature=temperature), SGHMC(step_size, 1.5, temperature=temperature)):
        try:
            coupling.check(dynamics, chains, 10)
        except ArgumentError:
            continue
        found.append(dynamics)
    return found


def _stationary(dynamics: Dynamics, coupling: Coupling, stiffness: float, chains: int) -> np.ndarray:
    """The exact law, once every schedule of a `release` is over."""
    system = linear_system(dynamics, coupling, stiffness, chains, PLENTY)
    try:
        return system.stationary()
    except ValueError as error:
        raise AssertionError(f"{type(dynamics).__name__}, {chains} chains, curvature {stiffness}: {error}") from error


def _has_the_stated_law(coupling: Coupling) -> None:
    chains = 3
    partners = zip(_partners(coupling, chains, 2e-3), _partners(coupling, chains, 1e-3), (0.6, 2.0), strict=False)
    tried = 0
    for coarse, fine, stiffness in partners:
        tried += 1
        laws = [_stationary(d, coupling, stiffness, chains) for d in (coarse, fine)]
        who = f"{type(fine).__name__}, {chains} chains, curvature {stiffness}"
        stated = coupling.bind(PLENTY).covariance(stiffness, chains, 0.7)
        assert stated is not None
        _close(2 * laws[1] - laws[0], stated, f"{who}: another covariance than stated", 1e-3)
    assert tried, "the coupling takes neither SGLD nor SGHMC; there was nothing to check"


def _runs_have_the_exact_law(coupling: Coupling) -> None:
    """A run's last draws on many copies of a one-dimensional Gaussian, by a likelihood-ratio test."""
    chains, copies, steps, stiffness = 3, 4000, 480, 1.3  # as many chains as above, so that all variants repeat
    target = Target.from_log_density(lambda x: -stiffness * jnp.sum(x**2) / 2)
    for dynamics in _partners(coupling, chains, 0.05):
        exact = _stationary(dynamics, coupling, stiffness, chains)
        run = sample(
            target,
            jnp.zeros(copies),
            dynamics=dynamics,
            coupling=coupling,
            chains=chains,
            num_steps=steps,
            warmup=steps - 1,
            engine=Vectorised(),
            progress=False,
        )
        draws = np.asarray(run.draws[:, -1], float)
        p = gaussian_p_value(draws.T, np.zeros(len(exact)), exact)
        assert p > 1e-8, f"{type(dynamics).__name__}: p = {p:.1e}; sampled\n{np.cov(draws)}\nexact\n{exact}"


def gaussian_p_value(samples: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> float:
    """Of the hypothesis that the rows of `samples` are independent draws from N(mean, covariance).

    The likelihood-ratio statistic of mean and covariance together, chi-square by Wilks' theorem; good to a few percent
    of its standard deviation where there are 60 times more rows than columns.
    """
    count, size = samples.shape
    white = np.linalg.solve(np.linalg.cholesky(covariance), (samples - mean).T)
    spread = np.cov(white, bias=True).reshape(size, size)
    statistic = count * (np.trace(spread) - np.linalg.slogdet(spread)[1] - size + np.sum(white.mean(1) ** 2))
    return float(stats.chi2.sf(statistic, size + size * (size + 1) / 2))


def _chains_are_exchangeable(coupling: Coupling) -> None:
    chains = 4
    order = jnp.array([2, 0, 3, 1])
    target = Target.from_log_density(lambda x: -jnp.sum(x**4) / 4 - jnp.sum(x**2) / 2)
    for dynamics in _partners(coupling, chains, 0.05)[-1:]:
        job = _job(target, jnp.zeros(2), dynamics.replace(temperature=0.0), coupling, chains, 12)
        starts = jax.random.normal(jax.random.key(3), (chains, 2))
        if coupling.server_owns_chain:
            starts = jnp.broadcast_to(starts[0], starts.shape)
        plain, permuted = (
            carry_out(Vectorised(), dataclasses.replace(job, starts=x)).draws for x in (starts, starts[order])
        )
        wanted = plain if coupling.server_owns_chain else plain[order]
        _close(permuted, wanted, "other chains' results change when the chains change places", 1e-5)


def _leavers_count_no_longer(coupling: Coupling) -> None:
    for dynamics in _partners(coupling, 3, 0.05):
        job = _job(Target.from_log_density(lambda x: -jnp.sum(x**2)), jnp.zeros(2), dynamics, coupling, 3)
        shared, centre = job.open()
        if centre is None:
            return
        report = job.report(_worker(shared, 0), 0, 6)  # worth 3 steps of a centre of 2
        copies = []
        for position in (0.0, 100.0):
            there = coupling.leave(coupling.join(centre, 1, jnp.full(2, position)), 1)
            copies.append(coupling.receive(job.roles[1], there, report, job.key)[1])
        assert int(copies[0].live) == 2, f"2 workers are left, the copy says {int(copies[0].live)}"
        _close(copies[0].position, copies[1].position, "a worker that has left still pulls the centre")


def _coupling_keys_are_used_once(coupling: Coupling) -> None:
    for dynamics in _partners(coupling, 3, 0.05):
        job = _job(Target.from_log_density(lambda x: -jnp.sum(x**2)), jnp.zeros(2), dynamics, coupling, 3)
        shared, centre = job.open()
        workers = [_worker(shared, i) for i in range(3)]
        rounds = 1 if coupling.rhythm is None else 3 * coupling.rhythm.refresh
        _assert_distinct(
            _drawn_keys(lambda job=job, w=workers, c=centre, n=rounds: _round(job, w, c, 0, n))  # type: ignore[misc]
        )


# -- how checks are found and run --------------------------------------------------------------------------------------

_DYNAMICS_CHECKS = (
    _recipe_is_stationary,
    _step_follows_recipe,
    _linear_map_is_the_step,
    _start_has_the_law,
    _no_chance_at_temperature_zero,
    _types_are_kept,
    _dynamics_keys_are_used_once,
    _chains_have_the_law,
)
_COUPLING_CHECKS = (
    _has_the_stated_law,
    _runs_have_the_exact_law,
    _chains_are_exchangeable,
    _leavers_count_no_longer,
    _coupling_keys_are_used_once,
)
_IN_FLOAT32 = (_types_are_kept, _chains_have_the_law, _runs_have_the_exact_law, _chains_are_exchangeable)


def checks_of(plugin: type[Dynamics] | type[Coupling]) -> list[Callable[[], None]]:
    """A function for each check of each of the class's variants, named for test reports."""
    found = []
    if issubclass(plugin, Dynamics):
        for index in range(len(plugin.variants(0.1))):

            def make(step_size: float, temperature: float = 1.0, index: int = index) -> Dynamics:
                return plugin.variants(step_size, temperature)[index]

            exact = make(0.1).is_exact
            checks = [check for check in _DYNAMICS_CHECKS if exact or check is not _chains_have_the_law]
            found += [_named(check, make, f"{plugin.__name__}[{index}]") for check in checks]
    else:
        for index, coupling in enumerate(plugin.variants()):
            left_out = {_runs_have_the_exact_law} if coupling.optimises else set()
            if coupling.bind(PLENTY).covariance(1.0, 3, 1.0) is None:  # no law is claimed
                left_out |= {_has_the_stated_law}
            kept = [check for check in _COUPLING_CHECKS if check not in left_out]
            found += [_named(check, coupling, f"{plugin.__name__}[{index}]") for check in kept]
    return found


def check_dynamics(plugin: type[Dynamics]) -> None:
    """Run all checks of a dynamics."""
    for check in checks_of(plugin):
        check()


def check_coupling(plugin: type[Coupling]) -> None:
    """Run all checks of a coupling."""
    for check in checks_of(plugin):
        check()


def _named(check: Callable[[Any], None], subject: Any, name: str) -> Callable[[], None]:
    def run() -> None:
        with jax.enable_x64(check not in _IN_FLOAT32):
            check(subject)

    run.__name__ = f"{name}{check.__name__}"
    return run


def _drawn_keys(action: Callable[[], Any]) -> list[tuple[int, ...]]:
    """The keys of all random numbers drawn in `action`, which is run without compilation."""
    keys: list[tuple[int, ...]] = []

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(key: jax.Array, *arguments: Any, **others: Any) -> Any:
            keys.append(tuple(np.asarray(jax.random.key_data(key)).tolist()))
            return original(key, *arguments, **others)

        return draw

    with (
        jax.disable_jit(),
        mock.patch.object(jax.random, "normal", recording(jax.random.normal)),
        mock.patch.object(jax.random, "rademacher", recording(jax.random.rademacher)),
    ):
        action()
    return keys


def _assert_distinct(keys: list[tuple[int, ...]]) -> None:
    assert keys, "nothing random was drawn"
    assert len(set(keys)) == len(keys), (
        f"of {len(keys)} draws of random numbers only {len(set(keys))} have their own key"
    )


def _close(found: Any, wanted: Any, problem: str, tolerance: float = 1e-3) -> None:
    found, wanted = np.asarray(found, float), np.asarray(wanted, float)
    scale = 1 + float(np.abs(wanted).max(initial=0))
    off = np.abs(found - wanted).max(initial=0)
    assert off <= tolerance * scale, f"{problem}; off by {off:.3g}:\n{found}\nwhere it should be\n{wanted}"
