"""Exact laws of coupled chains on a Gaussian, small enough to sweep: workers that exchange together every s steps.

Potential h x^2 / 2, temperature 1, dynamics with a linear map. Workers share one copy of the centre, so differences
between chains do not feel it: elastic chains fall apart into K - 1 equal differences and a mean, of which the law is a
Lyapunov equation of order 4. A stale gradient is worse off: its server steps K s / O times along one gradient. Tests
compare both with `hookean.testing.linear_system`, which asks the library's own code.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hookean as hk


class Law(NamedTuple):
    """Variance of a chain and correlation of two, stationary; and the parallel steps after which 1/e is forgotten.

    `variance` is NaN where there is no stationary law.
    """

    variance: float
    correlation: float
    relaxation: float


class Map(NamedTuple):
    """z' = matrix z + N(0, covariance)."""

    matrix: np.ndarray
    covariance: np.ndarray

    def power(self, count: int) -> Map:
        """So many times."""
        size = len(self.matrix)
        whole = Map(np.eye(size), np.zeros((size, size)))
        for _ in range(count):
            whole = whole.then(self)
        return whole

    def then(self, later: Map) -> Map:
        """This map, and another after it."""
        spread = later.matrix @ self.covariance @ later.matrix.T + later.covariance
        return Map(later.matrix @ self.matrix, spread)

    @property
    def radius(self) -> float:
        """Spectral radius."""
        return float(np.abs(np.linalg.eigvals(self.matrix)).max())

    def stationary(self) -> np.ndarray:
        """Covariance in equilibrium, by doubling; NaN where there is none."""
        if self.radius >= 1 - 1e-12:
            return np.full_like(self.matrix, np.nan)
        matrix, total = self.matrix, self.covariance
        while np.abs(matrix).max() > 1e-18:
            total, matrix = total + matrix @ total @ matrix.T, matrix @ matrix
        return total


def one_step(dynamics: hk.Dynamics, stiffness: float) -> Map:
    """A step on the potential stiffness x^2 / 2, in double precision."""
    with jax.enable_x64(True):
        linear = dynamics.linear_map(jnp.asarray(stiffness, float), jnp.asarray(0))
    if linear is None:
        raise ValueError(f"{type(dynamics).__name__} is no linear map on a quadratic potential")
    return Map(np.asarray(linear.matrix), np.asarray(linear.covariance))


def relaxation(radius: float, steps: int) -> float:
    """Parallel steps after which a displacement is 1/e, of a map that takes `steps` of them."""
    return -steps / np.log(radius) if 0 < radius < 1 else float("inf") if radius >= 1 else 0.0


def independent(dynamics: hk.Dynamics, stiffness: float) -> Law:
    """One chain alone."""
    step = one_step(dynamics, stiffness)
    return Law(float(step.stationary()[0, 0]), 0.0, relaxation(step.radius, 1))


def elastic(dynamics: hk.Dynamics, stiffness: float, chains: int, alpha: float, every: int) -> Law:
    """K chains on springs; the centre is one more chain of the same dynamics."""
    spring = alpha / chains
    steps = one_step(dynamics, stiffness + spring).power(every)
    order = len(steps.matrix)
    differences = steps
    # The mean of all chains: pulled towards where the springs' and the potential's forces balance, x = rest c.
    rest = spring / (stiffness + spring)
    towards = (np.eye(order) - steps.matrix)[:, :1] * rest
    first = Map(np.eye(2 * order), np.zeros((2 * order, 2 * order)))
    first.matrix[:order, :order] = steps.matrix
    first.matrix[:order, order : order + 1] = towards
    first.covariance[:order, :order] = steps.covariance / chains
    # The centre then takes its steps against the mean just reported.
    leap = one_step(dynamics.as_centre(), alpha).power(every)
    second = Map(np.eye(2 * order), np.zeros((2 * order, 2 * order)))
    second.matrix[order:, order:] = leap.matrix
    second.matrix[order:, :1] = (np.eye(order) - leap.matrix)[:, :1]
    second.covariance[order:, order:] = leap.covariance
    mean = first.then(second)
    of_mean, of_difference = mean.stationary()[0, 0], differences.stationary()[0, 0]
    variance = of_mean + (1 - 1 / chains) * of_difference
    covariance = of_mean - of_difference / chains
    slowest = max(mean.radius, differences.radius)
    return Law(float(variance), float(covariance / variance), relaxation(slowest, every))


def stale_gradient(dynamics: hk.Dynamics, stiffness: float, chains: int, every: int, wait_for: int) -> Law:
    """The server's chain: K s / O steps along the gradient at one copy, then a fresh copy. O divides K s."""
    count, rest = divmod(chains * every, wait_for)
    if rest:
        raise ValueError(f"wait_for is {wait_for}, which does not divide {chains} x {every} gradients")
    free, felt = one_step(dynamics, 0.0), one_step(dynamics, stiffness)
    pull = felt.matrix - free.matrix  # what the gradient at a position does, a linear map of that position
    order = len(free.matrix)
    both = Map(np.eye(2 * order), np.zeros((2 * order, 2 * order)))
    both.matrix[:order, :order] = free.matrix
    both.matrix[:order, order:] = pull
    both.covariance[:order, :order] = free.covariance
    walked = both.power(count)
    fresh = np.vstack([np.eye(order), np.eye(order)])
    round_of = Map(walked.matrix[:order] @ fresh, walked.covariance[:order, :order])
    return Law(float(round_of.stationary()[0, 0]), 0.0, relaxation(round_of.radius, every))
