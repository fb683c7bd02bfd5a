"""What the documents say is so: examples run as printed, tables and formulas are recomputed, names and links exist."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.linalg import block_diag, solve_discrete_lyapunov
from typer.testing import CliRunner

import hookean as hk
from hookean import coupling, dynamics
from hookean.cli import app
from hookean.testing import linear_system
from test_architecture import LAYERS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README, MATH, GUIDE, CONTRIBUTING = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/math.md", "docs/guide.md", "CONTRIBUTING.md")
)


def cells(line: str) -> list[str]:
    """Cells of a line of a table, where `\\|` is a bar and not a border."""
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def table(page: str, first_line: str) -> list[list[str]]:
    """Rows of the table that begins with `first_line`."""
    lines = page.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line == first_line)
    return [cells(line) for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def same_as_printed(value: float, printed: str) -> bool:
    """Whether `value` rounds to the number that is printed, to as many digits."""
    digits = len(printed.partition(".")[2])
    return f"{round(value, digits) + 0.0:.{digits}f}" == printed


# -- what runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readme_summary() -> str:
    """What the README's example prints."""
    (example,) = python_blocks(README)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {"__name__": "example"})
    return printed.getvalue().strip()


def test_the_example_of_the_readme_is_short(readme_summary: str) -> None:
    (example,) = python_blocks(README)
    lines = [line for line in example.splitlines() if line and not re.match(r"(from|import) ", line)]
    assert len(lines) <= 11
    assert "uncoupled" in readme_summary


def test_the_guide_shows_the_summary_that_is_printed(readme_summary: str) -> None:
    (shown,) = re.findall(r"<!-- summary of the README's example -->\n```\n(.*?)\n```", GUIDE, flags=re.DOTALL)

    def words(text: str) -> list[str]:
        return [re.sub(r"[\d.,]*\d", "#", line) for line in text.splitlines()]

    assert words(shown) == words(readme_summary)


def test_the_guide_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)  # where dataclasses look
    names: dict[str, Any] = vars(module)
    for number, block in enumerate(python_blocks(GUIDE)):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, f"docs/guide.md, block {number}", "exec"), names)
    error = np.abs(names["slopes"].mean((0, 1)) - [1.0, -2.0, 0.5])
    # The posterior's sd is 1/sqrt(N) = 0.032; its mean is as far from the truth, and the run's own error is less.
    # Seven of their joint sd: false alarm below 1e-10.
    assert error.max() < 7 * np.sqrt(2 / 1000)


def test_the_guide_shows_the_dynamics_of_the_example() -> None:
    example = (ROOT / "examples" / "own_dynamics.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- examples/own_dynamics.py -->\n```python\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert shown.strip() == example.partition("\n\ndef main(")[0].strip()


def test_the_command_lines_of_the_readme_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^hookean .*$", README, flags=re.MULTILINE)]
    assert {words[1] for words in lines} >= {"--help", "list", "demo", "sample", "status", "resume", "replay"}
    for _, command, *options in lines:
        options = [str(tmp_path / "run") if option == "runs/first" else option for option in options]
        options = ["400" if option == "12000" else option for option in options]
        shorter = ["--num-steps", "300", "--warmup", "100", "--no-progress", "--out", str(tmp_path / "draws.npz")]
        arguments = {"sample": [*options, *shorter], "demo": ["--help"]}.get(command, options)
        arguments = ["--help"] if command == "reproduce" else arguments  # test_experiments.py runs them
        result = CliRunner().invoke(app, [command, *arguments])
        assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "draws.npz")["draws/params"].shape == (4, 200, 3)


def test_every_command_to_make_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"^make ([a-z]+)", document.read_text(encoding="utf-8"), flags=re.MULTILINE))
        assert named <= targets, f"{document.name} names {named - targets}"


# -- the README's tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "header"),
    [
        (dynamics.ALL, "| dynamics | law of one chain | from |"),
        (coupling.ALL, "| coupling | law of the chains together | from |"),
    ],
)
def test_the_readme_states_the_law_of_every_class(found: dict[str, Any], header: str) -> None:
    stated = {name.strip("`"): law.strip("`") for name, law, _ in table(README, header)}
    assert stated == {name: cls.law for name, cls in found.items()}


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}
    assert {name for name, reason in table(README, "| dependency | for |") if reason} == needed


# -- the mathematics ---------------------------------------------------------------------------------------------------
# An oracle of its own in plain NumPy: z = (positions, momenta, c, r, positions at the last exchange). One round is a
# product of linear maps, each with its noise.

