"""The command line: one function for each command.

Data goes to stdout, all else to stderr. An error ends in one message: exit code 2 for bad input, 1 where a run failed.
Dynamics, couplings and engines are written as in Python, `SGHMC(step_size=0.01)`, and found by name among those that
the library has and those that the user's file defines; nothing of what is written is evaluated as code.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import hookean as hk
from hookean import coupling as couplings
from hookean import dynamics as all_dynamics
from hookean import engines
from hookean import status as standing
from hookean.experiments import commands as experiments
from hookean.store import load as open_store
from hookean.tree import leaf_names

INSIDE = {made.__name__: made for made in (hk.hold, hk.release, hk.cycle, hk.Scenario, hk.Straggler, hk.Crash, hk.Join)}
"""What may be called inside the brackets of a dynamics, a coupling or an engine."""
USER_MODULE = "hookean_user_file"
INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
SECONDS_BETWEEN_LOOKS = 1.0
"""Of `hookean status --watch`."""

app = typer.Typer(
    name="hookean",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run: what --store named.")]
app.add_typer(experiments.app, name="reproduce")

ShowTraceback = Annotated[bool, typer.Option("--traceback", help="With an error, show where it came from.")]


def main() -> None:
    """The command `hookean`."""
    app(prog_name="hookean")


COMMAND = """\b
    hookean sample model.py:target --dynamics "SGHMC(step_size=0.1)" \\
        --coupling "Elastic(alpha=1, every=8, schedule=release())" \\
        --chains 6 --num-steps 20000 --warmup 5000 --out draws.npz
"""
STORED = """\b
    hookean sample model.py --dynamics "SGHMC(0.1)" --store runs/first
    hookean status runs/first --watch                # meanwhile, elsewhere
    hookean resume runs/first                        # after a crash or Ctrl-C
    hookean resume runs/first --num-steps 40000      # or to make it longer
    hookean replay runs/first                        # the same once more, compared
"""
EXAMPLE = f"""A target of your own is a Python file, say model.py:

\b
    import jax.numpy as jnp
    import hookean as hk
    target = hk.Target.from_log_density(lambda x: -jnp.sum(x**2) / 2)
    init = jnp.zeros(3)

Six chains on springs sample it, let go before draws are kept:

{COMMAND}
A run may be kept on disk while it goes on:

{STORED}"""
"""`\\b` keeps the lines that follow as they are."""

# -- commands ----------------------------------------------------------------------------------------------------------


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hookean {hk.__version__}")
        raise typer.Exit


@app.callback(epilog=EXAMPLE)
def hookean(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Sample posteriors with parallel chains of stochastic-gradient MCMC."""


