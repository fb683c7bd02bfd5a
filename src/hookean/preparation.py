"""From what a user wrote to a checked `Job`: everything that can be checked without sampling is checked here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hookean import diagnostics
from hookean.coupling import Coupling
from hookean.dynamics import Dynamics
from hookean.engines import Engine
from hookean.job import Job
from hookean.random import Noise, Stream, stream_key
from hookean.targets import Target
from hookean.tree import leaf_names, not_finite, same_structure, tree_map
from hookean.types import ArgumentError, HookeanWarning, Params, check_count, in_one_line


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
    starts: Params = None,
) -> Job:
    """Check everything, and put a job together. `starts` are those of an earlier run, in place of `init`."""
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
    chains += engine.seats
    start = _shape_of_start(init) if starts is None else tree_map(lambda leaf: leaf[0], starts)
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
    starts = _starts(init, key, chains) if starts is None else tree_map(jnp.asarray, starts)
    job = Job(target, dynamics, coupling, starts, chains, num_steps, warmup, thin, key)
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
