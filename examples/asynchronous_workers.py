"""Workers that are slow, die or come late, on a simulated clock: what happens, and whether the posterior survives it.

    python examples/asynchronous_workers.py

The model is a linear regression whose posterior is known, so the end can be compared with the truth. Times are in
seconds of the simulated clock. The same scenario and seed give the same run, bit for bit.
"""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale

import hookean as hk
from hookean.exchange import Kind

WORKERS = 5
NOISE = 0.7
"""Standard deviation of the response about the line, taken as known."""

SCENARIO = hk.Scenario(
    step_time=0.010,
    latency=0.020,
    jitter=0.2,
    stragglers=[hk.Straggler(worker=1, factor=4.0)],
    crashes=[hk.Crash(worker=2, step=1_500, restart_after=10.0)],
    joins=[hk.Join(worker=3, time=8.0)],
    lease=3.0,
)


def log_likelihood(slopes: jax.Array, batch: tuple) -> jax.Array:
    features, response = batch
    return -((response - features @ slopes) ** 2) / (2 * NOISE**2)


def log_prior(slopes: jax.Array) -> jax.Array:
    return -jnp.sum(slopes**2) / 2


def tell(run: hk.Run) -> None:
    """What happened to whom."""
    told = {
        Kind.JOIN: "joins",
        Kind.LEAVE: "leaves the mean",
        Kind.RESTORE: "is back, and goes on from its last report",
    }
    log = run.info["log"]
    print("time [s]  event")
    for event in log:
        if event.kind in told and event.time > 0:
            print(f"{event.time:8.1f}  worker {event.worker} {told[event.kind]}")

    finished: dict[int, float] = {}
    reports: collections.Counter = collections.Counter()
    for event in log:
        finished[event.worker] = event.time if event.kind is Kind.RUN else finished.get(event.worker, 0.0)
        reports[event.worker] += event.kind is Kind.SEND
    staleness = np.nanmean(run.stats["staleness"], axis=1)
    print("\nworker  done at [s]  reports  steps since its copy of the centre was asked for")
    for worker in range(WORKERS):
        print(f"{worker:6} {finished[worker]:12.1f} {reports[worker]:8} {staleness[worker]:10.1f}")


def main(num_steps: int = 12_000) -> tuple[float, float]:
    """Largest error of a posterior mean and of a standard deviation, both in posterior standard deviations."""
    features, response = load_diabetes(return_X_y=True)
    features, response = scale(features), scale(response)
    target = hk.Target(log_likelihood, log_prior, data=(features, response))  # no batch_size: all data at each step
    run = hk.sample(
        target,
        lambda key: jax.random.normal(key, (features.shape[1],)),
        dynamics=hk.SGHMC.from_learning_rate(0.02, momentum=0.9, target=target),
        coupling=hk.Elastic(alpha=500.0, every=10, schedule=hk.release()),
        chains=WORKERS,
        num_steps=num_steps,
        warmup=num_steps // 4,
        thin=5,
        engine=hk.Simulated(SCENARIO),
    )
    tell(run)
    print("\n" + run.summary())

    exact = np.linalg.inv(features.T @ features / NOISE**2 + np.eye(features.shape[1]))
    exact_mean, exact_sd = exact @ features.T @ response / NOISE**2, np.sqrt(np.diag(exact))
    draws = np.asarray(run.draws).reshape(-1, features.shape[1])
    of_mean = float(np.abs((draws.mean(0) - exact_mean) / exact_sd).max())
    of_sd = float(np.abs(draws.std(0) / exact_sd - 1).max())
    print(f"\nagainst the exact posterior: means off by at most {of_mean:.2f} sd, standard deviations by {of_sd:.0%}")
    return of_mean, of_sd


if __name__ == "__main__":
    main()
