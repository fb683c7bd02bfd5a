"""What an engine is, and how it finds a chain that broke."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hookean.coupling import Worker
from hookean.job import Job, Result, Seen, Watch
from hookean.tree import not_finite, row
from hookean.types import DivergenceError


def broken(job: Job, workers: Worker, centre: Any, seen: Seen) -> DivergenceError | None:
    """The error of the first chain, in time, that is no longer finite."""
    steps = np.asarray(seen.broken_at)
    if np.all(steps < 0):
        return None
    chain = int(np.argmin(np.where(steps < 0, np.iinfo(np.int32).max, steps)))
    step = int(steps[chain])
    state = row(workers.state, chain)
    if job.coupling.server_owns_chain:  # a worker's state is its gradient
        culprit = not_finite(centre.state.position) or not_finite(state)
    else:
        culprit = not_finite(state.position)
    who = "the server's chain" if job.coupling.server_owns_chain else f"chain {chain}"
    where = f"in leaf {culprit!r}" if culprit is not None else "in its potential"
    return DivergenceError(
        f"{who} turned NaN or Inf at step {step}, {where}. Take a smaller step_size (or learning rate), more "
        "friction, or a better start; the draws kept before are in the error's attribute `run`.",
        0 if job.coupling.server_owns_chain else chain,
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
    def run(self, job: Job, watch: Watch) -> Result:
        """Do it. Raises `DivergenceError`, with the result until then as its `run`."""

    def check(self, chains: int) -> None:
        """Refuse settings that do not fit."""
