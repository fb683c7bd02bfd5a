"""Figure 1: the first 100 steps of two SGHMC chains and of four elastic ones on a two-dimensional Gaussian.

The settings are the paper's: alpha = 1, eps = 0.01, C = V = M = I, explicit steps, chains and centre at once. What the
paper does not show are the laws that these systems have, here as ellipses: exact for this step size, out of the
discrete Lyapunov equation of the very code that runs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import hookean as hk
from hookean.experiments.keep import keep_store
from hookean.experiments.report import COLOURS, Report, Row, plot_style, said, table
from hookean.testing import linear_system

TITLE = "Two SGHMC chains and four elastic ones on a Gaussian"
COVARIANCE = np.array([[1.0, 0.6], [0.6, 0.8]])
START = np.array([-2.4, 2.6])
STEP_SIZE, ALPHA, FRICTION = 0.01, 1.0, 1.0
CHAIN_COLOURS = [COLOURS[name] for name in ("blue", "orange", "green", "pink")]
SHARES = (0.5, 0.95)
FRAME_STEPS, FRAMES_A_SECOND = 2, 15

DYNAMICS = hk.SGHMC(STEP_SIZE, FRICTION, integrator="explicit")
SYSTEMS: dict[str, tuple[hk.Coupling, int]] = {
    "SGHMC": (hk.Independent(), 2),
    "elastic, as derived": (hk.Elastic(ALPHA, simultaneous=True), 4),
    "elastic, as printed": (hk.ElasticAsPrinted(ALPHA), 4),
}
TITLES = {
    "SGHMC": "two SGHMC chains",
    "elastic, as derived": "four elastic chains, as derived",
    "elastic, as printed": "four elastic chains, Eq. 6 as printed",
}
LAWS = {
    "the posterior": (COLOURS["grey"], "--"),
    "SGHMC": (COLOURS["blue"], "-"),
    "elastic, as derived": (COLOURS["green"], "-"),
    "elastic, as printed": (COLOURS["orange"], "-"),
}


def measure(report: Report) -> None:
    """Paths, and the laws of all systems."""
    steps, seed = int(report.settings["steps"]), int(report.settings["seed"])
    precision = jnp.asarray(np.linalg.inv(COVARIANCE), jnp.float32)
    target = hk.Target.from_log_density(lambda x: -x @ precision @ x / 2)
    for name, (coupling, chains) in SYSTEMS.items():
        run = hk.sample(
            target,
            jnp.asarray(START, jnp.float32),
            dynamics=DYNAMICS,
            coupling=coupling,
            chains=chains,
            num_steps=steps,
            seed=seed,
            progress=False,
        )
        for chain, path in enumerate(np.asarray(run.draws)):
            points = enumerate([START, *path])
            report.append(
                "paths",
                [{"system": name, "chain": chain, "step": s, "x": float(x), "y": float(y)} for s, (x, y) in points],
            )
    report.append("laws", [_law_row("the posterior", COVARIANCE, 0.0)])
    report.append("laws", [_law(name, *system) for name, system in SYSTEMS.items()])
    coupling, chains = SYSTEMS["elastic, as derived"]
    start = jnp.asarray(START, jnp.float32)
    keep_store(report, target, start, dynamics=DYNAMICS, coupling=coupling, chains=chains, num_steps=steps, seed=seed)


def _law(name: str, coupling: hk.Coupling, chains: int) -> Row:
    """Covariance of one chain in equilibrium; each principal direction of the Gaussian is a problem of its own."""
    variances, directions = np.linalg.eigh(COVARIANCE)
    found = [linear_system(DYNAMICS, coupling, 1 / variance, chains).stationary() for variance in variances]
    covariance = directions @ np.diag([matrix[0, 0] for matrix in found]) @ directions.T
    between = directions @ np.diag([matrix[0, 1] for matrix in found]) @ directions.T
    return _law_row(name, covariance, between[0, 0] / covariance[0, 0])


def _law_row(name: str, covariance: np.ndarray, correlation: float) -> Row:
    return {
        "system": name,
        "var x": float(covariance[0, 0]),
        "cov xy": float(covariance[0, 1]),
        "var y": float(covariance[1, 1]),
        "correlation of two chains in x": float(correlation),
    }


def draw(report: Report) -> None:
    """Figure 1 with the laws, its animation, and the page."""
    plt = plot_style()
    paths, laws = report.rows("paths"), report.rows("laws")
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.3), sharex=True, sharey=True, layout="constrained")
    for panel, name in zip(axes, SYSTEMS, strict=False):
        _frame(panel, TITLES[name])
        _ellipses(panel, laws, "the posterior", linewidth=1)
        for colour, path in zip(CHAIN_COLOURS, _by_chain(paths, name), strict=False):
            panel.plot(*path.T, color=colour, linewidth=1.2, marker="o", markersize=1.6)
        panel.plot(*START, marker="s", color=COLOURS["black"], markersize=6)
    _frame(axes[3], "exact laws of one chain")
    for name in LAWS:
        _ellipses(axes[3], laws, name, linewidth=1.6)
    axes[3].legend(loc="lower right", fontsize=8, title="50 % and 95 % of", title_fontsize=8, alignment="left")
    report.figure(
        "figure1",
        figure,
        f"The first {max(int(row['step']) for row in paths)} steps from one start (square), eps = {STEP_SIZE:g}, "
        f"alpha = {ALPHA:g}, C = V = 1; dashed: 50 % and 95 % of the posterior. Right: the law that one chain of each "
        "system has in the end, exactly.",
    )
    plt.close(figure)
    if report.settings.get("animation", True):
        _animate(report, plt, paths, laws)
    report.page(
        TITLE,
        "Figure 1 of Springenberg, Klein, Falkner and Hutter 2016, with the laws that it leaves out.",
        [report.shown("figure1"), table("Laws of one chain", laws, CAPTION), said("What it says", findings(laws))],
    )


CAPTION = (
    "Exact stationary covariances of the code that drew the paths, for its step, by the discrete Lyapunov equation."
)


def findings(laws: list[Row]) -> list[str]:
    """In words, from the numbers."""
    by_name = {row["system"]: row for row in laws}
    wanted = by_name["the posterior"]["var x"]
    return [
        f"{name}: the variance of one chain in x is {100 * by_name[name]['var x'] / wanted:.1f} % of the posterior's."
        for name in SYSTEMS
    ] + [
        "As derived from the Hamiltonian, springs make the law narrower by a known amount. As printed (Eq. 6, noise of "
        "variance 2 eps^2 (V + C)) the system samples at a temperature of about eps (V + C)/V and its law is almost a "
        "point; its chains stay near each other for lack of noise, not by the springs alone."
    ]


def _by_chain(paths: list[Row], name: str) -> list[np.ndarray]:
    rows = [row for row in paths if row["system"] == name]
    chains = sorted({int(row["chain"]) for row in rows})
    return [np.array([(row["x"], row["y"]) for row in rows if row["chain"] == chain], float) for chain in chains]


def _frame(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=11)
    panel.set_aspect("equal")
    panel.set(xlim=(-3.3, 3.3), ylim=(-3.0, 3.4), xticks=range(-3, 4), yticks=range(-2, 4))


def _ellipses(panel: Any, laws: list[Row], name: str, linewidth: float) -> None:
    (law,) = (row for row in laws if row["system"] == name)
    root = np.linalg.cholesky([[law["var x"], law["cov xy"]], [law["cov xy"], law["var y"]]])
    angles = np.linspace(0, 2 * np.pi, 200)
    colour, style = LAWS[name]
    for share in SHARES:
        points = np.sqrt(-2 * np.log(1 - share)) * root @ np.stack([np.cos(angles), np.sin(angles)])
        label = name if share == SHARES[0] else None
        panel.plot(*points, color=colour, linestyle=style, linewidth=linewidth, label=label, zorder=3)


def _animate(report: Report, plt: Any, paths: list[Row], laws: list[Row]) -> None:
    """The same paths as they grow: a GIF, and an MP4 where there is an encoder."""
    from matplotlib.animation import FFMpegWriter, FuncAnimation, PillowWriter

    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.9), dpi=80, layout="constrained")
    lines = []
    for panel, name in zip(axes, SYSTEMS, strict=True):
        _frame(panel, TITLES[name])
        _ellipses(panel, laws, "the posterior", linewidth=1)
        panel.plot(*START, marker="s", color=COLOURS["black"], markersize=5)
        for colour, path in zip(CHAIN_COLOURS, _by_chain(paths, name), strict=False):
            (line,) = panel.plot([], [], color=colour, linewidth=1.2)
            (head,) = panel.plot([], [], color=colour, marker="o", markersize=5)
            lines.append((line, head, path))
    last = max(int(row["step"]) for row in paths)
    when = figure.suptitle("")

    def show(step: int) -> list[Any]:
        when.set_text(f"step {step}")
        for line, head, path in lines:
            line.set_data(*path[: step + 1].T)
            head.set_data(*path[step : step + 1].T)
        return []

    frames = [*range(0, last + 1, FRAME_STEPS), *[last] * FRAMES_A_SECOND]
    animation = FuncAnimation(figure, show, frames=frames)
    animation.save(report.folder / "figure1.gif", writer=PillowWriter(FRAMES_A_SECOND))
    if FFMpegWriter.isAvailable():
        animation.save(report.folder / "figure1.mp4", writer=FFMpegWriter(FRAMES_A_SECOND))
    plt.close(figure)