@app.command(epilog=COMMAND)
def sample(
    where: Annotated[
        str, typer.Argument(metavar="FILE.py:TARGET", help="A Python file, and the name of the hk.Target in it.")
    ],
    dynamics: Annotated[
        str, typer.Option(metavar="NAME(...)", help='How a chain moves: "SGHMC(step_size=0.01, friction=1)".')
    ],
    init: Annotated[
        str, typer.Option(metavar="NAME", help="Where to start, in the same file: a pytree, or a function of a key.")
    ] = "init",
    coupling: Annotated[
        str, typer.Option(metavar="NAME(...)", help='How chains act on each other: "Elastic(alpha=1, every=8)".')
    ] = "Independent",
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME(...)", help="What carries the run out; else chosen for the machine."),
    ] = None,
    chains: Annotated[int, typer.Option(metavar="K", help="Chains or workers.")] = 4,
    num_steps: Annotated[int, typer.Option(metavar="N", help="Steps of each chain, warm-up included.")] = 10_000,
    warmup: Annotated[int, typer.Option(metavar="N", help="Steps at the start of which nothing is kept.")] = 0,
    thin: Annotated[int, typer.Option(metavar="N", help="Keep every N-th state after the warm-up.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same draws.")] = 0,
    progress: Annotated[bool, typer.Option(help="Show progress, on stderr.")] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Save draws and statistics; else only the summary is shown.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the run in a folder while it goes on; it can be resumed.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Of the draws in DIR: float32 (default), bfloat16 or float64.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older run in DIR.")] = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Sample a target that a Python file defines, and print a summary.

    Settings are written as in Python, by position or by name: plain values, names of what FILE.py defines (a schedule
    of step sizes, say), and hold(), release() or cycle(1000) for a coupling's schedule. A learning rate may stand for
    the step: "SGHMC.from_learning_rate(0.1, momentum=0.9)". `hookean list` shows what there is.

    Ctrl-C stops at the next window, and a second one now. What --store keeps can then be resumed by `hookean resume`,
    watched by `hookean status`, and read by hk.load, also meanwhile.

    FILE.npz gets draws/NAME [chain, draw, ...] for each leaf of the parameters, stats/NAME [chain, draw], and steps,
    those after which the draws were kept.
    """
    path, name = _split(where)
    with _in_plain_words(show_traceback, path):
        if out is not None:
            _check_writable("--out", out, ".npz")
        if store is None and (dtype is not None or overwrite):
            option = "--dtype" if dtype is not None else "--overwrite"
            raise hk.ArgumentError(option, "is about a run on disk", "Give --store DIR too")
        defined = _load(path)
        target, start = _defined(path, defined, name, hk.Target), _defined(path, defined, init)

        def made(option: str, text: str, kind: type, known: Mapping[str, Any]) -> Any:
            return Notation(option, {**known, **_of_kind(defined, kind)}, defined, target).read(text)

        note = {"source": {"file": str(path.resolve()), "target": name, "init": init}}
        with _saving_what_is_left(out):
            run = hk.sample(
                target,
                start,
                dynamics=made("--dynamics", dynamics, hk.Dynamics, all_dynamics.ALL),
                coupling=made("--coupling", coupling, hk.Coupling, couplings.ALL),
                engine=None if engine is None else made("--engine", engine, hk.Engine, engines.ALL),
                chains=chains,
                num_steps=num_steps,
                warmup=warmup,
                thin=thin,
                seed=seed,
                progress=progress,
                store=None if store is None else hk.Store(store, dtype or "float32", overwrite, note=note),
            )
        if out is not None:
            _save(run, out)
            _say("note", f"{_how_many(run)} are in {out}")
        if store is not None:
            _say("note", f"{_how_many(run)} are in {store}")
        print(run.summary())


@app.command(epilog=STORED)
def resume(
    run: RunFolder,
    num_steps: Annotated[
        int | None, typer.Option(metavar="N", help="Make the run longer: steps of each chain, all in all.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Go on although the target is another one by now.")] = False,
    progress: Annotated[bool, typer.Option(help="Show progress, on stderr.")] = True,
    show_traceback: ShowTraceback = False,
) -> None:
    """Go on with a run on disk from its last checkpoint, and print a summary.

    After a crash, a kill or Ctrl-C, or to make a finished run longer. Draws are those of a run that was never
    interrupted, bit for bit; with the engine Threads none is lost or doubled, and the log of exchanges goes on.
    RUN knows the file that its target is in: resume only what you trust. A target that computes something else by now
    is refused, unless --force is given.
    """
    with _in_plain_words(show_traceback) as told:
        target = _target_of(run, "resume", told)
        made = hk.resume(run, target, num_steps=num_steps, force=force, progress=progress)
        _say("note", f"{_how_many(made)} are in {run}")
        print(made.summary())


@app.command(epilog=STORED)
def replay(
    run: RunFolder,
    force: Annotated[bool, typer.Option("--force", help="Compare although the target is another one by now.")] = False,
    progress: Annotated[bool, typer.Option(help="Show progress, on stderr.")] = True,
    show_traceback: ShowTraceback = False,
) -> None:
    """Carry out a run on disk again by its log of exchanges, and compare all draws.

    Nothing on disk changes. The exit code is 0 if all draws are the same (bit for bit on the same machine, within
    rounding on another one), and 1 if not; the first draw that differs is named.
    """
    with _in_plain_words(show_traceback) as told:
        target = _target_of(run, "replay", told)
        found = hk.replay(run, target, force=force, progress=progress)
        print(found)
        if not found.agrees:
            raise typer.Exit(1)


@app.command(epilog=STORED)
def status(
    run: RunFolder,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second while it is running.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one object; with --watch one a line.")] = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Show how a run on disk stands, also while another process is sampling it.

    Its state: running, stopped, finished, failed, or killed (it says that it is running, and no process has it).
    Steps and draws of each chain, steps per second, potential and temperature; and what its machinery did: exchanges,
    faults, bytes, seconds, and how old the copies of the centre were.
    """
    with _in_plain_words(show_traceback):
        stored = open_store(run)
        if as_json:
            for known in _looks(stored, watch):
                print(json.dumps(known, indent=None if watch else 1), flush=True)
            return
        console, looks = Console(highlight=False), _looks(stored, watch)
        if not (watch and console.is_terminal):
            for known in looks:
                console.print(standing.shown(known))
            return
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            for known in looks:
                live.update(standing.shown(known), refresh=True)