Pieces = list[tuple[np.ndarray, np.ndarray]]


def stationary(pieces: Pieces) -> np.ndarray:
    """Covariance that a round of maps z -> matrix z + N(0, covariance) leaves as it is."""
    matrix, covariance = np.eye(len(pieces[0][0])), np.zeros_like(pieces[0][0])
    for one, noise in pieces:
        matrix, covariance = one @ matrix, one @ covariance @ one.T + noise
    assert np.abs(np.linalg.eigvals(matrix)).max() < 1
    return solve_discrete_lyapunov(matrix, covariance)


def one_chain(order: str, eps: float, h: float, V: float, M: float, T: float) -> Pieces:
    """One step of SGHMC on h x^2 / 2, as kick, friction and drift."""
    drift = np.array([[1, eps / M], [0, 1]])
    if order == "obabo":
        half, decay = np.array([[1, 0], [-eps * h / 2, 1]]), np.exp(-V * eps / M)
        flow = (np.diag([1, decay]), np.diag([0, M * T * (1 - decay**2)]))
        return [(half, np.zeros((2, 2))), flow, (drift @ half, np.zeros((2, 2)))]
    kick = np.array([[1, 0], [-eps * h, 1 - eps * V / M]])
    noise = np.diag([0, 2 * eps * T * V])
    if order == "explicit":
        return [(kick + drift - np.eye(2), noise)]
    return [(kick, noise), (drift, np.zeros((2, 2)))]


def test_biases_of_the_integrators() -> None:
    rows = table(MATH, "| `eps` | `h` | explicit | semi_implicit | obabo |")
    assert len(rows) == 4
    for eps, h, *printed in rows:
        for order, value in zip(("explicit", "semi_implicit", "obabo"), printed, strict=True):
            variance = stationary(one_chain(order, float(eps), float(h), 1, 1, 1))[0, 0] * float(h)
            assert same_as_printed(variance, value), f"{order} at eps = {eps}, h = {h}: {variance:.5f}, not {value}"


def evaluate(formula: str, **symbols: float) -> float:
    """A formula as it is written on the page: blanks and digits before a name multiply."""
    code = re.sub(r"(?<=\d)(?=[a-zA-Z])|(?<=[\w)]) (?=[\w(])", "*", formula.strip("`"))
    return eval(code, {"__builtins__": {}}, symbols)


@pytest.mark.parametrize(("eps", "h", "V", "M", "T"), [(0.1, 1, 1, 1, 1), (0.2, 4, 2, 3, 0.5), (0.3, 0.7, 1.5, 0.4, 2)])
def test_formulas_of_the_integrators(eps: float, h: float, V: float, M: float, T: float) -> None:
    rows = table(MATH, "| order | variance of theta, times `h/T` | `p^2/M`, over `T` | stable for |")
    k, d = eps**2 * h / M, eps * V / M
    assert [row[0] for row in rows] == ["SGLD", "explicit", "semi_implicit", "obabo"]
    sgld = stationary([(np.array([[1 - eps * h]]), np.array([[2 * eps * T]]))])
    assert evaluate(rows[0][1], eps=eps, h=h) == pytest.approx(sgld[0, 0] * h / T, rel=1e-9)
    for order, variance, heat, _ in rows[1:]:
        law = stationary(one_chain(order, eps, h, V, M, T))
        assert evaluate(variance, k=k, d=d) == pytest.approx(law[0, 0] * h / T, rel=1e-9)
        assert evaluate(heat, k=k, d=d) == pytest.approx(law[1, 1] / M / T, rel=1e-9)


@pytest.mark.parametrize("d", [0.05, 0.3])
def test_bounds_of_stability(d: float) -> None:
    def radius(order: str, k: float) -> float:
        step = np.eye(2)
        for matrix, _ in one_chain(order, 1.0, k, d, 1.0, 1.0):
            step = matrix @ step
        return float(np.abs(np.linalg.eigvals(step)).max())

    for order, bound in {"explicit": d, "semi_implicit": 4 - 2 * d, "obabo": 4.0}.items():
        assert radius(order, 0.999 * bound) < 1 < radius(order, 1.001 * bound), order


def test_how_long_a_direction_remembers() -> None:
    """The slowest mode of semi-implicit SGHMC: about d/k steps under strong friction, 2/d under weak."""
    for d, k, steps in ((0.1, 1e-4, 0.1 / 1e-4), (0.01, 1e-2, 2 / 0.01)):
        (kick, _), (drift, _) = one_chain("semi_implicit", 1.0, k, d, 1.0, 1.0)
        slowest = np.abs(np.linalg.eigvals(drift @ kick)).max()
        assert -1 / np.log(slowest) == pytest.approx(steps, rel=0.02)


