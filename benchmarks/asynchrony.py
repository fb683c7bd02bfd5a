"""What asynchrony costs: ratios measured in one run, on the network of the paper (784-800-800-10, batch 100).

    make bench

threads     chain-steps per second of K = 2 chains over those of one chain alone (target 1.9 on two cores)
exchange    time of exchanges and centre over time of steps, K = 6, every = 8 (target 3 %)
store       steps per second with a store, a draw kept every 100 steps, over those without (target 97 %)
message     an exchange of 5 MB over a memcpy of 5 MB and one update pass of the centre (target 3)
"""

from __future__ import annotations

import itertools
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hookean as hk
from hookean.engines.pieces import Pieces
from hookean.preparation import prepare
from hookean.random import Noise

WIDTHS = (784, 800, 800, 10)
ROUNDS = 3
"""Every number is the median of so many."""


def network() -> hk.Target:
    """Images of noise: what they show does not matter for the time."""
    random = np.random.default_rng(0)
    x = random.random((6000, WIDTHS[0]), np.float32)
    y = random.integers(0, WIDTHS[-1], 6000)

    def log_likelihood(layers: Any, batch: Any) -> jax.Array:
        h, labels = batch
        for weight, bias in layers[:-1]:
            h = jax.nn.relu(h @ weight + bias)
        logits = jax.nn.log_softmax(h @ layers[-1][0] + layers[-1][1])
        return jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]

    def log_prior(layers: Any) -> jax.Array:
        return -1e-5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(layers))

    return hk.Target(log_likelihood, log_prior, (x, y), batch_size=100)


def start(key: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    layers = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        key, own = jax.random.split(key)
        layers.append((jax.random.normal(own, (inputs, outputs)) * (2 / inputs) ** 0.5, jnp.zeros(outputs)))
    return layers


TARGET = network()
RATE = 0.001
"""Small enough for chains on images of noise; the time of a step does not depend on it."""
DYNAMICS = hk.SGHMC.from_learning_rate(RATE, momentum=0.9, target=TARGET)
SPRING = 0.01 * 6 * TARGET.num_examples / RATE
"""alpha, such that eps^2 alpha / K = 0.01."""


def run(chains: int, coupling: Any, num_steps: int, **others: Any) -> tuple[float, hk.Run]:
    """Chain-steps per second, compilation left out, and the run."""
    clock: list[tuple[float, int]] = []

    def tick(window: hk.Window) -> None:
        clock.append((time.perf_counter(), window.run.telemetry.steps))

    settings = {"warmup": 0, "thin": num_steps, "engine": hk.Threads(), "progress": False, **others}
    done = hk.sample(
        TARGET,
        start,
        dynamics=DYNAMICS,
        coupling=coupling,
        chains=chains,
        num_steps=num_steps,
        callbacks=[tick],
        **settings,
    )
    (began, before), (ended, after) = clock[len(clock) // 10], clock[int(len(clock) * 0.9)]
    return (after - before) / (ended - began), done


def threads() -> float:
    ratios = []
    for _ in range(ROUNDS):
        alone, _ = run(1, hk.Independent(), 240)
        two, _ = run(2, hk.Independent(), 240)
        ratios.append(two / alone)
        print(f"  one chain {alone:6.1f} steps/s, two chains {two:6.1f}", file=sys.stderr)
    return statistics.median(ratios)


def exchange() -> tuple[float, float]:
    """By the workers' own clocks, and by steps per second against uncoupled chains."""
    shares, losses = [], []
    for _ in range(ROUNDS):
        free, _ = run(6, hk.Independent(), 120)
        tied, done = run(6, hk.Elastic(SPRING, every=8, friction=None, mass=6.0), 120)
        counts = done.info["telemetry"]
        shares.append(counts.exchanging / counts.stepping)
        losses.append(1 - tied / free)
        print(f"  free {free:6.1f} steps/s, tied {tied:6.1f}, exchanging / stepping {shares[-1]:.2%}", file=sys.stderr)
    return statistics.median(shares), statistics.median(losses)


def store() -> float:
    ratios = []
    for _ in range(ROUNDS):
        without, _ = run(2, hk.Independent(), 800, thin=100)
        with tempfile.TemporaryDirectory() as folder:
            kept, _ = run(2, hk.Independent(), 800, thin=100, store=Path(folder) / "run")
        ratios.append(kept / without)
        print(f"  without {without:6.1f} steps/s, with a store {kept:6.1f}", file=sys.stderr)
    return statistics.median(ratios)


def message() -> float:
    job = prepare(TARGET, start, DYNAMICS, hk.Elastic(SPRING, every=8, mass=6.0), 6, 100, 0, 1, hk.Threads(), 0)
    pieces = Pieces(job)
    places, centre = pieces.open()
    source = np.ones(1_276_810, np.float32)
    target = np.empty_like(source)

    def timed(action: Any, count: int = 48) -> float:
        action()
        began = time.perf_counter()
        for _ in range(count):
            action()
        return (time.perf_counter() - began) / count

    def one_exchange() -> None:
        nonlocal centre
        worker = next(turn)
        report = pieces.report(places[worker].worker, worker, 8)
        assert bool(pieces.is_finite(report.payload))
        centre, copy = pieces.receive(centre, report, job.key)
        jax.block_until_ready((centre, pieces.adopt(places[worker].worker, copy, 8)))

    def update_pass() -> None:
        jax.block_until_ready(leap(centre.state, centre.positions, key))

    @jax.jit
    def leap(state: Any, positions: Any, key: jax.Array) -> Any:
        """The arithmetic of one leap, without the conversation: noise, mean, and new c and r."""
        mean = jax.tree.map(lambda leaf: jnp.mean(leaf, 0), positions)
        return job.coupling._leap(job.roles[1], state, mean, 0, 8, Noise(key))

    turn = iter(range(6) for _ in iter(int, 1))
    turn = (worker for _ in iter(int, 1) for worker in range(6))
    key = job.key
    whole, memcpy = timed(one_exchange), timed(lambda: np.copyto(target, source))
    update = timed(update_pass)
    times = f"exchange {whole * 1e3:.2f} ms, memcpy {memcpy * 1e3:.2f}, update pass {update * 1e3:.2f}"
    print(f"  {times}", file=sys.stderr)
    return whole / (memcpy + update)


def main() -> None:
    print(f"{os.cpu_count()} cores, {platform.machine()}, JAX {jax.__version__}, Python {platform.python_version()}")
    found = threads()
    print(f"threads, K = 2 over one chain alone      {found:6.2f}   (target 1.9 on two cores)")
    share, loss = exchange()
    print(f"exchanges and centre over steps          {share:6.1%}   (target 3 %), steps/s lost {loss:.1%}")
    found = store()
    print(f"a store, steps/s lost                    {1 - found:6.1%}   (target 3 %)")
    found = message()
    print(f"exchange of 5 MB over memcpy + update    {found:6.2f}   (target 3)")
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU, {used.ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