def _looks(stored: Any, watch: bool) -> Iterator[dict[str, Any]]:
    """How a run stands, now and again until it is no longer running."""
    while True:
        known = standing.facts(stored.refresh())
        yield known
        if not watch or known["state"] != "running":
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


@app.command("list")
def list_choices() -> None:
    """List what there is to choose from, with laws and settings."""
    console = Console(highlight=False)
    kinds: dict[str, dict[str, Any]] = {
        "dynamics": {**all_dynamics.ALL},
        "coupling": {**couplings.ALL},
        "engine": {**engines.ALL},
    }
    for option, known in kinds.items():
        table = Table.grid(padding=(0, 2, 0, 2))
        for name, kind in sorted(known.items()):
            about = kind.summary if issubclass(kind, hk.Engine) else kind.law
            table.add_row(Text(name, "bold"), Text(about))
            for call in (name, *(f"{name}.{way}" for way in _constructors(kind))):
                maker = getattr(kind, call.partition(".")[2], kind)
                table.add_row("", Text(f"{call}{_settings(maker)}", "dim"))
        console.print(Text(f"--{option}", "bold"))
        console.print(table)
        console.print()
    console.print(Text("inside the brackets", "bold"))
    table = Table.grid(padding=(0, 2, 0, 2))
    for name, maker in INSIDE.items():
        table.add_row(Text(f"{name}{_settings(maker)}", "dim"))
    console.print(table)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="Where to write the picture.")] = Path(
        "hookean-demo.png"
    ),
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed, other chains.")] = 0,
    show_traceback: ShowTraceback = False,
) -> None:
    """Compare coupled chains with others on a small neural network.

    A Bayesian neural network reads handwritten digits (those that come with scikit-learn): six elastic chains, six
    independent ones and one alone. Prints a table and what it says, and writes a picture. Takes about a minute.
    """
    with _in_plain_words(show_traceback):
        _check_writable("--out", out, ".png")
        from hookean import demo as demonstration  # here, for scikit-learn and Matplotlib take a second to import

        demonstration.show(demonstration.compare(seed=seed), out)


# -- what is written in an option --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Notation:
    """Reads `NAME`, `NAME(settings)` and `NAME.from_...(settings)`; a class that stands alone is called.

    `choices` are the names that may stand outside the brackets; inside, those of INSIDE and of the user's file may.
    """

    option: str
    choices: Mapping[str, Any]
    defined: Mapping[str, Any]
    target: Any

    def read(self, text: str) -> Any:
        """The object that `text` describes."""
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise self._unreadable(text) from error
        if not isinstance(node, ast.Name | ast.Call | ast.Attribute):
            raise self._unreadable(text)
        return self._made(node, self.choices)

    def _made(self, node: ast.Name | ast.Call | ast.Attribute, names: Mapping[str, Any]) -> Any:
        label = ast.unparse(node.func if isinstance(node, ast.Call) else node)
        match node.func if isinstance(node, ast.Call) else node:
            case ast.Name(id=name):
                thing = _find(self.option, name, names)
            case ast.Attribute(value=ast.Name(id=name), attr=way):
                owner = _find(self.option, name, names)
                thing = _find(f"{self.option}: {name}", way, {way: getattr(owner, way) for way in _constructors(owner)})
            case _:
                raise self._unreadable(ast.unparse(node))
        is_maker = isinstance(thing, type) or "." in label or any(thing is maker for maker in INSIDE.values())
        if isinstance(node, ast.Call) and not is_maker:
            raise hk.ArgumentError(self.option, f"{label!r} of the file is no class", "Leave its brackets out")
        if not isinstance(node, ast.Call):
            return self._call(thing, label, [], {}) if is_maker else thing
        if any(isinstance(entry, ast.Starred) for entry in node.args) or any(k.arg is None for k in node.keywords):
            raise self._unreadable(ast.unparse(node))
        named = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
        return self._call(thing, label, [self._value(entry) for entry in node.args], named)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name() | ast.Call():
                return self._made(node, {**INSIDE, **self.defined})
            case ast.List(elts=entries):
                return [self._value(entry) for entry in entries]
            case ast.Tuple(elts=entries):
                return tuple(self._value(entry) for entry in entries)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return dict(zip([self._value(key) for key in keys if key], map(self._value, values), strict=True))
        try:
            return ast.literal_eval(node)
        except ValueError as error:
            raise hk.ArgumentError(
                self.option,
                f"{ast.unparse(node)} is not a plain value",
                f"Give a number, a quoted word, a name that the file defines, or one of {_listed(INSIDE)}",
            ) from error

    def _call(self, maker: Callable[..., Any], label: str, positional: list[Any], named: dict[str, Any]) -> Any:
        if "target" in inspect.signature(maker).parameters:
            named = {"target": self.target, **named}
        try:
            inspect.signature(maker).bind(*positional, **named)
            return maker(*positional, **named)
        except TypeError as error:
            hint = f"Its settings are {label}{_settings(maker)}"
            raise hk.ArgumentError(f"{self.option}: {label}", str(error), hint) from error

    def _unreadable(self, text: str) -> hk.ArgumentError:
        hint = f'Write NAME or "NAME(setting=value)", NAME one of {_listed(self.choices)}'
        return hk.ArgumentError(self.option, f"cannot be read: {text}", hint)


