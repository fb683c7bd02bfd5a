"""Do the tests notice? Known mistakes are planted into a copy of the library, one at a time, and named tests must fail.

An entry of DEFECTS is one such mistake: the exact text that is replaced, and the fewest tests that must notice. They
run in a process of their own that imports the copy, must fail by an assertion (not by an error on the way), and must
pass on a copy without the mistake. About 4 seconds an entry, most of it start-up and compilation.

The second half plants mistakes into dynamics and couplings such as users write: `hookean.testing.checks_of` must
notice them by itself.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import hookean as hk
from hookean import testing
from hookean.coupling import Centre
from hookean.random import Noise
from hookean.schedules import value_at
from hookean.tree import tree_map

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = "test_plugins.py::test_a_plugin_passes[{}]"
EXACT_LAW = "test_laws.py::test_the_law_is_the_exact_one[{}]"
PATH = "test_laws.py::test_without_noise_the_path_is_that_of_the_equations[{}]"


@dataclasses.dataclass(frozen=True)
class Defect:
    file: str
    old: str
    new: str
    noticed_by: tuple[str, ...]


DEFECTS = {
    # -- dynamics
    "SGHMC: noise of 2 eps^2 V, as printed": Defect(
        "dynamics/sghmc.py",
        "scale = jnp.sqrt(jnp.maximum(2 * eps * T * V - eps**2 * B, 0.0))",
        "scale = jnp.sqrt(jnp.maximum(2 * eps**2 * T * V - eps**2 * B, 0.0))",
        (PLUGIN.format("SGHMC[1]_step_follows_recipe"), PLUGIN.format("SGHMC[1]_linear_map_is_the_step")),
    ),
    "SGHMC: the noise estimate is not taken off": Defect(
        "dynamics/sghmc.py",
        "scale = jnp.sqrt(jnp.maximum(2 * eps * T * V - eps**2 * B, 0.0))",
        "scale = jnp.sqrt(jnp.maximum(2 * eps * T * V, 0.0))",
        (EXACT_LAW.format("SGHMC(friction=1.5,noise_estimate=2.0)-Independent()-simulated"),),
    ),
    "SGHMC: momenta start with variance T / M": Defect(
        "dynamics/sghmc.py",
        "(jnp.sqrt(M * temperature) * z)",
        "(jnp.sqrt(temperature / M) * z)",
        (PLUGIN.format("SGHMC[3]_start_has_the_law"),),
    ),
    "SGHMC: the Ornstein-Uhlenbeck noise of half the time": Defect(
        "dynamics/sghmc.py",
        "jnp.expm1(-2 * V * span / M)",
        "jnp.expm1(-V * span / M)",
        (PLUGIN.format("SGHMC[2]_step_follows_recipe"),),
    ),
    "SGLD: noise of eps T": Defect(
        "dynamics/sgld.py",
        "scale = jnp.sqrt(2 * eps * temperature)",
        "scale = jnp.sqrt(eps * temperature)",
        (PLUGIN.format("SGLD[0]_step_follows_recipe"),),
    ),
    "SGNHT: the thermostat aims at 1, not at T": Defect(
        "dynamics/sgnht.py",
        "heat = dot(momentum, momentum) / size(momentum) - T",
        "heat = dot(momentum, momentum) / size(momentum) - 1",
        (PLUGIN.format("SGNHT[0]_step_follows_recipe"),),
    ),
    "PSGLD: Gamma is dropped": Defect(
        "dynamics/psgld.py",
        "eps * (G * g - T * Gamma)",
        "eps * (G * g)",
        (PLUGIN.format("PSGLD[1]_step_follows_recipe"),),
    ),
    "ScaleAdaptedSGHMC: the mass is never frozen": Defect(
        "dynamics/scale_adapted.py",
        "adapting = step < (self.adapt_steps or 0)",
        "adapting = True",
        (PLUGIN.format("ScaleAdaptedSGHMC[0]_step_follows_recipe"),),
    ),
    "ScaleAdaptedSGHMC: windows do not grow": Defect(
        "dynamics/scale_adapted.py",
        "keep(w * (1 - m**2 / jnp.maximum(v, self.damping**2)) + 1, w)",
        "keep(w * (1 - m**2 / jnp.maximum(v, self.damping**2)), w)",
        ("test_laws.py::test_masses_adapt_as_the_equations_say[False]",),
    ),
    "ScaleAdaptedSGHMC: the estimate is not taken off the noise": Defect(
        "dynamics/scale_adapted.py",
        "(eps**2 * v if self.subtract_noise else 0.0)",
        "0.0",
        ("test_laws.py::test_masses_adapt_as_the_equations_say[True]",),
    ),
    # -- randomness and data
    "Noise: a step's second draw reuses the key of its first": Defect(
        "random.py",
        "self._calls += 1",
        "self._calls += 0",
        (
            PLUGIN.format("PSGLD[0]_dynamics_keys_are_used_once"),
            PLUGIN.format("Elastic[1]_coupling_keys_are_used_once"),
        ),
    ),
    "all chains have the same noise": Defect(
        "job.py",
        "Noise(stream_key(self.key, Stream.NOISE, chain), step)",
        "Noise(stream_key(self.key, Stream.NOISE), step)",
        (PLUGIN.format("Independent[0]_runs_have_the_exact_law"),),
    ),
    "all chains have the same batches": Defect(
        "job.py",
        "stream_key(self.key, Stream.BATCH, chain)",
        "stream_key(self.key, Stream.BATCH)",
        ("test_random.py::test_no_key_is_used_twice_in_a_run[leap]",),
    ),
    "Target: N / |B| is missing": Defect(
        "targets.py",
        "-(self.num_examples / each.shape[0]) * jnp.sum(each)",
        "-jnp.sum(each)",
        (
            "test_targets.py::test_the_potential_is_unbiased[replacement]",
            "test_regression.py::test_minibatches[sgld]",
        ),
    ),
    "Target: the same batch at every step": Defect(
        "targets.py",
        "jax.random.randint(jax.random.fold_in(key, step), (self.batch_size,), 0, self.num_examples)",
        "jax.random.randint(key, (self.batch_size,), 0, self.num_examples)",
        ("test_random.py::test_no_key_is_used_twice_in_a_run[leap]",),
    ),
    # -- couplings
    "Elastic: the force has the wrong sign": Defect(
        "coupling/elastic.py",
        "(strength * (x - c)).astype(x.dtype)",
        "(strength * (c - x)).astype(x.dtype)",
        (
            PLUGIN.format("Elastic[0]_has_the_stated_law"),
            "test_engines.py::test_elastic_sghmc_at_temperature_0_is_equation_7[explicit-simultaneous]",
        ),
    ),
    "Elastic: springs of strength alpha, as printed": Defect(
        "coupling/elastic.py",
        "return self.stiffness(step) / live",
        "return self.stiffness(step)",
        (PLUGIN.format("Elastic[0]_has_the_stated_law"),),
    ),
    "Elastic: the centre is K times too hot": Defect(
        "coupling/elastic.py",
        "if value is not None})",
        "if value is not None}).replace(temperature=dynamics.temperature * chains)",
        (PLUGIN.format("Elastic[0]_has_the_stated_law"),),
    ),
    "Elastic: the variance of the centre's noise is divided by K, which is 3": Defect(
        "coupling/elastic.py",
        "root = _root(covariance)",
        "root = _root(covariance / 3)",
        (PLUGIN.format("Elastic[0]_has_the_stated_law"),),
    ),
    "Elastic: the centre's clock counts d, not d / K": Defect(
        "coupling/elastic.py",
        "whole = credit // centre.num_live",
        "whole = credit",
        ("test_engines.py::test_elastic_sghmc_at_temperature_0_is_equation_7[explicit-simultaneous]",),
    ),
    "Elastic: what is left of a report is not kept": Defect(
        "coupling/elastic.py",
        "credit=credit - num_steps * centre.num_live",
        "credit=credit * 0",
        (PATH.format("SGLD()-Elastic(simultaneous=True)"),),
    ),
    "Elastic: the centre feels the positions before its own time": Defect(
        "coupling/elastic.py",
        "mean = (centre if self.simultaneous else heard).mean()",
        "mean = centre.mean()",
        ("test_engines.py::test_elastic_sghmc_at_temperature_0_is_equation_7[explicit-in turn]",),
    ),
    "the mean has workers in it that have left": Defect(
        "coupling/base.py",
        "jnp.sum(jnp.where(mask, leaf, 0), 0)",
        "jnp.sum(leaf, 0)",
        (PLUGIN.format("Elastic[0]_leavers_count_no_longer"),),
    ),
    "release never lets go": Defect(
        "schedules.py",
        "return jnp.clip((self.end - phase) / max(self.end - self.hold, 1e-9), 0.0, 1.0)",
        "return jnp.ones(())",
        (
            "test_schedules.py::test_the_force_follows_the_schedule[release]",
            PLUGIN.format("Elastic[2]_has_the_stated_law"),
        ),
    ),
    "StaleGradient: gradients are added up, not averaged": Defect(
        "coupling/stale_gradient.py",
        "mean = tree_map(lambda g: g / self.wait_for, centre.gradient)",
        "mean = centre.gradient",
        (
            PLUGIN.format("StaleGradient[0]_has_the_stated_law"),
            "test_engines.py::test_fresh_gradients_are_those_of_one_chain_with_a_larger_batch[3-replacement]",
        ),
    ),
    "EASGD: the centre answers after it has moved": Defect(
        "coupling/easgd.py",
        "return self._move(joined, pulls, earned), joined.copy()",
        "return self._move(joined, pulls, earned), self._move(joined, pulls, earned).copy()",
        (PATH.format("SGLD()-EASGD(moving_rate=0.3)"),),
    ),
    "EASGD: the whole moving rate for every chain": Defect(
        "coupling/easgd.py",
        "value_at(self.moving_rate, step) / copy.live",
        "value_at(self.moving_rate, step)",
        ("test_engines.py::test_easgd_is_elastic_sgld_at_temperature_0",),
    ),
    # -- engines
    "Vectorised: answers are a round late": Defect(
        "engines/vectorised.py",
        "centre, copy = job.coupling.receive_all(job.roles[1], carry.centre, reports, job.key)",
        "centre, copy = job.coupling.receive_all(job.roles[1], carry.centre, reports, job.key)[0], carry.centre.copy()",
        ("test_engines.py::test_engines_agree_at_a_barrier[SGHMC-Elastic0]",),
    ),
    "Simulated: a restored worker keeps its count of steps": Defect(
        "engines/simulated.py",
        "return desk._replace(worker=desk.saved, step=desk.step - event.steps)",
        "return desk._replace(worker=desk.saved)",
        ("test_targets.py::test_a_crashed_worker_reads_again_what_it_had_read",),
    ),
}

WITNESS = """
from pathlib import Path
import hookean
assert Path(hookean.__file__).is_relative_to(Path(__file__).parents[1]), hookean.__file__
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree of its own with the library and its tests; its conftest.py refuses to run with another library."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "hookean", tmp_path / "src" / "hookean", ignore=skip)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "tests" / "conftest.py").open("a") as file:
        file.write(WITNESS)
    return tmp_path


