"""Imports inside hookean go one way: down."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "hookean"

# From top to bottom. A name may import from lines below its own, and within itself.
# "hookean" stands for names taken from the package itself, which re-exports the api.
LAYERS = (
    ("cli",),
    ("experiments",),
    ("demo", "datasets", "status"),
    ("testing", "scores"),
    ("api", "hookean"),
    ("preparation", "run", "integrations"),
    ("engines", "diagnostics", "progress", "predict"),
    ("recorder",),
    ("job",),
    ("coupling", "dynamics", "targets", "store"),
    ("exchange", "telemetry"),
    ("random", "tree", "schedules"),
    ("types",),
)
DEPTH = {name: depth for depth, names in enumerate(LAYERS) for name in names}
EXEMPT = {"hookean", "hookean.__main__"}


def component(module: str) -> str:
    """First name below hookean, or "hookean" for the package itself."""
    return module.removeprefix("hookean.").split(".")[0]


def imported_modules(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each hookean module that is imported, wherever the statement stands."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            if base == "hookean":  # `from hookean import tree` names a module, `import sample` does not
                names = [f"hookean.{a.name}" if a.name in DEPTH else "hookean" for a in node.names]
            else:
                names = [base]
        for name in names:
            if name == "hookean" or name.startswith("hookean."):
                yield node.lineno, name


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `module`, one message each."""
    if module in EXEMPT:
        return []
    here = component(module)
    if here not in DEPTH:
        return [f"{module} is in no layer: give '{here}' a place in LAYERS and in CONTRIBUTING.md"]
    package = module if is_package else module.rpartition(".")[0]
    wrong = []
    for line, imported in imported_modules(ast.parse(source), package):
        there = component(imported)
        if there not in DEPTH:
            wrong.append(f"{module}, line {line}: imports {imported}, which is in no layer")
        elif there != here and DEPTH[there] <= DEPTH[here]:
            side = "beside" if DEPTH[there] == DEPTH[here] else "above"
            wrong.append(f"{module}, line {line}: imports {imported}, but '{there}' is {side} '{here}'")
    return wrong


def test_imports_go_one_way() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"no modules below {PACKAGE}"
    wrong = []
    for file in files:
        is_package = file.stem == "__init__"
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if is_package else parts)
        wrong += wrong_imports(file.read_text(encoding="utf-8"), module, is_package)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("hookean.tree", "\nimport hookean.api", "tree, line 2: imports hookean.api, but 'api' is above"),
        ("hookean.tree", "from hookean import api", "line 1: imports hookean.api, "),
        ("hookean.tree", "from .engines.base import Engine", "imports hookean.engines.base, "),
        ("hookean.tree", "from . import types, cli", "imports hookean.cli, "),
        ("hookean.engines.vectorised", "from ..api import sample", "imports hookean.api, "),
        ("hookean.engines.vectorised", "def f():\n  from hookean import cli", "line 2: imports hookean.cli, "),
        ("hookean.engines.vectorised", "from hookean import sample", "imports hookean, "),
        ("hookean.engines.vectorised", "import hookean as hk", "imports hookean, "),
        ("hookean.api", "import hookean", "'hookean' is beside 'api'"),
        ("hookean.coupling.elastic", "from hookean.dynamics import SGLD", "'dynamics' is beside 'coupling'"),
        ("hookean.api", "import hookean.stray.deep", "imports hookean.stray.deep, which is in no layer"),
        ("hookean.stray.deep", "", "hookean.stray.deep is in no layer"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, message: str) -> None:
    (found,) = wrong_imports(source, module)
    assert message in found


def test_a_package_is_its_own_base_for_relative_imports() -> None:
    assert wrong_imports("from . import vectorised\nfrom ..tree import add", "hookean.engines", True) == []
    (found,) = wrong_imports("from ..cli import main", "hookean.engines", True)
    assert "imports hookean.cli, " in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hookean.cli", "import hookean\nfrom hookean import demo, sample"),
        ("hookean.engines.simulated", "from . import base\nfrom .base import Engine\nfrom .. import tree"),
        ("hookean.engines.vectorised", "import jax, random, types\nfrom hookean.exchange import Exchange"),
        ("hookean", "from hookean.cli import main"),
        ("hookean.__main__", "from hookean.cli import main"),
    ],
)
def test_a_right_import_is_let_through(module: str, source: str) -> None:
    assert wrong_imports(source, module) == []