def _find(where: str, name: str, choices: Mapping[str, Any]) -> Any:
    """The choice of this name, in upper or lower case where that leaves no doubt."""
    if name in choices:
        return choices[name]
    alike = [choice for choice in choices if choice.lower() == name.lower()]
    if len(alike) == 1:
        return choices[alike[0]]
    lowered = difflib.get_close_matches(name.lower(), [choice.lower() for choice in choices])
    close = alike or [choice for choice in choices if choice.lower() in lowered]
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    raise hk.ArgumentError(where, f"knows no {name!r}", f"{hint}There is {_listed(choices) or 'none'}")


def _listed(choices: Mapping[str, Any]) -> str:
    return ", ".join(sorted(choices))


def _constructors(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("from_")]


class _Word(str):
    """Shown without quotes."""

    __repr__ = str.__str__


def _settings(maker: Callable[..., Any]) -> str:
    """The signature as a person would write it."""

    def shown(default: Any) -> Any:
        if isinstance(default, hk.CouplingSchedule):
            return _Word(f"{default.kind}()")
        return _Word("Scenario()") if isinstance(default, hk.Scenario) else default

    parameters = inspect.signature(maker).parameters.values()
    return str(
        inspect.Signature(
            [p.replace(annotation=p.empty, default=shown(p.default)) for p in parameters if p.name != "target"]
        )
    )


# -- the user's file ---------------------------------------------------------------------------------------------------


def _split(where: str) -> tuple[Path, str]:
    """Path and name; a colon that is followed by no name belongs to the path."""
    path, colon, name = where.rpartition(":")
    return (Path(path), name) if colon and name.isidentifier() else (Path(where), "target")


def _load(path: Path) -> dict[str, Any]:
    """What the file defines. Its folder is searched for imports first, as if the file were run."""
    if not path.is_file():
        raise hk.ArgumentError(str(path), "no such file", "Give a Python file that defines a target and an init")
    spec = importlib.util.spec_from_file_location(USER_MODULE, path)
    if spec is None or spec.loader is None:
        raise hk.ArgumentError(str(path), "is not a Python file", "Its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[USER_MODULE] = module  # where dataclasses look for the file they are defined in
    # A run on disk keeps what the file defined of its settings, for the file may change.
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the file prints is not the command's data
            spec.loader.exec_module(module)
    except SystemExit as error:
        raise hk.ArgumentError(
            str(path), "ends Python when it is imported", 'Put what it runs under `if __name__ == "__main__":`'
        ) from error
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("__") and not isinstance(value, ModuleType)
    }


def _target_of(run: Path, command: str, told: _Told) -> hk.Target:
    """The target of a run that was started from the command line, from its file."""
    source = open_store(run).description.get("note", {}).get("source")
    if source is None:
        raise hk.ArgumentError(
            str(run),
            "was made by a script, and only that knows its target",
            f"Go on there, with hk.{command}({str(run)!r}, target)",
        )
    path = Path(source["file"])
    if not path.is_file():
        raise hk.ArgumentError(
            str(path),
            f"is no longer there, and {run} has its target from it",
            f"Put it back, or use hk.{command}({str(run)!r}, target) in a script",
        )
    told.file = path
    target: hk.Target = _defined(path, _load(path), source["target"], hk.Target)
    return target


def _defined(path: Path, defined: dict[str, Any], name: str, kind: type | None = None) -> Any:
    """What the file has under this name: an hk.Target where that is the `kind` asked for, else a start."""
    if name in defined and isinstance(defined[name], kind or object):
        return defined[name]
    if kind is hk.Target:
        there = [known for known, value in defined.items() if isinstance(value, kind)]
        hint = f"Its targets: {', '.join(there)}" if there else "Define an hk.Target there"
    else:
        close = difflib.get_close_matches(name, defined)
        hint = f"It defines {' and '.join(close)}" if close else f"Define {name} there"
        hint += ", or name another with --init: a pytree of parameters, or a function key -> pytree"
    if name in defined:
        raise hk.ArgumentError(str(path), f"has a {type(defined[name]).__name__} as {name!r}, not a Target", hint)
    raise hk.ArgumentError(str(path), f"defines no {name!r}", hint)


