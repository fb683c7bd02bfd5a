"""`hookean reproduce`: one command for each experiment."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from hookean.experiments import cifar10, mnist, staleness, toy, uci
from hookean.experiments.classification import Clock
from hookean.experiments.report import Report
from hookean.types import DivergenceError, HookeanError, HookeanWarning

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run the paper's experiments again, and some that it leaves open.",
    epilog="Each writes a folder: config.json, tables as CSV, figures as PNG and SVG, and index.html, a page to open.",
)

Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where to write; reproduced/NAME unless given.", show_default=False)
]
DataDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A folder with the data sets; else they are downloaded once.", show_default=False),
]
Quick = Annotated[bool, typer.Option("--quick", help="A reduced version, for minutes on a processor.")]
Seeds = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Repetitions that intervals are over.", show_default=False)
]
Steps = Annotated[int | None, typer.Option(metavar="N", min=8, help="Steps of each chain.", show_default=False)]
Chains = Annotated[int | None, typer.Option(metavar="K", min=2, help="Chains or workers.", show_default=False)]
Every = Annotated[
    str | None, typer.Option(metavar="S,S,...", help="Steps between two exchanges, e.g. 1,8.", show_default=False)
]
Minutes = Annotated[
    float | None, typer.Option(metavar="N", help="Begin nothing new after so many minutes.", show_default=False)
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on in a folder: what it has is not measured again.")]
Archive = Annotated[bool, typer.Option("--archive", help="Pack the folder into one DIR.tar.gz, too.")]
Store = Annotated[bool, typer.Option("--store/--no-store", help="Keep the store of one run.")]
Only = Annotated[str | None, typer.Option(metavar="NAME,...", help="Only these methods or sets.", show_default=False)]
ShowTraceback = Annotated[bool, typer.Option("--traceback", help="With an error, show where it came from.")]


@app.command("toy")
def toy_command(
    out: Out = None,
    steps: Steps = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed, other paths.")] = 0,
    animation: Annotated[bool, typer.Option(help="Make the GIF (and MP4, where ffmpeg is there).")] = True,
    store: Store = True,
    quick: Quick = False,
    archive: Archive = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Figure 1: chains on a two-dimensional Gaussian, and the laws that they have. Takes seconds."""
    settings = {"steps": steps or 100, "seed": seed, "animation": animation, "store": store, "quick": quick}
    with _in_plain_words(show_traceback):
        _carry_out("toy", out, settings, lambda report, clock: toy.measure(report), toy.draw, archive)