def test_a_rare_refreshment_leaves_the_law_of_the_positions() -> None:
    half, flow, rest = one_chain("obabo", 0.4, 1.5, 1.0, 1.0, 1.0)
    idle = (np.eye(2), np.zeros((2, 2)))
    wanted = stationary([half, flow, rest])[0, 0]
    for after in range(4):  # at each place in the cycle of m = 4
        steps = [step for i in range(4) for step in (half, flow if i == after else idle, rest)]
        assert stationary(steps)[0, 0] == pytest.approx(wanted, rel=1e-9)


def test_a_thermostat_makes_positions_narrow() -> None:
    """The friction at which p^2 is T under the noise 2 eps A T, and what it makes of theta."""
    eps, h, A = 0.2, 1.0, 1.0
    k = eps**2 * h
    d = min(np.roots([-1 / 2, 1 - k / 4, -eps * A]))
    (kick, _), drift = one_chain("semi_implicit", eps, h, d / eps, 1, 1)
    law = stationary([(kick, np.diag([0, 2 * eps * A])), drift])
    assert law[1, 1] == pytest.approx(1)
    assert law[0, 0] * h == pytest.approx(1 - d / 2)


def test_gradient_noise_is_a_temperature() -> None:
    eps, h, V, T, B = 0.2, 1.3, 0.8, 0.6, 5.0
    (kick, noise), drift = one_chain("semi_implicit", eps, h, V, 1, T)
    noisy = stationary([(kick, noise + np.diag([0, eps**2 * B])), drift])
    assert noisy == pytest.approx(stationary(one_chain("semi_implicit", eps, h, V, 1, T + eps * B / (2 * V))))


K, V, C, M, T, H = 4, 1.0, 1.0, 1.0, 1.0, 1.0
CHAINS, MOMENTA, OLD, CENTRE, VELOCITY = slice(0, K), slice(K, 2 * K), slice(2 * K + 2, 3 * K + 2), 2 * K, 2 * K + 1
SIZE = 3 * K + 2


def kicks(eps: float, spring: float, alpha: float, source: slice) -> tuple[np.ndarray, np.ndarray]:
    """Changes of all momenta: of the chains, and of the centre that sees the positions `source`."""
    chains, centre = np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE))
    chains[MOMENTA, CHAINS] = -eps * (H + spring) * np.eye(K)
    chains[MOMENTA, CENTRE] = eps * spring
    chains[MOMENTA, MOMENTA] = -eps * V / M * np.eye(K)
    centre[VELOCITY, CENTRE] = -eps * alpha
    centre[VELOCITY, source] = eps * alpha / K
    centre[VELOCITY, VELOCITY] = -eps * C / M
    return chains, centre


def drifts(eps: float) -> tuple[np.ndarray, np.ndarray]:
    chains, centre = np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE))
    chains[CHAINS, MOMENTA] = eps / M * np.eye(K)
    centre[CENTRE, VELOCITY] = eps / M
    return chains, centre


def noises(of_chain: float, of_centre: float) -> tuple[np.ndarray, np.ndarray]:
    chains, centre = np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE))
    chains[MOMENTA, MOMENTA] = of_chain * np.eye(K)
    centre[VELOCITY, VELOCITY] = of_centre
    return chains, centre


def all_at_once(eps: float, spring: float, alpha: float, of_chain: float, of_centre: float) -> np.ndarray:
    """Explicit order: everything from the old state, as Eq. 6 is printed."""
    move = np.eye(SIZE) + sum(kicks(eps, spring, alpha, CHAINS)) + sum(drifts(eps))
    move[OLD] = 0
    return stationary([(move, sum(noises(of_chain, of_centre)))])


def in_turns(eps: float, alpha: float, every: int, simultaneous: bool) -> np.ndarray:
    """This library's order: `every` steps of the chains, as many of the centre, then all are told."""
    kick, drift = kicks(eps, alpha / K, alpha, OLD if simultaneous else CHAINS), drifts(eps)
    noise, still = noises(2 * eps * T * V, 2 * eps * T * C), np.zeros((SIZE, SIZE))
    pieces = []
    for who in (0, 1):
        pieces += every * [(np.eye(SIZE) + kick[who], noise[who]), (np.eye(SIZE) + drift[who], still)]
    store = np.eye(SIZE)
    store[OLD] = np.eye(SIZE)[CHAINS]
    return stationary([*pieces, (store, still)])