def run(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Pytest in the copy, one process, with a summary line for each test that is not cut off."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(copy / "src"), "COLUMNS": "1000", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short", "-rf"]
    return subprocess.run(
        [*command, *(f"tests/{test}" for test in tests)], cwd=copy, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_named_tests_pass_without_a_defect(copy: Path) -> None:
    named = tuple(sorted({test for defect in DEFECTS.values() for test in defect.noticed_by}))
    done = run(copy, named)
    assert done.returncode == 0 and f"{len(named)} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_noticed(name: str, copy: Path) -> None:
    defect = DEFECTS[name]
    path = copy / "src" / "hookean" / defect.file
    text = path.read_text()
    assert text.count(defect.old) == 1, f"{defect.file} has {text.count(defect.old)} times: {defect.old}"
    path.write_text(text.replace(defect.old, defect.new))
    done = run(copy, defect.noticed_by)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED tests/(.*?) - (?:AssertionError|assert )", done.stdout, re.MULTILINE)
    assert sorted(failed) == sorted(defect.noticed_by), done.stdout


# -- mistakes of users -------------------------------------------------------------------------------------------------


class TooCold(hk.SGLD):
    """Noise of eps T."""

    def step(self, state: Any, gradient: Any, noise: Any, step: Any, curvature: Any = None) -> Any:
        half = dataclasses.replace(self, temperature=0.5 * self.temperature)
        return hk.SGLD.step(half, state, gradient, noise, step, curvature)


class Uphill(hk.SGLD):
    """Follows the gradient up."""

    def step(self, state: Any, gradient: Any, noise: Any, step: Any, curvature: Any = None) -> Any:
        return super().step(state, tree_map(jnp.negative, gradient), noise, step, curvature)


class Restless(hk.SGLD):
    """Moves by chance even at temperature 0."""

    def step(self, state: Any, gradient: Any, noise: Any, step: Any, curvature: Any = None) -> Any:
        eps, T = value_at(self.step_size, step), value_at(self.temperature, step) + 0.1
        return type(state)(
            tree_map(
                lambda x, g, z: x - eps * g + jnp.sqrt(2 * eps * T) * z,
                state.position,
                gradient,
                noise.normal(state.position),
            )
        )


class Repeating(hk.SGLD):
    """Draws all its steps from the same key."""

    def step(self, state: Any, gradient: Any, noise: Any, step: Any, curvature: Any = None) -> Any:
        return super().step(state, gradient, Noise(jax.random.key(0)), step, curvature)


class Widening(hk.SGLD):
    """Turns parameters of 16 bits into such of 32."""

    def step(self, state: Any, gradient: Any, noise: Any, step: Any, curvature: Any = None) -> Any:
        moved = super().step(state, gradient, noise, step, curvature)
        return moved._replace(position=tree_map(lambda x: x.astype(jnp.float32), moved.position))


class Boasting(hk.SGLD):
    """States the map of another order."""

    def linear_map(self, stiffness: Any, step: Any) -> Any:
        one = super().linear_map(stiffness, step)
        return one._replace(matrix=1 / (2 - one.matrix))


class WithoutGamma(hk.PSGLD):
    """Leaves Gamma out and claims that nothing is missing."""

    def step(self, state: Any, gradient: Any, noise: Any, step: Any, curvature: Any = None) -> Any:
        return super().step(state, gradient, noise, step, lambda vector: tree_map(jnp.zeros_like, vector))


class AnotherLaw(hk.SGHMC):
    """Its recipe is that of a temperature of 1, whatever was asked for."""

    def recipe(self, potential: Any, state: Any) -> Any:
        return hk.SGHMC.recipe(dataclasses.replace(self, temperature=1.0), potential, state)


class SymmetricCurl(hk.SGHMC):
    """Q is not skew-symmetric, as in section 1 of the paper."""

    def recipe(self, potential: Any, state: Any) -> Any:
        right = super().recipe(potential, state)
        return right._replace(curl=lambda z: jnp.abs(right.curl(z)))


class PullsAsPrinted(hk.Elastic):
    """alpha for alpha / K."""

    def spring(self, step: Any, live: Any) -> Any:
        return self.stiffness(step)


class PushesApart(hk.Elastic):
    """A force of the wrong sign: so weak that a law exists, and so strong that none does."""

    def force(self, position: Any, copy: Any, step: Any) -> Any:
        return tree_map(jnp.negative, super().force(position, copy, step))

    @classmethod
    def variants(cls) -> Any:
        return [cls(0.5), cls(40.0)]


class ColdCentre(hk.Elastic):
    """A centre without noise."""

    def roles(self, dynamics: Any, chains: int) -> Any:
        chain, centre = super().roles(dynamics, chains)
        return chain, centre.replace(temperature=0.0)


class FirstAmongEquals(hk.Elastic):
    """The centre is where the first chain is."""

    def copy_of(self, centre: Any) -> Any:
        return centre.copy()._replace(position=tree_map(lambda x: x[0], centre.positions))

    def receive_all(self, dynamics: Any, centre: Any, reports: Any, key: Any) -> Any:
        centre, _ = super().receive_all(dynamics, centre, reports, key)
        return centre, self.copy_of(centre)


class NeverForgets(hk.Elastic):
    """Workers that have left stay in the mean."""

    def leave(self, centre: Centre, worker: Any) -> Centre:
        return centre._replace(version=centre.version + 1)


class SameNoiseAgain(hk.Elastic):
    """Every exchange draws from the key of the first."""

    def receive_all(self, dynamics: Any, centre: Any, reports: Any, key: Any) -> Any:
        moved, copy = super().receive_all(dynamics, centre._replace(version=0 * centre.version), reports, key)
        return moved._replace(version=centre.version + 1), copy._replace(version=centre.version + 1)


class Summing(hk.StaleGradient):
    """Adds gradients up and takes no mean."""

    def advance(self, dynamics: Any, evaluate: Any, worker: Any, noise: Any, step: Any) -> Any:
        worker, seen = super().advance(dynamics, evaluate, worker, noise, step)
        return worker._replace(state=tree_map(lambda g: self.wait_for * g, worker.state)), seen


MISTAKES = [
    (TooCold, "TooCold[0]_step_follows_recipe"),
    (TooCold, "TooCold[0]_chains_have_the_law"),
    (Uphill, "Uphill[0]_step_follows_recipe"),
    (Restless, "Restless[0]_no_chance_at_temperature_zero"),
    (Repeating, "Repeating[0]_dynamics_keys_are_used_once"),
    (Widening, "Widening[0]_types_are_kept"),
    (Boasting, "Boasting[0]_linear_map_is_the_step"),
    (WithoutGamma, "WithoutGamma[1]_step_follows_recipe"),
    (AnotherLaw, "AnotherLaw[1]_recipe_is_stationary"),
    (SymmetricCurl, "SymmetricCurl[1]_recipe_is_stationary"),
    (PullsAsPrinted, "PullsAsPrinted[0]_has_the_stated_law"),
    (PushesApart, "PushesApart[0]_has_the_stated_law"),
    (PushesApart, "PushesApart[1]_has_the_stated_law"),
    (PushesApart, "PushesApart[1]_runs_have_the_exact_law"),
    (ColdCentre, "ColdCentre[0]_has_the_stated_law"),
    (FirstAmongEquals, "FirstAmongEquals[0]_chains_are_exchangeable"),
    (NeverForgets, "NeverForgets[0]_leavers_count_no_longer"),
    (SameNoiseAgain, "SameNoiseAgain[0]_coupling_keys_are_used_once"),
    (SameNoiseAgain, "SameNoiseAgain[1]_runs_have_the_exact_law"),
    (Summing, "Summing[0]_has_the_stated_law"),
]


@pytest.mark.parametrize(("plugin", "name"), MISTAKES, ids=[name for _, name in MISTAKES])
def test_a_users_mistake_is_noticed(plugin: Any, name: str) -> None:
    checks: dict[str, Callable[[], None]] = {check.__name__: check for check in testing.checks_of(plugin)}
    with pytest.raises(AssertionError):
        checks[name]()
