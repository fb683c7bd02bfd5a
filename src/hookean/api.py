"""`sample` and the `Run` that it gives back."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hookean import diagnostics
from hookean import progress as progress_display
from hookean.coupling import Coupling, Independent  # type: ignore[attr-defined]
from hookean.dynamics import Dynamics
from hookean.engines import Engine, Vectorised  # type: ignore[attr-defined]
from hookean.job import Job, Result
from hookean.predict import Apply, Predictions, predict
from hookean.random import Noise, Stream, stream_key
from hookean.targets import Target
from hookean.tree import leaf_names, not_finite, same_structure, tree_map
from hookean.types import (
    ArgumentError,
    Batch,
    DivergenceError,
    HookeanError,
    HookeanWarning,
    Params,
    check_count,
    in_one_line,
)


@dataclasses.dataclass(frozen=True)
class Run:
    """Kept draws and what is known of them.

    Attributes:
        draws: the parameters' pytree, leaves [chain, draw, ...].
        stats: arrays [chain, draw]: `potential` (of the batch of the last step), `kinetic_temperature`,
            `configurational_temperature` (theta . grad U / n), `distance` (to the centre), `staleness` (steps since the
            copy of the centre that was used had been asked for; with StaleGradient, steps of the server) and `live`
            (workers that count).
        info: `steps` taken, the `final` state, and what the engine adds (the `log` of a simulated run).
        config: the run's settings.
    """

    draws: Params
    stats: dict[str, jax.Array]
    info: dict[str, Any]
    config: dict[str, Any]
    job: Job

    def summary(self) -> str:
        """What was sampled, at which temperature, and what to be careful about."""
        return diagnostics.summary(self.job, Result(self.draws, self.stats, self.info))

    def predict(self, apply: Apply, x: Batch, y: Any = None, **options: Any) -> Predictions:
        """Average the predictions of all draws at inputs `x`; see `hookean.predict.predict` for the options."""
        return predict(apply, self.draws, x, y, **options)

    def to_arviz(self) -> Any:
        """Draws and statistics for ArviZ (the extra `arviz`): a DataTree, or an InferenceData of ArviZ before 1.0.

        Variables are named by their leaves, `layers.0.kernel`; the coordinate `draw` is the step after which a draw was
        kept. Missing draws are NaN, and make a diagnostic NaN: select the chains and draws that are there.
        """
        try:
            import arviz
        except ImportError as error:
            raise HookeanError("to_arviz: ArviZ is not installed. Install hookean with its extra `arviz`.") from error
        # A slash would be a path in a DataTree. NumPy knows no bfloat16 of its own, nor does xarray.
        names = [name.replace("/", ".") for name in leaf_names(self.draws)]
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(self.draws)]
        arrays = [array.astype(np.float32) if array.dtype.kind == "V" else array for array in arrays]
        if len(set(names)) < len(names):
            raise HookeanError(f"to_arviz: two leaves would have one name, of {', '.join(names)}. Rename one.")
        posterior = dict(zip(names, arrays, strict=True))
        sample_stats = {name: np.asarray(values) for name, values in self.stats.items()}
        chains, kept = sample_stats["potential"].shape
        coords = {"chain": np.arange(chains), "draw": self.job.kept_steps[:kept]}
        settings = {name: repr(value) for name, value in self.config.items()}
        attributes = {"inference_library": "hookean", **settings}
        if "posterior" in inspect.signature(arviz.from_dict).parameters:  # before 1.0
            return arviz.from_dict(posterior=posterior, sample_stats=sample_stats, coords=coords, attrs=attributes)
        groups = {"posterior": posterior, "sample_stats": sample_stats}
        return arviz.from_dict(groups, coords=coords, attrs={"/": attributes})


def sample(
    target: Target,
    init: Params | Callable[[jax.Array], Params],
    *,
    dynamics: Dynamics,
    coupling: Coupling | None = None,
    chains: int = 4,
    num_steps: int = 10_000,
    warmup: int = 0,
    thin: int = 1,
    engine: Engine | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Run:
    """Draw from a posterior with `chains` parallel chains.

    Args:
        target: what to sample.
        init: where to start: a pytree of parameters for all chains, or a function key -> pytree, one start per chain.
        dynamics: how a chain moves.
        coupling: how chains act on each other; None for independent ones.
        chains: K, the number of chains or workers.
        num_steps: steps of each chain, the warm-up included.
        warmup: steps at the start of which nothing is kept.
        thin: keep every so many states after the warm-up.
        engine: what carries the run out.
        seed: the same seed gives the same bits on the same machine.
        progress: show progress, on stderr.

    Returns:
        A `Run`.

    Raises:
        ArgumentError: an argument cannot work (a `ValueError`). Nothing has been compiled then.
        DivergenceError: a chain turned NaN or Inf; its attribute `run` has the draws until then.
        BatchError: the target's own batches failed; its attribute `run` has the draws until then.
    """
    coupling = Independent() if coupling is None else coupling
    engine = Vectorised() if engine is None else engine
    job = prepare(target, init, dynamics, coupling, chains, num_steps, warmup, thin, engine, seed)
    config = {"dynamics": dynamics, "coupling": coupling, "engine": engine, "seed": seed}

    def run_of(result: Result) -> Run:
        return Run(result.draws, result.stats, result.info, config, job)

    with progress_display.Display(progress, _headline(job, engine), job.num_steps) as display:
        try:
            return run_of(engine.run(job, display.update))
        except DivergenceError as error:
            error.run = run_of(error.run)
            failure = target.close()
            if failure is None:
                raise
            failure.run = error.run
            raise failure from failure.__cause__
        finally:
            target.close()


def _headline(job: Job, engine: Engine) -> str:
    draws, state = job.forecast_bytes()
    return (
        f"{type(job.dynamics).__name__} x {type(job.coupling).__name__}: {job.chains} chains x {job.num_steps:,} "
        f"steps, {job.num_sampled} x {len(job.kept_steps):,} draws kept; "
        f"{type(engine).__name__}: {engine.summary}\n"
        f"memory: {diagnostics.human_bytes(draws)} for the draws, {diagnostics.human_bytes(state)} for the chains, and "
        "what their gradients need"
    )


def prepare(
    target: Target,
    init: Any,
    dynamics: Dynamics,
    coupling: Coupling,
    chains: int,
    num_steps: int,
    warmup: int,
    thin: int,
    engine: Engine,
    seed: int,
) -> Job:
    """Check everything that can be checked without sampling, and put a job together."""
    kinds: dict[str, tuple[Any, type]] = {
        "target": (target, Target),
        "dynamics": (dynamics, Dynamics),
        "coupling": (coupling, Coupling),
        "engine": (engine, Engine),
    }
    for name, (given, kind) in kinds.items():
        if not isinstance(given, kind):
            hint = f"{given.__name__} is a class: call it" if isinstance(given, type) else f"Give a {kind.__name__}"
            raise ArgumentError(name, f"is {given!r}, not a {kind.__name__}", hint)
    chains, num_steps = check_count("chains", chains), check_count("num_steps", num_steps)
    warmup, thin = check_count("warmup", warmup, 0), check_count("thin", thin)
    seed = check_count("seed", seed, 0, 2**32 - 1)
    if warmup >= num_steps:
        raise ArgumentError("warmup", f"is {warmup} of {num_steps} steps", "Leave steps after the warm-up for draws")
    if thin > num_steps - warmup:
        raise ArgumentError(
            "thin", f"is {thin}, with {num_steps - warmup} steps after the warm-up", "No draw would be kept: thin less"
        )
    start = _shape_of_start(init)
    if sum(leaf.size for leaf in jax.tree.leaves(start)) == 0:
        raise ArgumentError("init", "has no parameters", "Give a pytree of arrays, or a function key -> pytree")
    target.check(start)
    dynamics = dynamics.bind(warmup, target.num_examples)
    dynamics.check(num_steps)
    _check_step(dynamics, start)
    engine.check(chains)
    coupling = coupling.bind(warmup)
    if len(coupling.schedule.kept_steps(num_steps, warmup, thin)) == 0:
        raise ArgumentError("schedule", "lets no draw be kept", "Thin less, or make the free part of a cycle longer")
    coupling.check(dynamics, chains, num_steps)
    key = jax.random.key(seed)
    job = Job(target, dynamics, coupling, _starts(init, key, chains), chains, num_steps, warmup, thin, key)
    _warn_of_coupled_draws(job)
    _warn_if_unstable(job)
    return job


def _is_function(init: Any) -> bool:
    return callable(init) and jax.tree_util.all_leaves([init])


def _shape_of_start(init: Any) -> Params:
    """Shapes and types of one chain's parameters, if possible without computing anything."""
    if not _is_function(init):
        return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _checked_start(init))
    try:
        return jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    except Exception:  # a function that needs a real key
        return tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _start(init, jax.random.key(0), 0))