def coupled_systems() -> dict[str, np.ndarray]:
    """Covariances of the chains, by the names of the table's rows."""
    eps, alpha = 0.01, 1.0
    proper = 2 * eps * V, 2 * eps * C
    limit = T * np.linalg.inv(H * np.eye(K) + alpha / K * (np.eye(K) - np.ones((K, K)) / K))
    return {
        "target": np.eye(K),
        "uncoupled SGHMC, Eq. 4, explicit order": all_at_once(eps, 0, alpha, *proper),
        "Eq. 6 as printed, noise `2 eps^2 (V+C)` and `2 eps^2 C`": all_at_once(
            eps, alpha, alpha, 2 * eps**2 * (V + C), 2 * eps**2 * C
        ),
        "Eq. 6, noise `2 eps (V+C)` and `2 eps C`": all_at_once(eps, alpha, alpha, 2 * eps * (V + C), 2 * eps * C),
        "Eq. 6, noise `2 eps V` and `2 eps C`": all_at_once(eps, alpha, alpha, *proper),
        "the Hamiltonian's, explicit order": all_at_once(eps, alpha / K, alpha, *proper),
        "the Hamiltonian's, this library's default order": in_turns(eps, alpha, 1, False),
        "the Hamiltonian's, as eps -> 0": limit,
    }


def test_the_table_of_coupled_variances() -> None:
    rows = table(MATH, "| system | Var(theta_i) | Cov(theta_i, theta_j) |")
    found = coupled_systems()
    assert [row[0] for row in rows] == list(found)
    for name, variance, covariance in rows:
        assert same_as_printed(found[name][0, 0], variance), f"{name}: {found[name][0, 0]:.5f}, not {variance}"
        assert same_as_printed(found[name][0, 1], covariance), f"{name}: {found[name][0, 1]:.5f}, not {covariance}"


def test_the_table_of_rhythms() -> None:
    rows = table(MATH, "| `every` | default | `simultaneous=True` |")
    assert len(rows) == 3
    for every, *printed in rows:
        for simultaneous, value in zip((False, True), printed, strict=True):
            variance = in_turns(0.1, 4.0, int(every), simultaneous)[0, 0]
            assert same_as_printed(variance, value), f"every={every}, {simultaneous}: {variance:.5f}, not {value}"


@pytest.mark.parametrize(
    ("sampler", "tied", "found"),
    [
        (
            hk.SGHMC(0.01, integrator="explicit"),
            hk.ElasticAsPrinted(1.0),
            lambda: coupled_systems()["Eq. 6 as printed, noise `2 eps^2 (V+C)` and `2 eps^2 C`"],
        ),
        (hk.SGHMC(0.1), hk.Elastic(4.0), lambda: in_turns(0.1, 4.0, 1, False)),
    ],
    ids=["as printed", "default"],
)
def test_the_library_is_what_the_page_describes(
    sampler: hk.Dynamics, tied: hk.Coupling, found: Callable[[], np.ndarray]
) -> None:
    assert linear_system(sampler, tied, H, K).stationary() == pytest.approx(found()[CHAINS, CHAINS], rel=1e-8)


def test_the_law_of_coupled_chains() -> None:
    """The formulas of variance and covariance, the code's statement of them, and what is left of c."""
    h, alpha, temperature = 1.7, 3.0, 0.8
    same = temperature * (1 / K / h + (1 - 1 / K) / (h + alpha / K))
    other = temperature / K * (1 / h - 1 / (h + alpha / K))
    wanted = other + (same - other) * np.eye(K)
    # With the centre as one more coordinate: its row is alpha (c - mean), a chain's h x + (alpha/K)(x - c).
    joint = block_diag((h + alpha / K) * np.eye(K), alpha)
    joint[:K, K] = joint[K, :K] = -alpha / K
    assert temperature * np.linalg.inv(joint)[:K, :K] == pytest.approx(wanted)
    assert hk.Elastic(alpha).covariance(h, K, temperature) == pytest.approx(wanted)


def test_a_frozen_worker_drags_the_others() -> None:
    text = " ".join(MATH.split())
    (drag, of_eq_6) = re.findall(r"drags the means of the others to ([\d.]+) \(.*?to ([\d.]+)\)", text)[0]
    for spring, printed in ((1.0 / K, drag), (1.0, of_eq_6)):
        # Minimum of the energy in (x_1 .. x_{K-1}, c), with x_K = 3: stiffness times unknowns = force.
        stiffness = block_diag((H + spring) * np.eye(K - 1), K * spring)
        stiffness[:-1, -1] = stiffness[-1, :-1] = -spring
        means = np.linalg.solve(stiffness, np.array([0.0] * (K - 1) + [3 * spring]))
        assert same_as_printed(means[0], printed)


