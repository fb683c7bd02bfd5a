"""Faults on purpose, for any carrier of messages: seeded, and placed at a step or a version, never slept for."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from hookean.engines.centre import Message, Reply
from hookean.tree import tree_map
from hookean.types import ArgumentError, HookeanError, Params, check_count


class MessageLost(HookeanError):
    """No answer came. The message may have been applied, or not."""


class InjectedFault(HookeanError):
    """Raised where a fault was asked for."""


class Carrier(Protocol):
    """Brings messages to the centre and its answers back. Raises `MessageLost` where no answer comes."""

    def join(self, worker: int, payload: Params, step: int) -> Reply:
        """Begin a life."""

    def exchange(self, message: Message) -> Reply:
        """Report."""

    def leave(self, worker: int) -> None:
        """End a life."""


@dataclasses.dataclass(frozen=True)
class Faults:
    """What is to go wrong.

    Attributes:
        seed: which messages are hit. Each worker has a stream of its own.
        loss: probability that a request or its answer does not arrive.
        duplication: that a message arrives twice.
        reordering: that a second copy of it arrives after the next one.
        delay: that it arrives only when the worker has given it up, just before its next.
        worker_crashes: (worker, step): the worker raises in the window that reaches this step, once each.
        centre_crashes: versions at which the centre raises, once each.
        nans: (worker, step): the report sent at this step has NaN in it.
        stragglers: worker -> factor: it computes every window so many times.
    """

    seed: int = 0
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    delay: float = 0.0
    worker_crashes: Sequence[tuple[int, int]] = ()
    centre_crashes: Sequence[int] = ()
    nans: Sequence[tuple[int, int]] = ()
    stragglers: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def check(self, workers: int) -> None:
        """Refuse what cannot be, with `workers` workers."""
        for name in ("loss", "duplication", "reordering", "delay"):
            if not 0 <= getattr(self, name) < 1:
                raise ArgumentError(name, f"is {getattr(self, name)!r}", "Give a probability of less than 1")
        for name in ("worker_crashes", "nans", "stragglers"):
            for entry in getattr(self, name):
                worker = entry if name == "stragglers" else entry[0]
                if not 0 <= worker < workers:
                    raise ArgumentError(name, f"name worker {worker} of {workers}", f"Workers are 0 to {workers - 1}")
        for factor in self.stragglers.values():
            check_count("stragglers", factor)


class Strikes:
    """Faults that wait for their place. Each strikes once."""

    def __init__(self, faults: Faults) -> None:
        """All are still to come."""
        self._lock = threading.Lock()
        self._workers = sorted(faults.worker_crashes)
        self._centre = sorted(faults.centre_crashes)

    def worker(self, worker: int, step: int) -> None:
        """Raise if this worker is to crash at a step up to this one."""
        with self._lock:
            due = [entry for entry in self._workers if entry[0] == worker and entry[1] <= step]
            if due:
                self._workers.remove(due[0])
                raise InjectedFault(f"worker {worker} was to raise at step {due[0][1]}")

    def centre(self, version: int) -> None:
        """Raise if the centre is to crash at a version up to this one."""
        with self._lock:
            if self._centre and self._centre[0] <= version:
                raise InjectedFault(f"the centre was to raise at version {self._centre.pop(0)}")


class Faulty:
    """A carrier that loses, doubles, reorders and delays what another carries."""

    def __init__(self, carrier: Carrier, faults: Faults, workers: int) -> None:
        """Each worker has random numbers of its own, so that its faults do not depend on the others' pace."""
        self.carrier, self.faults = carrier, faults
        self._random = [np.random.default_rng([faults.seed, worker]) for worker in range(workers)]
        self._delayed: list[list[Message]] = [[] for _ in range(workers)]
        self._behind: list[list[Message]] = [[] for _ in range(workers)]

    def join(self, worker: int, payload: Params, step: int) -> Reply:
        """A join may be lost on its way there or back."""
        fate = self._random[worker].random()
        self._lose(worker, fate < self.faults.loss / 2)
        reply = self.carrier.join(worker, payload, step)
        self._lose(worker, fate < self.faults.loss)
        return reply

    def leave(self, worker: int) -> None:
        """The last word of a worker arrives."""
        self.carrier.leave(worker)

    def exchange(self, message: Message) -> Reply:
        """Any of the faults, or several."""
        worker = message.worker
        chance = self._random[worker].random
        if (worker, message.step) in self.faults.nans:
            message = message._replace(report=message.report._replace(payload=_poisoned(message.report.payload)))
        self._deliver(self._delayed[worker])
        if chance() < self.faults.delay:
            self._delayed[worker].append(message)
            raise MessageLost(f"the report of worker {worker} is late")
        fate = chance()  # one half is lost on the way there, one half on the way back
        self._lose(worker, fate < self.faults.loss / 2)
        reply = self.carrier.exchange(message)
        if chance() < self.faults.duplication:
            reply = self.carrier.exchange(message)
        self._deliver(self._behind[worker])
        if chance() < self.faults.reordering:
            self._behind[worker].append(message)
        self._lose(worker, fate < self.faults.loss)
        return reply

    @staticmethod
    def _lose(worker: int, lost: bool) -> None:
        if lost:
            raise MessageLost(f"a message of worker {worker} was lost")

    def _deliver(self, messages: list[Message]) -> None:
        """Old copies arrive. Nobody waits for their answers."""
        while messages:
            self.carrier.exchange(messages.pop(0))


def _poisoned(payload: Params) -> Params:
    return tree_map(lambda leaf: jnp.full_like(leaf, jnp.nan), payload)
