"""`hookean reproduce` in small: what it computes is compared with closed forms, with the library's own engines and with
brute force; every command runs on small files of the real formats and leaves a folder that is checked."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import math
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import hookean as hk
from hookean.api import prepare
from hookean.cli import app
from hookean.experiments import classification, clocks, commands, exact, published, speed, uci
from hookean.experiments.follow import Followed, Follower
from hookean.experiments.methods import Method, all_methods
from hookean.experiments.networks import _convolution, residual, residual_init
from hookean.experiments.report import Report
from hookean.testing import linear_system

# -- parts -------------------------------------------------------------------------------------------------------------


def test_exact_laws_are_those_of_the_library() -> None:
    dynamics = hk.SGHMC(0.1, 1.0)
    found = linear_system(dynamics, hk.Elastic(2.0, 3), 1.3, 2).stationary()
    law = exact.elastic(dynamics, 1.3, 2, 2.0, 3)
    np.testing.assert_allclose([law.variance, law.variance * law.correlation], found[0], rtol=1e-9)
    found = linear_system(dynamics, hk.StaleGradient(2, 2), 1.3, 2).stationary()
    np.testing.assert_allclose(exact.stale_gradient(dynamics, 1.3, 2, 2, 2).variance, found[0, 0], rtol=1e-9)


def test_exact_laws_without_springs_or_staleness_are_those_of_one_chain() -> None:
    dynamics = hk.SGHMC(0.1, 1.0)
    alone = exact.independent(dynamics, 0.7)
    np.testing.assert_allclose(exact.elastic(dynamics, 0.7, 4, 1e-9, 8).variance, alone.variance, rtol=1e-6)
    np.testing.assert_allclose(exact.stale_gradient(dynamics, 0.7, 4, 1, 4)[::2], alone[::2], rtol=1e-12)
    assert math.isnan(exact.stale_gradient(dynamics, 1.0, 4, 16, 1).variance)  # which diverges


@pytest.mark.parametrize("coupling", [hk.Elastic(3.0, 4), hk.StaleGradient(2, 1)], ids=["elastic", "stale"])
def test_following_is_sampling(coupling: hk.Coupling) -> None:
    """Several runs in one program take the very steps that `hk.sample` takes with each seed."""
    random = np.random.default_rng(0)
    data = (random.normal(size=(50, 2)).astype(np.float32),)
    target = hk.Target(lambda w, b: -jnp.sum((b[0] - w) ** 2, 1) / 2, lambda w: -jnp.sum(w**2) / 2, data, 10)
    same: dict[str, Any] = {"dynamics": hk.SGHMC(0.02, 5.0), "coupling": coupling, "chains": 3, "num_steps": 24}

    def init(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (2,))

    job = prepare(target, init, warmup=0, thin=1, engine=hk.Vectorised(), seed=0, **same)
    found = Follower(job, init, lambda w, _: w, [8, 16, 24])([3, 5])
    run = hk.sample(target, init, thin=8, seed=5, engine=hk.Vectorised(), progress=False, **same)
    np.testing.assert_allclose(found.seen[:, 1], np.swapaxes(run.draws, 0, 1), rtol=1e-4, atol=1e-5)
    assert not np.array_equal(found.seen[:, 0], found.seen[:, 1])


def test_a_run_that_breaks_does_not_stop_the_others() -> None:
    target = hk.Target.from_log_density(lambda x: -jnp.sum(x**2) / 2)
    job = prepare(target, jnp.ones(1), hk.SGHMC(0.1, 1.0), hk.Elastic(1.0, 2), 2, 800, 0, 1, hk.Vectorised(), 0)

    def vary(job: Any, setting: Any) -> Any:
        return replace(job, dynamics=hk.SGHMC(setting["step"], 1.0))

    follower = Follower(job, lambda key: jnp.ones(1), lambda x, _: x, [400, 800], vary)
    found = follower([0, 0], {"step": np.array([0.1, 5.0], np.float32)})
    assert found.broken[0] == -1 and 0 < found.broken[1] < 800
    assert np.all(np.isfinite(found.seen[:, 0])) and not np.array_equal(found.seen[0, 0], found.seen[1, 0])


def test_curves_are_averages_of_probabilities() -> None:
    p = np.random.default_rng(0).uniform(0.1, 0.9, (4, 1, 3, 5))  # [look, run, chain, example]
    seen = {"log_p": np.log(p), "right": np.full((4, 1, 3), 0.5)}
    found = classification.curves_of(Followed(np.array([8, 16, 24, 32]), seen, np.array([-1])))
    np.testing.assert_allclose(found.single[:, 0], [-np.log(p[i]).mean() for i in range(4)])
    np.testing.assert_allclose(found.ensemble[:, 0], [-np.log(p[i, 0].mean(0)).mean() for i in range(4)])
    by_hand = [-np.log(p[first : last + 1, 0].mean((0, 1))).mean() for first, last in ((0, 0), (1, 1), (1, 2), (2, 3))]
    np.testing.assert_allclose(found.average[:, 0], by_hand)
    broken = classification.curves_of(Followed(np.array([8, 16, 24, 32]), seen, np.array([20])))
    assert np.isfinite(broken.single[:2]).all() and np.isnan(broken.single[2:]).all()


def test_time_to_a_level_is_read_off_straight_lines_of_the_logarithm() -> None:
    steps, curve = [10, 20, 30], np.exp([0.0, -1.0, -2.0])
    assert speed.time_to(curve, steps, np.exp(-1.5)) == pytest.approx(25)
    assert speed.time_to(curve, steps, 2.0) == 10
    assert speed.time_to(curve, steps, 0.01) == math.inf
    assert speed.time_to([np.nan, 0.5, 0.4], steps, 0.45) == pytest.approx(20 + 10 * np.log(0.5 / 0.45) / np.log(1.25))


def test_every_method_is_there_and_a_finer_sweep_holds_the_best() -> None:
    methods = all_methods(6, [1, 2, 4, 8, 16])
    labels = [method.label for method in methods]
    assert len(set(labels)) == len(labels)
    for name in ("elastic", "stale gradient"):
        assert {f"{name}, s = {s}" for s in (1, 2, 4, 8, 16)} <= set(labels)
    assert {"SGHMC", "independent", "EASGD, s = 8", "EAMSGD, s = 8", "elastic, released, s = 8"} <= set(labels)
    method = next(method for method in methods if method.name == "elastic")
    assert method.finer(method.settings[0])[0] == method.settings[0]


def test_a_method_has_the_learning_rate_and_the_spring_that_it_says() -> None:
    method = Method("elastic", 6, (), every=8)
    dynamics, coupling = method.parts({"lr": 0.1, "spring": 0.01}, 60_000, 100)
    assert dynamics.step_size**2 * 60_000 == pytest.approx(0.1)
    assert 1 - dynamics.step_size * dynamics.friction == pytest.approx(0.9)
    assert dynamics.step_size**2 * coupling.alpha / 6 == pytest.approx(0.01)
    centre = coupling.roles(dynamics, 6)[1]
    assert 1 - centre.step_size * centre.friction / centre.mass == pytest.approx(0.9)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_is_a_convolution(stride: int) -> None:
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((2, 8, 8, 3), (27, 5))))
    wanted = jax.lax.conv_general_dilated(
        x, w.reshape(3, 3, 3, 5), (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    found = _convolution({"w": w, "b": jnp.zeros(5)}, x, stride)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_the_residual_network_has_32_layers_and_starts_at_zero() -> None:
    """He et al. 2016: 6 n + 2 layers of weights, and for n = 5 some 0.46 million of them."""
    shapes = jax.eval_shape(residual_init(5), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 463_018
    stacked = [(4 if path[2].key == "rest" else 1) for path, leaf in _weights(shapes["stages"])]
    assert 2 + sum(stacked) == 32
    params = residual_init(2)(jax.random.key(0))
    assert np.all(np.asarray(residual(params, jnp.ones((1, 8, 8, 3)))) == 0)


def _weights(stages: Any) -> list[Any]:
    leaves = jax.tree_util.tree_flatten_with_path({"stages": stages})[0]
    return [(path, leaf) for path, leaf in leaves if path[-1].key == "w"]


def test_published_figures_name_their_paper() -> None:
    for other in published.REGRESSION:
        assert "201" in other.paper and set(other.rmse) <= set(other.log_likelihood) <= set(uci.UCI)


def test_free_workers_take_the_time_of_their_steps() -> None:
    times = clocks.free_times(4, [10, 1000], seed=0)
    assert times.shape == (4, 2) and np.all(np.diff(times, axis=1) > 0)
    wanted = 1000 * np.exp(clocks.JITTER**2 / 2) * np.array([1, 1, 1, clocks.SLOWER])
    # The mean of 1000 log-normal steps has a relative standard error of 0.0064: six of these, one alarm in 10^8.
    np.testing.assert_allclose(times[:, 1], wanted, rtol=0.04)


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files of the real formats: pictures whose class is where they are bright, a plane with noise."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (folder / "mnist").mkdir()
    for part, count in (("train", 300), ("t10k", 60)):
        labels = random.integers(0, 10, count).astype(np.uint8)
        images = random.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        images[np.arange(count), 2 * labels] = 255
        header = np.array([2051, count, 28, 28], ">i4").tobytes()
        _gzip(folder / "mnist" / f"{part}-images-idx3-ubyte.gz", header + images.tobytes())
        header = np.array([2049, count], ">i4").tobytes()
        _gzip(folder / "mnist" / f"{part}-labels-idx1-ubyte.gz", header + labels.tobytes())
    (folder / "cifar10").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        content = np.concatenate([random.integers(0, 10, 20), random.integers(0, 256, 20 * 3072)]).astype(np.uint8)
        (folder / "cifar10" / f"{name}.xz").write_bytes(lzma.compress(content.tobytes()))
    (folder / "uci").mkdir()
    x = random.normal(size=(60, 3))
    order = np.stack([random.permutation(60) for _ in range(2)])
    np.savez(
        folder / "uci" / "yacht.npz",
        data=np.column_stack([x, x @ [1.0, -2.0, 0.5] + 0.1 * random.normal(size=60)]),
        index_features=np.arange(3),
        index_target=3,
        index_train=order[:, :54],
        index_test=order[:, 54:],
    )
    (folder / "posteriordb").mkdir()
    X = random.normal(size=(40, 2))
    y = X @ [1.0, 2.0] + random.normal(size=40)
    (folder / "posteriordb" / "sblri.json").write_text(json.dumps({"X": X.tolist(), "y": y.tolist()}))
    beta = np.linalg.lstsq(X, y, rcond=None)[0]
    draws = np.column_stack([beta + 0.16 * random.normal(size=(1000, 2)), np.exp(0.11 * random.normal(size=1000))])
    np.savez(folder / "posteriordb" / "sblri-blr.npz", draws=draws.reshape(10, 100, 3), names=["a", "b", "sigma"])
    return folder


def _gzip(path: Path, content: bytes) -> None:
    path.write_bytes(gzip.compress(content))


class Links(HTMLParser):
    """What a page asks a browser to fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.headings += [tag] if tag in ("h1", "h2") else []
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "data")]