def _start(init: Callable[[jax.Array], Params], key: jax.Array, chain: int) -> Params:
    """What a user's function gives for one chain."""
    try:
        start = init(stream_key(key, Stream.START, chain))
    except Exception as error:
        raise ArgumentError(
            "init", f"failed ({in_one_line(error)})", "Give a pytree of parameters, or a function key -> pytree"
        ) from error
    return _checked_start(start, f" of chain {chain}")


def _checked_start(start: Any, whose: str = "") -> Params:
    """A start as NumPy arrays of JAX's types, finite."""

    def array(leaf: Any) -> np.ndarray:
        wanted = np.asarray(leaf)
        if not jnp.issubdtype(wanted.dtype, jnp.number) and wanted.dtype != bool:
            raise ArgumentError(
                "init", f"has a {type(leaf).__name__} among its leaves", "Give a pytree of floating-point arrays"
            )
        with np.errstate(over="ignore"):
            return wanted.astype(jax.dtypes.canonicalize_dtype(wanted.dtype))

    arrays = tree_map(array, start)
    culprit = not_finite(arrays)
    if culprit is not None:
        raise ArgumentError("init", f"has NaN or Inf in leaf {culprit!r}{whose}", "Start from finite values")
    return arrays


def _starts(init: Any, key: jax.Array, chains: int) -> Params:
    """One start per chain, stacked."""
    if not _is_function(init):
        return tree_map(lambda leaf: jnp.asarray(np.broadcast_to(leaf, (chains, *leaf.shape))), _checked_start(init))
    each = [_start(init, key, chain) for chain in range(chains)]
    kinds = [tree_map(lambda leaf: (leaf.shape, leaf.dtype), start) for start in each]
    if any(kind != kinds[0] for kind in kinds):
        raise ArgumentError(
            "init", "gives pytrees of different structure or shapes", "Always return the same for all keys"
        )
    return tree_map(lambda *leaves: jnp.asarray(np.stack(leaves)), *each)


