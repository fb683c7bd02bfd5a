"""Figure 2, right: the residual network with 32 layers of He et al. 2016 on CIFAR-10, without batch normalisation.

Neither augmentation nor normalisation by batches, for with these there would be no posterior to sample. The start that
makes this trainable is Fixup's (see `hookean.experiments.networks`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hookean.datasets import load
from hookean.experiments.classification import Clock, Say, Task
from hookean.experiments.classification import measure as measure_curves
from hookean.experiments.methods import all_methods
from hookean.experiments.networks import residual, residual_init
from hookean.experiments.page import draw_classification
from hookean.experiments.report import Report

TITLE = "SGHMC in parallel on CIFAR-10"
PRIOR = 1e-5
"""lambda of the prior exp(-lambda |theta|^2)."""
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
SD = np.array([0.2470, 0.2435, 0.2616], np.float32)
"""Of the channels of the training images, scaled to [0, 1]."""
KINDS = ("SGHMC", "independent", "elastic", "stale gradient")


def task(report: Report) -> Task:
    """Data and network of these settings."""
    settings = report.settings
    given = load("cifar10", settings["data_dir"])
    examples, tests, shrink = (int(settings[name]) for name in ("examples", "tests", "shrink"))
    train, test = (given.x_train[:examples], given.y_train[:examples]), (given.x_test[:tests], given.y_test[:tests])

    def prepare(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        if shrink > 1:
            x = x.reshape(x.shape[0], 32 // shrink, shrink, 32 // shrink, shrink, 3).mean((2, 4))
        return (x / 255 - MEAN) / SD

    return Task.split(
        train,
        test,
        init=residual_init(int(settings["blocks"])),
        apply=residual,
        log_prior=lambda params: -PRIOR * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)),
        batch_size=int(settings["batch_size"]),
        prepare=prepare,
    )


def measure(report: Report, clock: Clock, say: Say) -> None:
    """Sweep and curves."""
    settings = report.settings
    small = settings["grid"] == "small"
    methods = all_methods(int(settings["chains"]), settings["every"], float(settings["scale"]), small)
    methods = [method for method in methods if method.name in ("SGHMC", *(settings["methods"] or KINDS))]
    measure_curves(report, task(report), methods, clock, say)


def draw(report: Report) -> None:
    """Figures and the page."""
    draw_classification(report, TITLE, INTRODUCTION)


INTRODUCTION = (
    "Figure 2 (right) of Springenberg, Klein, Falkner and Hutter 2016: a residual network with 32 layers (He et al. "
    "2016), without batch normalisation, started by Fixup (Zhang, Dauphin and Ma 2019). A parallel step is one "
    "gradient by each of the K workers."
)