def reproduce(out: Path, *arguments: str) -> Report:
    """Run a command and check what all folders must have."""
    with jax.default_prng_impl("unsafe_rbg"):  # not threefry, of which XLA takes long to compile what tests need once
        result = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(out), "--traceback"])
    assert result.exit_code == 0, result.output
    page = (out / "index.html").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert "h1" in links.headings and len(links.headings) > 3
    assert links.fetched and all(link.startswith("data:image/png;base64,") for link in links.fetched)
    report = Report.open(out)
    assert report.config["experiment"] == arguments[0]
    assert {"command", "versions", "hardware"} <= set(report.config) and escape(report.config["command"]) in page
    for figure in out.glob("*.png"):
        assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 5000
        assert "<svg" in figure.with_suffix(".svg").read_text(encoding="utf-8")
    assert list(out.glob("*.png"))
    return report


def numbers(report: Report, table: str, *columns: str) -> np.ndarray:
    """Columns of a table, finite; of those that try several settings, the rows of the tuned one."""
    rows = [row for row in report.rows(table) if row.get("role", "tuned") == "tuned"]
    found = np.array([[float(row[column]) for column in columns] for row in rows])
    assert found.size and np.all(np.isfinite(found)), (table, columns)
    return found


def test_toy_and_drawing_again(tmp_path: Path) -> None:
    out = tmp_path / "toy"
    report = reproduce(out, "toy", "--steps", "10")
    variances = {row["system"]: row["var x"] for row in report.rows("laws")}
    assert variances["elastic, as printed"] < 0.1 < variances["elastic, as derived"] < variances["the posterior"] == 1
    path = numbers(report, "paths", "chain", "step", "x", "y")
    assert len(path) == (2 + 4 + 4) * 11 and np.all(path[path[:, 1] == 0, 2:] == [-2.4, 2.6])
    assert (out / "figure1.gif").read_bytes().startswith(b"GIF8")
    again = (out / "index.html").read_bytes()
    (out / "index.html").unlink()
    result = CliRunner().invoke(app, ["reproduce", "draw", str(out)])
    assert result.exit_code == 0, result.output
    assert (out / "index.html").read_bytes() == again