@app.command("mnist")
def mnist_command(
    out: Out = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    seeds: Seeds = None,
    steps: Steps = None,
    every: Every = None,
    chains: Chains = None,
    only: Only = None,
    minutes: Minutes = None,
    resume: Resume = False,
    store: Store = True,
    archive: Archive = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Figure 2, left: learning curves on MNIST, each method at its own tuned step."""
    full: dict[str, Any] = {
        "examples": 60_000,
        "tests": 10_000,
        "hidden": 800,
        "batch_size": 100,
        "steps": 2000,
        "chains": 6,
    }
    full |= {"seeds": 5, "clock_seeds": 5, "every": [1, 2, 4, 8, 16], "looks": 50}
    full |= {"sweep_seeds": 1, "sweep_steps": 2000, "rounds": 2, "grid": "full", "scale": 1.0}
    small: dict[str, Any] = {"examples": 6000, "tests": 1000, "hidden": 50, "batch_size": 50, "steps": 400, "chains": 4}
    small |= {"seeds": 3, "clock_seeds": 2, "every": [1, 8], "looks": 25}
    small |= {"sweep_seeds": 1, "sweep_steps": 400, "rounds": 1, "grid": "small", "scale": 2.0}
    settings = {**(small if quick else full), "quick": quick, "data_dir": data_dir, "methods": _names(only)}
    settings |= {"store": store} | _given(seeds=seeds, steps=steps, chains=chains, every=_numbers("--every", every))
    settings["clock_seeds"] = min(settings["clock_seeds"], settings["seeds"])
    with _in_plain_words(show_traceback):
        _carry_out(
            "mnist",
            out,
            settings,
            lambda report, clock: mnist.measure(report, clock, _say),
            mnist.draw,
            archive,
            minutes,
            resume,
        )


@app.command("cifar10")
def cifar10_command(
    out: Out = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    seeds: Seeds = None,
    steps: Steps = None,
    every: Every = None,
    chains: Chains = None,
    only: Only = None,
    minutes: Minutes = None,
    resume: Resume = False,
    archive: Archive = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Figure 2, right: a residual network on CIFAR-10. The full version wants an accelerator."""
    full: dict[str, Any] = {
        "examples": 50_000,
        "tests": 10_000,
        "blocks": 5,
        "shrink": 1,
        "batch_size": 100,
        "steps": 3000,
    }
    full |= {"chains": 6, "seeds": 2, "every": [8], "looks": 20}
    full |= {"sweep_seeds": 1, "sweep_steps": 600, "rounds": 1, "grid": "small", "scale": 1.0}
    small: dict[str, Any] = {"examples": 3000, "tests": 200, "blocks": 1, "shrink": 4, "batch_size": 20, "steps": 120}
    small |= {"chains": 3, "seeds": 2, "every": [8], "looks": 8}
    small |= {"sweep_seeds": 1, "sweep_steps": 120, "rounds": 1, "grid": "small", "scale": 1.0}
    settings = {**(small if quick else full), "quick": quick, "data_dir": data_dir, "methods": _names(only)}
    settings |= _given(seeds=seeds, steps=steps, chains=chains, every=_numbers("--every", every))
    with _in_plain_words(show_traceback):
        _carry_out(
            "cifar10", out, settings, lambda r, c: cifar10.measure(r, c, _say), cifar10.draw, archive, minutes, resume
        )


@app.command("uci")
def uci_command(
    out: Out = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    seeds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="At most so many of the standard splits.", show_default=False)
    ] = None,
    steps: Steps = None,
    chains: Chains = None,
    only: Only = None,
    minutes: Minutes = None,
    resume: Resume = False,
    store: Store = True,
    archive: Archive = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Regression on the UCI sets with their standard splits, beside published figures."""
    full: dict[str, Any] = {"steps": 20_000, "seeds": 20, "chains": 4, "batch_size": 100, "sweep_share": 0.5}
    small: dict[str, Any] = {"steps": 3000, "seeds": 3, "chains": 2, "batch_size": 100, "sweep_share": 0.5}
    settings = {**(small if quick else full), "quick": quick, "data_dir": data_dir, "store": store}
    settings["methods"] = _names(only) or (["yacht", "bostonHousing"] if quick else [])
    settings |= _given(seeds=seeds, steps=steps, chains=chains)
    with _in_plain_words(show_traceback):
        _carry_out("uci", out, settings, lambda r, c: uci.measure(r, c, _say), uci.draw, archive, minutes, resume)


@app.command("staleness")
def staleness_command(
    out: Out = None,
    data_dir: DataDir = None,
    quick: Quick = False,
    seeds: Seeds = None,
    steps: Steps = None,
    chains: Chains = None,
    only: Only = None,
    minutes: Minutes = None,
    resume: Resume = False,
    store: Store = True,
    archive: Archive = False,
    show_traceback: ShowTraceback = False,
) -> None:
    """Bias and speed over s, K, alpha, O and the step, exactly and on posteriors with reference draws."""
    full: dict[str, Any] = {"steps": 16_000, "seeds": 10, "chains": 4, "step": 0.5}
    small: dict[str, Any] = {"steps": 1600, "seeds": 3, "chains": 4, "step": 0.5}
    settings = {**(small if quick else full), "quick": quick, "data_dir": data_dir, "store": store}
    settings["methods"] = _names(only) or (["sblri-blr"] if quick else [])
    settings |= _given(seeds=seeds, steps=steps, chains=chains)
    with _in_plain_words(show_traceback):
        _carry_out(
            "staleness",
            out,
            settings,
            lambda r, c: staleness.measure(r, c, _say),
            staleness.draw,
            archive,
            minutes,
            resume,
        )


@app.command("all")
def all_command(
    out: Annotated[Path, typer.Option(metavar="DIR", help="One folder for each experiment goes there.")] = Path(
        "reproduced"
    ),
    data_dir: DataDir = None,
    quick: Quick = False,
    store: Store = True,
    show_traceback: ShowTraceback = False,
) -> None:
    """All of them, one after the other. With --quick that is a quarter of an hour on two cores."""
    same: dict[str, Any] = {"quick": quick, "show_traceback": show_traceback}
    toy_command(out / "toy", store=store, **same)
    staleness_command(out / "staleness", data_dir, store=store, **same)
    mnist_command(out / "mnist", data_dir, store=store, **same)
    cifar10_command(out / "cifar10", data_dir, **same)
    uci_command(out / "uci", data_dir, store=store, **same)


DRAW: dict[str, Callable[[Report], None]] = {
    "toy": toy.draw,
    "mnist": mnist.draw,
    "cifar10": cifar10.draw,
    "uci": uci.draw,
    "staleness": staleness.draw,
}


@app.command("draw")
def draw_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What an experiment wrote.")],
    show_traceback: ShowTraceback = False,
) -> None:
    """Make figures and the page again, from the tables in a folder."""
    with _in_plain_words(show_traceback):
        report = Report.open(folder)
        DRAW[report.config["experiment"]](report)
        print(folder / "index.html")


# -- what all commands share -------------------------------------------------------------------------------------------


def _carry_out(
    name: str,
    out: Path | None,
    settings: dict[str, Any],
    measure: Callable[[Report, Clock], None],
    draw: Callable[[Report], None],
    archive: bool = False,
    minutes: float | None = None,
    resume: bool = False,
) -> Path:
    """Measure, draw, and say where it is."""
    began = time.monotonic()
    folder = Path("reproduced") / name if out is None else out
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    report = Report.make(folder, name, plain, resume=resume)
    measure(report, Clock(minutes))
    draw(report)
    _say(f"{name}: {time.monotonic() - began:.0f} s")
    print(folder / "index.html")
    if archive:
        print(report.archive())
    return folder


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _names(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",")]


def _numbers(option: str, text: str | None) -> list[int] | None:
    try:
        found = None if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        found = [0]
    if found is not None and min(found) < 1:
        raise typer.BadParameter(f"{option} is {text!r}. Give whole numbers from 1 on, with commas between them.")
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _in_plain_words(show_traceback: bool) -> Iterator[None]:
    """Warnings of the library as one line each; an error as one message and an exit code."""
    with warnings.catch_warnings():
        standard = warnings.showwarning

        def show(message: Any, category: Any, *where: Any, **others: Any) -> None:
            if issubclass(category, HookeanWarning):
                _say(f"warning: {message}")
            else:
                standard(message, category, *where, **others)

        warnings.showwarning = show
        try:
            yield
        except HookeanError as error:
            if show_traceback:
                traceback.print_exception(error)
            _say(f"error: {error}")
            raise typer.Exit(1 if isinstance(error, DivergenceError) else 2) from error
