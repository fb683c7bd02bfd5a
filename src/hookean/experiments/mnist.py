"""Figure 2, left: a fully connected network on MNIST, two hidden layers of 800, batches of 100, K = 6."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hookean.datasets import load
from hookean.experiments import clocks
from hookean.experiments.classification import Clock, Say, Task
from hookean.experiments.classification import measure as measure_curves
from hookean.experiments.methods import all_methods
from hookean.experiments.networks import dense, dense_init
from hookean.experiments.page import draw_classification
from hookean.experiments.report import Report

TITLE = "SGHMC in parallel on MNIST"
PRIOR = 1e-5
"""lambda of the prior exp(-lambda |theta|^2)."""
MEAN, SD = 0.1307, 0.3081
"""Of the pixels of the training images, scaled to [0, 1]."""


def task(report: Report) -> Task:
    """Data and network of these settings."""
    settings = report.settings
    given = load("mnist", settings["data_dir"])
    examples, tests, hidden = (int(settings[name]) for name in ("examples", "tests", "hidden"))
    flat = [(x.reshape(len(x), -1), y) for x, y in ((given.x_train, given.y_train), (given.x_test, given.y_test))]
    train, test = ((x[:count], y[:count]) for (x, y), count in zip(flat, (examples, tests), strict=True))
    return Task.split(
        train,
        test,
        init=dense_init((train[0].shape[1], hidden, hidden, 10)),
        apply=dense,
        log_prior=lambda params: -PRIOR * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)),
        batch_size=int(settings["batch_size"]),
        prepare=lambda x: (x.astype(jnp.float32) / 255 - MEAN) / SD,
    )


def measure(report: Report, clock: Clock, say: Say) -> None:
    """Sweep, curves, and the same against simulated and real time."""
    settings = report.settings
    wanted = task(report)
    small = settings["grid"] == "small"
    methods = all_methods(int(settings["chains"]), settings["every"], float(settings["scale"]), small)
    if settings["methods"]:
        methods = [method for method in methods if method.name in ("SGHMC", *settings["methods"])]
    compiled = measure_curves(report, wanted, methods, clock, say)
    clocks.measure(report, wanted, methods, compiled, clock, say)


def draw(report: Report) -> None:
    """Figures and the page."""
    draw_classification(report, TITLE, INTRODUCTION)


INTRODUCTION = (
    "Figure 2 (left) of Springenberg, Klein, Falkner and Hutter 2016, on MNIST, against baselines that were tuned by "
    "the same sweep. A parallel step is one gradient by each of the K workers."
)