def test_mnist(tmp_path: Path, data_dir: Path) -> None:
    size = ("--steps", "64", "--seeds", "1", "--chains", "2", "--every", "2", "--only", "elastic")
    out = tmp_path / "mnist"
    report = reproduce(out, "mnist", "--quick", "--data-dir", str(data_dir), "--archive", *size)
    curves = numbers(report, "curves", "single", "ensemble", "average", "accuracy")
    assert np.all(curves[:, 0] >= curves[:, 1] - 1e-5)  # Jensen: mean probabilities are no worse than the mean
    assert np.all((0 <= curves[:, 3]) & (curves[:, 3] <= 1))
    assert {row["method"] for row in report.rows("curves")} == {"SGHMC", "elastic, s = 2"}
    for each in speed.grouped(report.rows("curves")).values():
        for rows in each.values():
            steps = [row["step"] for row in rows]
            assert steps == sorted(set(steps)) and steps[-1] == 64
    accuracy = speed.matrix(speed.grouped(report.rows("curves"))["SGHMC", "tuned"], "accuracy")[1][:, -1]
    assert accuracy.mean() > 0.5  # where guessing has 0.1
    tuned = {(row["method"], row["role"]): row for row in report.rows("tuned")}
    assert {row["lr"] for row in report.rows("sweep") if row["method"] == "SGHMC"} >= {tuned["SGHMC", "tuned"]["lr"]}
    moments = numbers(report, "simulated", "seed", "time", "single", "ensemble")
    assert np.all(moments[:, 1] > 0) and "elastic, all wait, s = 2" in {
        row["method"] for row in report.rows("simulated")
    }
    assert (tmp_path / "mnist.tar.gz").is_file()