def _of_kind(defined: dict[str, Any], kind: type) -> dict[str, Any]:
    """Objects and classes of a kind that the file defines."""
    return {
        name: value
        for name, value in defined.items()
        if isinstance(value, kind)
        or (isinstance(value, type) and issubclass(value, kind) and not inspect.isabstract(value))
    }


# -- what comes out ----------------------------------------------------------------------------------------------------


def _check_writable(option: str, path: Path, suffix: str) -> None:
    """Refuse beforehand what could not be written after a long run."""
    if path.suffix != suffix:
        raise hk.ArgumentError(option, f"is {path}", f"Give a name that ends in {suffix}")
    if path.is_dir() or not path.parent.is_dir():
        raise hk.ArgumentError(option, f"cannot be written: {path}", "Give a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise hk.ArgumentError(option, f"may not be written: {path}", "Give a file in a folder of your own")


def _save(run: hk.Run, path: Path) -> None:
    arrays = dict(zip(leaf_names(run.draws), map(np.asarray, jax.tree.leaves(run.draws)), strict=True))
    # NumPy's files know no bfloat16.
    arrays = {name: a.astype(np.float32) if a.dtype.kind == "V" else a for name, a in arrays.items()}
    stats = {name: np.asarray(values) for name, values in run.stats.items()}
    kept = next(iter(stats.values())).shape[1]
    with path.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            steps=run.kept_steps[:kept],
            **{f"draws/{name}": array for name, array in arrays.items()},
            **{f"stats/{name}": array for name, array in stats.items()},
        )


def _how_many(run: hk.Run) -> str:
    sampled, kept = run.stats["potential"].shape
    return f"{sampled} x {kept:,} draws"


def _say(kind: str, text: str) -> None:
    """A line on stderr."""
    style = {"error": "bold red", "warning": "yellow"}.get(kind, "dim")
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text.assemble((f"{kind}: ", style), text))


@contextlib.contextmanager
def _saving_what_is_left(out: Path | None) -> Iterator[None]:
    """Draws of a run that diverged or was interrupted are saved as well."""
    try:
        yield
    except (hk.DivergenceError, hk.Interrupted) as error:
        if out is not None and isinstance(error.run, hk.Run):
            _save(error.run, out)
            _say("note", f"{_how_many(error.run)} kept until then are in {out}")
        raise


@dataclasses.dataclass
class _Told:
    """Whose errors are told with their line."""

    file: Path | None


@contextlib.contextmanager
def _in_plain_words(show_traceback: bool, file: Path | None = None) -> Iterator[_Told]:
    """Warnings as one line each; any error, and Ctrl-C, as one message and an exit code."""
    told = _Told(file)
    with warnings.catch_warnings():
        standard = warnings.showwarning

        def show(message: Any, category: Any, *where: Any, **others: Any) -> None:
            if issubclass(category, hk.HookeanWarning):
                _say("warning", str(message))
            else:
                standard(message, category, *where, **others)

        warnings.showwarning = show
        warnings.simplefilter("always", hk.HookeanWarning)
        try:
            yield told
        except typer.Exit:
            raise
        except KeyboardInterrupt as error:
            _say("interrupted", str(error) or "stopped at once")
            raise typer.Exit(INTERRUPTED) from error
        except Exception as error:
            if show_traceback:
                traceback.print_exception(error)
            message, code = _explained(error, told.file)
            _say("error", message)
            raise typer.Exit(code) from error


def _explained(error: Exception, file: Path | None) -> tuple[str, int]:
    """Message and exit code."""
    if isinstance(error, hk.DivergenceError):
        return str(error), 1
    if isinstance(error, hk.HookeanError):
        return str(error), 2
    what = f"{type(error).__name__}: {error}"
    if file is not None:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if _same(frame.filename, file)]
        if isinstance(error, SyntaxError) and _same(error.filename or "", file):
            lines, what = [error.lineno], f"{type(error).__name__}: {error.msg}"
        if lines:
            return f"{file}, line {lines[-1]}: {what}. Mend the file; --traceback shows more.", 2
    return f"{what}. This was not foreseen; --traceback shows where it happened.", 1


def _same(name: str, file: Path) -> bool:
    return os.path.abspath(name) == os.path.abspath(file)
