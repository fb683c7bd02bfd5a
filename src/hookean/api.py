"""`sample` and the `Run` that it gives back."""

from __future__ import annotations

import dataclasses
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
from hookean.random import Stream, stream_key
from hookean.targets import Target
from hookean.tree import tree_map
from hookean.types import ArgumentError, DivergenceError, HookeanWarning, Params


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
    """
    coupling = Independent() if coupling is None else coupling
    engine = Vectorised() if engine is None else engine
    job = prepare(target, init, dynamics, coupling, chains, num_steps, warmup, thin, engine, seed)
    config = {"dynamics": dynamics, "coupling": coupling, "engine": engine, "seed": seed}
    with progress_display.Display(progress, _headline(job, engine), job.num_steps) as display:
        try:
            result = engine.run(job, display.update)
        except DivergenceError as error:
            if isinstance(error.run, Result):
                error.run = Run(error.run.draws, error.run.stats, error.run.info, config, job)
            raise
    return Run(result.draws, result.stats, result.info, config, job)


def _headline(job: Job, engine: Engine) -> str:
    draws, state = job.forecast_bytes()
    return (
        f"{type(engine).__name__} ({engine.summary}): {job.chains} chains x {job.num_steps:,} steps, "
        f"{job.num_sampled} x {len(job.kept_steps):,} draws kept; memory: draws {diagnostics.human_bytes(draws)}, "
        f"chains {diagnostics.human_bytes(state)} and what one gradient needs"
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
    for name, value, least in (
        ("chains", chains, 1),
        ("num_steps", num_steps, 1),
        ("warmup", warmup, 0),
        ("thin", thin, 1),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise ArgumentError(name, f"is {value!r}", f"Give an integer of at least {least}")
    if warmup >= num_steps:
        raise ArgumentError("warmup", f"is {warmup} of {num_steps} steps", "Leave steps after the warm-up for draws")
    if thin > num_steps - warmup:
        raise ArgumentError(
            "thin", f"is {thin}, with {num_steps - warmup} steps after the warm-up", "No draw would be kept: thin less"
        )
    key = jax.random.key(int(seed))
    starts = _starts(init, key, int(chains))
    target.check(tree_map(lambda leaf: leaf[0], starts))
    dynamics = dynamics.bind(int(warmup), target.num_examples)
    dynamics.check(int(num_steps))
    coupling = coupling.bind(int(warmup))
    coupling.check(dynamics, int(chains), int(num_steps))
    engine.check(int(chains))
    job = Job(target, dynamics, coupling, starts, int(chains), int(num_steps), int(warmup), int(thin), key)
    if len(job.kept_steps) == 0:
        raise ArgumentError("schedule", "lets no draw be kept", "Thin less, or make the free part of a cycle longer")
    _warn_if_unstable(job)
    return job


def _starts(init: Any, key: jax.Array, chains: int) -> Params:
    """One start per chain, stacked."""
    if callable(init):
        each = [init(stream_key(key, Stream.START, chain)) for chain in range(chains)]
        if len({jax.tree.structure(start) for start in each}) > 1:
            raise ArgumentError("init", "gives pytrees of different structure", "Always return the same structure")
    else:
        each = [init]
    if not jax.tree.leaves(each[0]):
        raise ArgumentError("init", "has no arrays", "Give a pytree of parameters, or a function key -> pytree")
    try:
        each = [tree_map(jnp.asarray, start) for start in each]
        stacked = tree_map(lambda *leaves: jnp.stack(leaves), *each)
    except (TypeError, ValueError) as error:
        raise ArgumentError("init", f"cannot be made arrays: {error}", "Give a pytree of arrays") from error
    return tree_map(lambda leaf: jnp.broadcast_to(leaf, (chains, *leaf.shape[1:])), stacked)


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
