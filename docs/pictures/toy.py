"""Draw docs/pictures/toy.png: two plain SGHMC runs beside four elastic chains, first 100 steps on a 2-D Gaussian.

    .venv/bin/python docs/pictures/toy.py [where.png]

The ellipses hold half and 95 % of the exact laws: the posterior on the left; on the right also the law of one coupled
chain, as `Elastic.covariance` states it, direction by direction.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib
import numpy as np

import hookean as hk

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PICTURE = Path(__file__).with_name("toy.png")
COVARIANCE = np.array([[1.0, 0.6], [0.6, 0.8]])
START = np.array([-2.6, 3.2])
STEPS = 100
DYNAMICS = hk.SGHMC(step_size=0.1, friction=0.5)
COUPLING = hk.Elastic(alpha=4.0, every=4)
# Okabe and Ito's colours, which stay apart for colour-blind eyes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
GREY = "#666666"


def paths(coupling: hk.Coupling, chains: int, seed: int) -> np.ndarray:
    """Positions [chain, step, 2] of chains that all set out from START."""
    precision = jnp.asarray(np.linalg.inv(COVARIANCE))
    target = hk.Target.from_log_density(lambda x: -x @ precision @ x / 2)
    run = hk.sample(
        target,
        jnp.asarray(START),
        dynamics=DYNAMICS,
        coupling=coupling,
        engine=hk.Vectorised(),
        chains=chains,
        num_steps=STEPS,
        seed=seed,
        progress=False,
    )
    start = np.broadcast_to(START, (chains, 1, 2))
    return np.concatenate([start, np.asarray(run.draws)], axis=1)


def law_of_one_chain(coupling: hk.Coupling, chains: int) -> np.ndarray:
    """Covariance of one chain under `coupling`; each principal direction of the Gaussian is a problem of its own."""
    variances, directions = np.linalg.eigh(COVARIANCE)
    coupled = [coupling.covariance(1 / variance, chains, 1.0)[0, 0] for variance in variances]
    return directions @ np.diag(coupled) @ directions.T


def outline(covariance: np.ndarray, share: float) -> np.ndarray:
    """The ellipse around the origin that holds `share` of N(0, covariance), as points."""
    angles = np.linspace(0, 2 * np.pi, 200)
    radius = np.sqrt(-2 * np.log(1 - share))
    return radius * np.linalg.cholesky(covariance) @ np.stack([np.cos(angles), np.sin(angles)])


def main(where: str | Path = PICTURE, seed: int = 0) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.9), sharex=True, sharey=True, layout="constrained")
    panels = (
        (left, hk.Independent(), 2, "two plain SGHMC chains"),
        (right, COUPLING, 4, "four elastic chains"),
    )
    for axes, coupling, chains, title in panels:
        for path, colour in zip(paths(coupling, chains, seed), COLOURS, strict=False):
            axes.plot(*path.T, color=colour, linewidth=1.0, marker="o", markersize=1.8)
        laws = {"the posterior": (COVARIANCE, {"color": GREY, "linestyle": "--", "linewidth": 1.3})}
        if coupling is COUPLING:
            coupled = law_of_one_chain(coupling, chains)
            laws["law of one coupled chain"] = (coupled, {"color": "black", "linewidth": 1.5})
        for name, (covariance, style) in laws.items():
            axes.plot(*outline(covariance, 0.5), zorder=3, label=name, **style)
            axes.plot(*outline(covariance, 0.95), zorder=3, **style)
        axes.plot(*START, marker="s", color="black", markersize=6)
        axes.annotate("start", START, xytext=(8, 2), textcoords="offset points", fontsize=10)
        axes.legend(loc="lower right", title="50 % and 95 % of", alignment="left", frameon=False, fontsize=9)
        axes.set_title(f"{title}, {STEPS} steps", fontsize=12)
        axes.set_aspect("equal")
        axes.set(xlim=(-3.6, 4), ylim=(-3.9, 3.7), xticks=range(-2, 5, 2), yticks=range(-2, 4, 2))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(where, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main(*sys.argv[1:2])
