"""What a coupling is: the worker's side and the centre's side of an exchange.

A coupling knows that a dynamics has `init` and `step` and that its state has a `position`; it knows no more of it. A
dynamics knows nothing of couplings: it gets one gradient, of which the coupling's force is a part.

A worker's life:      advance, advance, ...; at its rhythm it sends `report`, and later takes the answer with `adopt`.
The centre's life:    open, then `receive` a report and answer, for every message; or `receive_all` when all workers
                      report at the same moment (a barrier).
Everything is pure; `step` counts a worker's own steps.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from hookean import schedules
from hookean.exchange import Copy, Report, Rhythm
from hookean.random import Noise
from hookean.schedules import CouplingSchedule
from hookean.tree import set_row, tree_map
from hookean.types import ArgumentError, Params

Evaluate = Callable[[Params], tuple[jax.Array, Params]]
"""Position -> (potential, gradient) on the worker's present batch."""


class Worker(NamedTuple):
    """A worker: its chain's state (or, where the server owns the chain, its last gradient) and its copy of the centre.

    `asked` is the step at which it asked for that copy; `fresh` says that no step has been taken with it.
    """

    state: Any
    copy: Copy | None
    asked: jax.Array
    fresh: jax.Array


class Centre(NamedTuple):
    """The centre of coupled chains. `credit` counts reported steps not yet turned into steps of the centre.

    Each is worth 1 / K_live of a step. As K_live changes, the same part of a step is counted in other units, rounded
    down: it never comes to a whole step by a leave, and K workers that leave do not flood the centre.
    """

    state: Any
    positions: Params
    live: jax.Array
    credit: jax.Array
    clock: jax.Array
    version: jax.Array

    @property
    def num_live(self) -> jax.Array:
        """How many workers count; of 32 bits, as all counts are, also where sums would have 64."""
        return jnp.sum(self.live, dtype=jnp.int32)

    def mean(self) -> Params:
        """Mean of the last positions of the live workers."""

        def one(leaf: jax.Array) -> jax.Array:
            mask = jnp.reshape(self.live, (-1,) + (1,) * (leaf.ndim - 1))
            return jnp.sum(jnp.where(mask, leaf, 0), 0) / self.num_live.astype(leaf.dtype)

        return tree_map(one, self.positions)

    def counting(self, worker: Any, counts: bool) -> Centre:
        """The same centre, for which `worker` counts from now on, or does not."""
        changed = self._replace(live=self.live.at[worker].set(counts))
        return changed._replace(credit=self.credit * changed.num_live // jnp.maximum(self.num_live, 1))

    def earn(self, worker: Any, steps: Any) -> tuple[Centre, jax.Array]:
        """Hear a report of `steps` steps. A worker that did not count so far counts now and starts at no new steps."""
        return self.counting(worker, True), jnp.where(self.live[worker], steps, 0)

    def copy(self) -> Copy:
        """What a worker is told."""
        return Copy(self.state.position, self.version, self.num_live)


class Evaluation(NamedTuple):
    """What a step saw, and where."""

    position: Params
    potential: jax.Array
    gradient: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coupling(abc.ABC):
    """How workers and centre act on each other. This base is that of free chains without a centre."""

    schedule: CouplingSchedule = schedules.hold()

    law: ClassVar[str]
    """What the joint system samples, in words for a person."""
    server_owns_chain: ClassVar[bool] = False
    """Whether there is one chain, the server's, and workers only compute gradients."""
    optimises: ClassVar[bool] = False
    """Whether it belongs to temperature 0."""

    @property
    def rhythm(self) -> Rhythm | None:
        """How often a worker reports and wants an answer; None for never."""
        return None

    @property
    def couples_draws(self) -> bool:
        """Whether kept draws feel each other."""
        return False

    @classmethod
    @abc.abstractmethod
    def variants(cls) -> Sequence[Self]:
        """One instance for each way of running it, for the law suites."""

    def bind(self, warmup: int) -> Self:
        """Fill in what only the run knows."""
        if not isinstance(self.schedule, CouplingSchedule):
            raise ArgumentError(
                "schedule", f"is {self.schedule!r}", "Give hk.hold(), hk.release() or hk.cycle(period), called"
            )
        return dataclasses.replace(self, schedule=self.schedule.bind(warmup))

    def check(self, dynamics: Any, chains: int, num_steps: int) -> None:
        """Refuse what cannot work."""

    def roles(self, dynamics: Any, chains: int) -> tuple[Any, Any]:
        """The dynamics of the chains and that of the centre."""
        return dynamics, None

    def spring(self, step: Any, live: Any) -> Any:
        """Curvature that the coupling adds to a chain's potential at full strength."""
        return 0.0

    def covariance(self, stiffness: float, chains: int, temperature: float) -> np.ndarray | None:
        """The law, checkable: covariance between the kept draws of the chains on the potential stiffness x^2 / 2.

        In the limit of small steps and fresh exchanges; None where no law is claimed.
        """
        return temperature / stiffness * np.eye(chains)

    # -- the worker's side --------------------------------------------------------------------------------------------

    def init(self, dynamics: Any, position: Params, copy: Copy | None, noise: Noise) -> Worker:
        """A worker at the start of its chain."""
        return Worker(dynamics.init(position, noise), copy, jnp.zeros((), jnp.int32), jnp.ones((), bool))

    def force(self, position: Params, copy: Copy, step: Any) -> Params | None:
        """Gradient of the coupling's energy on a chain, or None for no such energy."""
        return None

    def advance(
        self, dynamics: Any, evaluate: Evaluate, worker: Worker, noise: Noise, step: Any
    ) -> tuple[Worker, Evaluation]:
        """One step of a worker."""
        position = worker.state.position

        def whole_gradient(position: Params, gradient: Params) -> Params:
            pull = None if worker.copy is None else self.force(position, worker.copy, step)
            return gradient if pull is None else tree_map(jnp.add, gradient, pull)

        def curvature(vector: Params) -> Params:
            return jax.jvp(lambda x: whole_gradient(x, evaluate(x)[1]), (position,), (vector,))[1]

        potential, gradient = evaluate(position)
        state = dynamics.step(worker.state, whole_gradient(position, gradient), noise, step, curvature)
        worker = worker._replace(state=state, fresh=jnp.zeros_like(worker.fresh))
        return worker, Evaluation(position, potential, gradient)

    def payload(self, worker: Worker) -> Params:
        """What a worker reports: its position, never an increment."""
        return worker.state.position

    def adopt(self, worker: Worker, copy: Copy, asked: Any) -> Worker:
        """Take the answer to a report sent after `asked` steps."""
        return worker._replace(copy=copy, asked=jnp.asarray(asked, jnp.int32), fresh=jnp.ones_like(worker.fresh))

    # -- the centre's side --------------------------------------------------------------------------------------------

    def open(self, dynamics: Any, positions: Params, noise: Noise) -> Any:
        """A centre that has heard where every worker starts; None where there is no centre."""
        return None

    def receive(self, dynamics: Any, centre: Any, report: Report, key: jax.Array) -> tuple[Any, Copy]:
        """Take one worker's report and answer it. A worker that did not count counts from now on."""
        raise NotImplementedError(f"{type(self).__name__} exchanges nothing")

    def receive_all(self, dynamics: Any, centre: Any, reports: Report, key: jax.Array) -> tuple[Any, Copy]:
        """Take the reports of all live workers at one moment (stacked, a row a worker) and answer all alike."""
        raise NotImplementedError(f"{type(self).__name__} exchanges nothing")

    def join(self, centre: Any, worker: Any, payload: Params) -> Any:
        """A worker begins, with no new steps to report."""
        positions = set_row(centre.positions, worker, payload)
        return centre.counting(worker, True)._replace(positions=positions, version=centre.version + 1)

    def leave(self, centre: Any, worker: Any) -> Any:
        """A worker stops counting."""
        return centre.counting(worker, False)._replace(version=centre.version + 1)


def open_centre(dynamics: Any, positions: Params, noise: Noise) -> Centre:
    """A centre at the mean of all workers."""
    zero = jnp.zeros((), jnp.int32)
    live = jnp.ones(len(jax.tree.leaves(positions)[0]), bool)
    centre = Centre(None, positions, live, zero, zero, zero)
    return centre._replace(state=dynamics.init(centre.mean(), noise))
