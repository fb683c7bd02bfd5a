"""The examples, cut short: they run, say what they should, and what they find is right."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from hookean import testing
from hookean.diagnostics import mean_and_error

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PICTURES = EXAMPLES.parent / "docs" / "pictures"


def load(name: str, folder: Path = EXAMPLES) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"example_{name}", folder / f"{name}.py")
    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_toy_gaussian(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors come from 20 stretches, so that they follow Student's t with 19 degrees of freedom.

    |t| > 8 happens by chance once in 6 million comparisons; there are three. The exact variance is that of small steps:
    its bias at this one is below 1 % (0.8 % coupled, 0.2 % free), and the measured errors are some 3 %.
    """
    rows = load("toy_gaussian").main(num_steps=20_000)
    for name, measured, error, exact in rows:
        assert abs(measured - exact) < 8 * error + 0.01 * exact, name
        assert error < 0.1 * exact, f"{name}: too noisy to tell"
    free, held, released = (row[1] for row in rows)
    assert held < 0.9 * free
    assert held < 0.9 * released
    assert "elastic, hold" in capsys.readouterr().out


def test_logistic_regression(capsys: pytest.CaptureFixture[str]) -> None:
    """The posterior of a slope lies about the point where the whole posterior is highest."""
    run, best = load("logistic_regression").main(num_steps=6_000)
    slopes = np.asarray(run.draws["slope"]).reshape(-1, 30)
    assert run.draws["constant"].shape == (4, 240)
    # Skewness moves a mean off the mode by about half a standard deviation here; a likelihood of the wrong sign moves
    # many of the 30 by far more.
    assert np.abs((slopes.mean(0) - best.coef_[0]) / slopes.std(0)).max() < 1
    printed = capsys.readouterr().out
    assert "uncoupled" in printed
    assert float(printed.rpartition("; ")[2].partition("%")[0]) > 93, "worse than the best single feature"


def test_neural_network(capsys: pytest.CaptureFixture[str]) -> None:
    """After a tenth of the example's steps a draw is far better than chance, and a mean of predictions than a draw."""
    found = load("neural_network").main(num_steps=600)
    one, chain, everything = found.values()
    assert one[0] > math.log(1 / 10)
    assert one[1] > 0.5
    assert chain[0] > one[0]  # by Jensen's inequality for the mean over draws, and here for this draw too
    assert everything[1] > 0.8
    assert "all draws of all chains" in capsys.readouterr().out


def test_asynchronous_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """The scenario does what it says, and the posterior survives it."""
    of_mean, of_sd = load("asynchronous_workers").main(num_steps=4_000)
    lines = capsys.readouterr().out.splitlines()
    events = [line.split(maxsplit=1)[1] for line in lines[1 : lines.index("")]]
    assert events[0] == "worker 3 joins"
    assert events.index("worker 2 leaves the mean") < events.index("worker 2 is back, and goes on from its last report")
    assert events[-1] == "worker 1 leaves the mean", "the straggler is the last"
    # 5 chains x 3,000 steps, some 250 steps a direction's memory: about 50 independent draws where it is slowest. A
    # mean is then known to 0.14 sd and a standard deviation to 0.1 of itself, and the largest of 10 of each is within
    # six such errors but for one case in 50 million.
    assert of_mean < 6 * 0.14
    assert of_sd < 6 * 0.1


def test_own_dynamics(capsys: pytest.CaptureFixture[str]) -> None:
    """E theta^2 under exp(-theta^4) is Gamma(3/4) / Gamma(1/4)."""
    module = load("own_dynamics")
    run = module.main(num_steps=8_000)
    squares = np.asarray(jnp.mean(run.draws**2, axis=2))
    measured, error = mean_and_error(squares)
    exact = math.gamma(0.75) / math.gamma(0.25)
    assert error < 0.1 * exact, "too noisy to tell"
    assert (
        abs(measured - exact) < 8 * error + 0.02 * exact
    )  # Student's t with 19 degrees of freedom, and the step's bias
    assert "Relativistic x Elastic" in capsys.readouterr().out


@pytest.mark.parametrize(
    "check", testing.checks_of(load("own_dynamics").Relativistic), ids=lambda check: check.__name__
)
def test_own_dynamics_has_its_law(check: Callable[[], None]) -> None:
    check()


def test_the_picture_can_be_drawn_again(tmp_path: Path) -> None:
    toy = load("toy", PICTURES)
    toy.main(tmp_path / "toy.png")
    drawn, kept = (plt.imread(path) for path in (tmp_path / "toy.png", PICTURES / "toy.png"))
    assert drawn.shape == kept.shape
    # Fonts and the last bits of paths differ between machines; a picture of other settings differs in more than this.
    assert np.mean(np.abs(drawn - kept)) < 0.02
