"""What an engine is, how a job is carried out by one, and how it finds a chain that broke."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling import Worker
from hookean.job import Job, Result, Seen
from hookean.recorder import Recorder, Saved
from hookean.tree import not_finite, num_bytes, row
from hookean.types import DivergenceError

BUFFER_BYTES = 2**26
"""Draws that wait on the device until they are handed over."""


def buffered_draws(job: Job) -> int:
    """How many draws of all chains wait on the device at most."""
    each = num_bytes(job.starts) // job.chains * job.num_sampled
    return int(np.clip(BUFFER_BYTES // max(each, 1), 1, max(len(job.kept_steps), 1)))


def broken(job: Job, workers: Worker, centre: Any, seen: Seen) -> DivergenceError | None:
    """The error of the first chain, in time, that is no longer finite; of stacked workers."""
    steps = np.asarray(seen.broken_at)
    if np.all(steps < 0):
        return None
    chain = int(np.argmin(np.where(steps < 0, np.iinfo(np.int32).max, steps)))
    return diverged(job, chain, row(workers.state, chain), centre, int(steps[chain]))


def diverged(job: Job, chain: int, state: Any, centre: Any, step: int) -> DivergenceError:
    """The error of a chain that is no longer finite."""
    served = job.coupling.server_owns_chain
    if served:  # a worker's state is its gradient
        culprit = not_finite(centre.state.position) or not_finite(state)
    else:
        culprit = not_finite(state.position)
    who = "the server's chain" if served else f"chain {chain}"
    where = f"in leaf {culprit!r}" if culprit is not None else "in its potential"
    return DivergenceError(
        f"{who} turned NaN or Inf at step {step}, {where}. Take a smaller step_size (or learning rate), more "
        "friction, or a better start; the draws kept before are in the error's attribute `run`.",
        0 if served else chain,
        step,
        culprit,
    )


def temperature(job: Job, workers: Worker, centre: Any) -> float:
    """Mean kinetic temperature of all chains, for the display of progress."""
    if job.coupling.server_owns_chain:
        return float(job.roles[1].kinetic_temperature(centre.state))
    return float(jnp.mean(jax.vmap(job.roles[0].kinetic_temperature)(workers.state)))


class Engine(abc.ABC):
    """Carries a job out. Subclasses are final; each lives in its own file."""

    summary: ClassVar[str]
    """One line for a person."""

    @abc.abstractmethod
    def run(self, job: Job, recorder: Recorder, saved: Saved | None = None) -> dict[str, Any]:
        """Do it, from the start or from where `saved` says; what describes the run as a whole.

        Hands all that it finds to `recorder`. Raises `DivergenceError`.
        """

    def check(self, chains: int) -> None:
        """Refuse settings that do not fit."""

    @property
    def seats(self) -> int:
        """Chains that may be added while a run goes on."""
        return 0


def carry_out(engine: Engine, job: Job, recorder: Recorder | None = None) -> Result:
    """Run a job in memory. The draws until a divergence are in the error's `run`."""
    recorder = Recorder(job) if recorder is None else recorder
    try:
        return recorder.result(engine.run(job, recorder))
    except DivergenceError as error:
        error.run = recorder.result({"steps": error.step})
        raise