# -- names, links, files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        assert file.exists(), f"{document.name} links to {target}, which is not there"
        assert file.is_relative_to(ROOT), f"{document.name} links out of the project: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{document.name} links to {target}, which has no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_names_of_the_library_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = {name for name in re.findall(r"\bhk\.(\w+)", text) if not hasattr(hk, name)}
    assert not missing, f"{document.name} names hk.{', hk.'.join(sorted(missing))}"


def test_examples_are_linked_and_run() -> None:
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert examples == set(re.findall(r"\]\(examples/(\w+\.py)\)", README))
    tests = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    assert all(f'"{name.removesuffix(".py")}"' in tests for name in examples)


def test_pictures_are_small() -> None:
    pictures = sorted(ROOT.glob("docs/**/*.png"))
    assert pictures
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 200 * 1024, f"{picture.name} is too large to be cloned by everyone"


def words_of(node: ast.AST, assigned: dict[str, list[ast.expr]]) -> str:
    """Constant text of an expression and of what its names were given."""
    words = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for name in sorted(names & assigned.keys()):
        rest = {other: values for other, values in assigned.items() if other != name}
        words += [words_of(value, rest) for value in assigned[name]]
    return " ".join(words)


def warnings_in_source() -> Iterator[tuple[str, str]]:
    """Place and text of whatever the library warns of, before a run or in its summary."""
    for file in sorted((ROOT / "src" / "hookean").rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            assigned: dict[str, list[ast.expr]] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    assigned.setdefault(node.targets[0].id, []).append(node.value)
            for node in ast.walk(function):
                caller = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                in_summary = file.stem == "diagnostics" and caller in ("warnings.append", "found.append")
                if caller == "warnings.warn" or in_summary:
                    yield f"{file.name}, line {node.lineno}", words_of(node.args[0], assigned)


def test_every_warning_is_explained() -> None:
    explained = [row[0].strip("`") for row in table(GUIDE, "| it says | it means | what to do |")]
    found = dict(warnings_in_source())
    assert len(found) > 5
    for place, text in found.items():
        assert any(phrase in text for phrase in explained), f"{place}: docs/guide.md does not explain {text!r}"
    for phrase in explained:
        assert any(phrase in text for text in found.values()), f"docs/guide.md explains {phrase!r}, which nothing says"


# -- the project -------------------------------------------------------------------------------------------------------


def test_contributing_shows_the_layers_that_are_enforced() -> None:
    (block,) = re.findall(r"```\n(cli\n.*?)```", CONTRIBUTING, flags=re.DOTALL)
    shown = [tuple(name.strip() for name in line.split("|")) for line in block.splitlines()]
    assert shown == [tuple(name for name in names if name != "hookean") for names in LAYERS]


def test_contributing_names_what_ci_runs() -> None:
    (stages,) = re.findall(r"for stage in (.*?);", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    (block,) = re.findall(r"```\n(make .*?)```", CONTRIBUTING, flags=re.DOTALL)
    assert block.split() == [word for stage in stages.split() for word in ("make", stage)]


HOSTS = {  # papers, standards, manuals and the machine itself; nothing is fetched from them
    "127.0.0.1",
    "arxiv.org",
    "docs.jax.dev",
    "keepachangelog.com",
    "semver.org",
    "www.apache.org",
}
DATA_HOMES = {  # of hookean.datasets, which checks what it fetches there
    "fashion-mnist.s3.eu-central-1.amazonaws.com",
    "ossci-datasets.s3.amazonaws.com",
    "raw.githubusercontent.com",
    "www.cs.toronto.edu",
}
SKIPPED = {".git", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "build", "dist"}


def test_no_file_names_a_host_to_download_from() -> None:
    for directory, subdirectories, files in os.walk(ROOT):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED and not name.endswith(".egg-info")]
        for name in files:
            try:
                text = Path(directory, name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            hosts = set(re.findall(r"(?:https?|ftp|git|ssh)(?:\+\w+)?://([\w.-]+)", text))
            if Path(directory, name) == ROOT / "src" / "hookean" / "datasets.py":
                assert hosts == DATA_HOMES
                continue
            assert hosts <= HOSTS, f"{Path(directory, name).relative_to(ROOT)} names {hosts - HOSTS}"
