"""What a coupling is: the worker's side, the centre's side, and the message between them.

A coupling knows that a dynamics has `init` and `step` and that its state has a `position`; it knows no more of it. A
dynamics knows nothing of couplings: it gets one gradient, of which the coupling's force is a part.

A worker's life:      advance, advance, ... every `period` steps: send `payload`, later `adopt` the reply.
The centre's life:    open, then `receive` a payload and answer, for every message; or `receive_all` when all workers
                      report at the same moment (a barrier).
Everything is pure; `step` counts a worker's own steps, `steps` are those it took since its last report.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from hookean import schedules
from hookean.random import Noise
from hookean.schedules import CouplingSchedule
from hookean.tree import set_row, tree_map
from hookean.types import ArgumentError, Params

Evaluate = Callable[[Params], tuple[jax.Array, Params]]
"""Position -> (potential, gradient) on the worker's present batch."""


class Copy(NamedTuple):
    """The centre as a worker last saw it."""

    position: Params
    version: jax.Array
    live: jax.Array


class Worker(NamedTuple):
    """A worker: its chain's state (or, where the server owns the chain, its last gradient) and its copy of the centre."""

    state: Any
    copy: Copy | None


class Centre(NamedTuple):
    """The centre of coupled chains. `credit` counts reported steps not yet turned into steps of the centre."""

    state: Any
    positions: Params
    live: jax.Array
    credit: jax.Array
    clock: jax.Array
    version: jax.Array

    @property
    def num_live(self) -> jax.Array:
        """How many workers count."""
        return jnp.sum(self.live)

    def mean(self) -> Params:
        """Mean of the last positions of the live workers."""

        def one(leaf: jax.Array) -> jax.Array:
            mask = jnp.reshape(self.live, (-1,) + (1,) * (leaf.ndim - 1))
            return jnp.sum(jnp.where(mask, leaf, 0), 0) / self.num_live.astype(leaf.dtype)

        return tree_map(one, self.positions)

    def copy(self) -> Copy:
        """What a worker is told."""
        return Copy(self.state.position, self.version, self.num_live)


class Evaluation(NamedTuple):
    """What a step saw at the position where it began."""

    potential: jax.Array
    gradient: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coupling(abc.ABC):
    """How workers and centre act on each other. This base is that of free chains without a centre."""

    schedule: CouplingSchedule = schedules.hold()

    law: ClassVar[str]
    """What the joint system samples, in words for a person."""
    server_owns_chain: ClassVar[bool] = False
    optimises: ClassVar[bool] = False

    @property
    def period(self) -> int | None:
        """Steps of a worker between two messages; None for never."""
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
        return dataclasses.replace(self, schedule=self.schedule.bind(warmup))

    def check(self, dynamics: Any, chains: int, num_steps: int) -> None:
        """Refuse what cannot work."""

    def roles(self, dynamics: Any, chains: int) -> tuple[Any, Any]:
        """The dynamics of the chains and that of the centre."""
        return dynamics, None

    # -- the worker's side --------------------------------------------------------------------------------------------

    def force(self, position: Params, copy: Copy, step: Any) -> Params | None:
        """Gradient of the coupling's energy on a chain, or None for no such energy."""
        return None

    def displace(self, state: Any, before: Params, copy: Copy, step: Any) -> Any:
        """A move of the position that is no force; `before` is the position at which the step began."""
        return state

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
        gradient = whole_gradient(position, gradient)
        state = dynamics.step(worker.state, gradient, noise, step, curvature)
        if worker.copy is not None:
            state = self.displace(state, position, worker.copy, step)
        return worker._replace(state=state), Evaluation(potential, gradient)

    def payload(self, worker: Worker) -> Params:
        """What a worker reports: its position, never an increment."""
        return worker.state.position

    def adopt(self, worker: Worker, copy: Copy, step: Any) -> Worker:
        """Take a reply."""
        return worker._replace(copy=copy)

    # -- the centre's side --------------------------------------------------------------------------------------------

    def open(self, dynamics: Any, positions: Params, live: jax.Array, noise: Noise) -> Any:
        """A centre that has heard where every worker starts; None where there is no centre."""
        return None

    def receive(
        self, dynamics: Any, centre: Any, worker: Any, payload: Params, base_version: Any, steps: Any, key: jax.Array
    ) -> tuple[Any, Copy]:
        """Take one worker's report and answer it."""
        raise NotImplementedError(f"{type(self).__name__} exchanges nothing")

    def receive_all(
        self, dynamics: Any, centre: Any, payloads: Params, base_versions: Any, steps: Any, key: jax.Array
    ) -> tuple[Any, Copy]:
        """Take the reports of all live workers at one moment and answer all alike."""
        raise NotImplementedError(f"{type(self).__name__} exchanges nothing")

    def join(self, centre: Any, worker: Any, position: Params) -> Any:
        """A worker begins (or begins again) at `position`, with no new steps to report."""
        return centre._replace(
            positions=set_row(centre.positions, worker, position),
            live=centre.live.at[worker].set(True),
            version=centre.version + 1,
        )

    def leave(self, centre: Any, worker: Any) -> Any:
        """A worker stops counting."""
        return centre._replace(live=centre.live.at[worker].set(False), version=centre.version + 1)


def open_centre(dynamics: Any, positions: Params, live: jax.Array, noise: Noise) -> Centre:
    """A centre at the mean of the live workers."""
    zero = jnp.zeros((), jnp.int32)
    centre = Centre(None, positions, live, zero, zero, zero)
    return centre._replace(state=dynamics.init(centre.mean(), noise))


def check_every(every: int) -> None:
    """Refuse a period that is not a positive number of steps."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ArgumentError("every", f"is {every!r}", "It counts steps between exchanges: give an integer of at least 1")