def _check_step(dynamics: Dynamics, start: Params) -> None:
    """Refuse a dynamics that cannot step on such parameters, or that changes their shapes."""

    def once(position: Params, key: jax.Array) -> tuple[Any, Any]:
        state = dynamics.init(position, Noise(key))
        step = jnp.zeros((), jnp.int32)
        return state, dynamics.step(state, position, Noise(key), step, lambda vector: vector)

    name, remedy = type(dynamics).__name__, "Settings that are pytrees, such as mass=, must be like the parameters"
    try:
        before, after = jax.eval_shape(once, start, jax.eval_shape(lambda: jax.random.key(0)))
    except Exception as error:
        raise ArgumentError(
            "dynamics", f"{name} cannot step on these parameters ({in_one_line(error)})", remedy
        ) from error
    if not same_structure(before, after):
        raise ArgumentError("dynamics", f"{name} changes the structure of its state in a step", remedy)
    for leaf, old, new in zip(leaf_names(before), jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            change = f"{old.dtype}{list(old.shape)} into {new.dtype}{list(new.shape)}"
            raise ArgumentError("dynamics", f"a step of {name} turns leaf {leaf!r} from {change}", remedy)


def _warn_of_coupled_draws(job: Job) -> None:
    schedule = job.coupling.schedule
    if schedule.kind == "release" and schedule.draws_are_coupled:
        assert schedule.period is not None
        warnings.warn(
            f"schedule: the chains are let go at step {schedule.end * schedule.period:g}, but draws are kept from step "
            f"{job.warmup} on. The first ones are coupled: take a longer warmup, or a release() that ends within it.",
            HookeanWarning,
            stacklevel=4,
        )


def _warn_if_unstable(job: Job) -> None:
    """Measure the sharpest curvature at the start, where the dynamics can say beforehand that it will not stand it."""
    limit = job.dynamics.stability_limit()
    if limit is None:
        return
    sharpest = diagnostics.sharpest_curvature(job)
    springs = float(job.coupling.spring(0, job.chains))
    if sharpest + springs >= limit:
        warnings.warn(
            f"dynamics: {type(job.dynamics).__name__} in this order explodes where the curvature reaches friction / "
            f"step_size = {limit:.3g}, and at the start it is {sharpest + springs:.3g} ({sharpest:.3g} measured, "
            f"{springs:.3g} springs). "
            f'Take integrator="semi_implicit", or a step_size below {limit / (sharpest + springs):.2g} of this one.',
            HookeanWarning,
            stacklevel=4,
        )


__all__ = ["Run", "sample"]