def test_cifar10(tmp_path: Path, data_dir: Path) -> None:
    size = ("--steps", "16", "--seeds", "3", "--chains", "2", "--only", "SGHMC")
    report = reproduce(tmp_path / "cifar10", "cifar10", "--quick", "--data-dir", str(data_dir), *size)
    curves = numbers(report, "curves", "step", "single", "ensemble")
    assert np.all(curves[:, 1] >= curves[:, 2] - 1e-5)


def test_uci(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane with noise of sd 0.1: its standard deviation is 2.3, and a network must do better than the mean."""
    plain, elastic = uci.METHODS[1:]
    monkeypatch.setattr(uci, "METHODS", (replace(plain, grid=plain.grid[:2]), replace(elastic, grid=elastic.grid[:1])))
    size = ("--steps", "1600", "--seeds", "2", "--chains", "2", "--only", "yacht")
    report = reproduce(tmp_path / "uci", "uci", "--quick", "--data-dir", str(data_dir), *size)
    rows = report.rows("scores")
    assert [row["method"] for row in rows[::2]] == [method.name for method in uci.METHODS]
    scores = numbers(report, "scores", "split", "rmse", "log_likelihood", "coverage_90")
    assert np.all(scores[:, 1] < 2.3 / 2) and np.all((0 <= scores[:, 3]) & (scores[:, 3] <= 1))
    page = (tmp_path / "uci" / "index.html").read_text(encoding="utf-8")
    assert "Gal and Ghahramani 2016" in page and "Springenberg" in page


def test_staleness(tmp_path: Path, data_dir: Path) -> None:
    size = ("--steps", "800", "--seeds", "2")
    report = reproduce(tmp_path / "staleness", "staleness", "--quick", "--data-dir", str(data_dir), *size)
    elastic = [row for row in report.rows("exact") if row["scheme"] == "elastic" and np.isfinite(row["variance"])]
    assert len(elastic) > 250
    assert all(0 < row["variance"] < 1.05 and row["correlation"] >= 0 for row in elastic if row["alpha"] <= 1)
    found = {row["schedule"]: row for row in report.rows("sampled")}
    assert list(found) == ["independent", "hold", "release", "cycle"]
    numbers(report, "sampled", "error of mean", "error of sd", "sd ratio")


def test_all_does_every_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: dict[str, Any] = {}
    monkeypatch.setattr(commands, "_carry_out", lambda name, out, settings, *_: done.update({name: (out, settings)}))
    result = CliRunner().invoke(app, ["reproduce", "all", "--quick", "--data-dir", "d", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert set(done) == {"toy", "staleness", "mnist", "cifar10", "uci"} == set(commands.DRAW)
    assert all(out == tmp_path / name and settings["quick"] for name, (out, settings) in done.items())


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    result = CliRunner().invoke(app, ["reproduce", "toy", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "--out" in result.output
    assert (tmp_path / "thesis.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_missing_data_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    arguments = ["mnist", "--quick", "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == 2 and "--data-dir" in result.output


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    report = Report.make(tmp_path / "out", "toy", {})
    report.append("t", [{"name": "a, b", "count": 3, "value": 0.25}, {"name": "c", "count": 4, "value": float("nan")}])
    first, second = report.rows("t")
    assert first == {"name": "a, b", "count": 3, "value": 0.25} and math.isnan(second["value"])
    with (tmp_path / "out" / "t.csv").open() as file:
        assert next(csv.reader(file)) == ["name", "count", "value"]
