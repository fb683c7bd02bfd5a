"""What staleness and springs cost, and what they give: what the paper leaves open.

Exactly, on a Gaussian of curvature 1: bias of the variance and speed to stationarity over s, K, alpha, O and the step.
By sampling, on posteriors with reference draws (posteriordb, Magnusson et al. 2024): springs that are held, let go, or
alternate, against independent chains, all with the same number of gradients.
"""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import hookean as hk
from hookean.datasets import DataError
from hookean.experiments import exact
from hookean.experiments.classification import SEED, Clock, Say
from hookean.experiments.follow import Follower
from hookean.experiments.keep import keep_store
from hookean.experiments.report import COLOURS, Report, Row, interval, plot_style, said, table
from hookean.preparation import prepare

TITLE = "What staleness and springs cost"
FRICTION = 1.0
EVERY, ALPHAS, CHAINS, STEPS = (1, 2, 4, 8, 16), (0.3, 1.0, 3.0, 10.0, 30.0), (2, 4, 8, 16), (0.03, 0.1, 0.3)
BASE_CHAINS, BASE_STEP = 4, 0.1
POSTERIORS = ("sblri-blr", "mesquite-mesquite", "kidiq-kidscore_momiq", "kidiq-kidscore_interaction")
START_SD = 5.0
"""Chains start so many posterior standard deviations away from the mean, in random directions."""


# -- exactly -----------------------------------------------------------------------------------------------------------


def exact_rows() -> list[Row]:
    """Bias and relaxation on N(0, 1), for all combinations."""
    rows = []
    for step in STEPS:
        dynamics = hk.SGHMC(step, FRICTION)
        rows.append(_exact_row("independent", step, 1, 1, "", "", exact.independent(dynamics, 1.0)))
        for chains, every, alpha in itertools.product(CHAINS, EVERY, ALPHAS):
            law = exact.elastic(dynamics, 1.0, chains, alpha, every)
            rows.append(_exact_row("elastic", step, chains, every, alpha, "", law))
        for chains, every in itertools.product(CHAINS, EVERY):
            for wait_for in sorted({1, chains // 2, chains}):
                law = exact.stale_gradient(dynamics, 1.0, chains, every, wait_for)
                rows.append(_exact_row("stale gradient", step, chains, every, "", wait_for, law))
    return rows


def _exact_row(scheme: str, step: float, chains: int, every: int, alpha: Any, wait_for: Any, law: exact.Law) -> Row:
    return {
        "scheme": scheme,
        "step": step,
        "K": chains,
        "s": every,
        "alpha": alpha,
        "O": wait_for,
        "variance": law.variance,
        "correlation": law.correlation,
        "relaxation": law.relaxation,
    }


# -- posteriordb -------------------------------------------------------------------------------------------------------


class Posterior(NamedTuple):
    """A density of w, where u = mean + sd w are the unconstrained parameters; the reference has mean 0, sd 1 in w."""

    log_density: Callable[[jax.Array], jax.Array]
    size: int


def load_posterior(name: str, data_dir: Path) -> Posterior:
    """A linear regression of posteriordb: response ~ N(X beta, sigma), u = (beta, log sigma)."""
    folder = data_dir / "posteriordb"
    paths = folder / f"{name}.npz", folder / f"{name.split('-')[0]}.json"
    for path in paths:
        if not path.is_file():
            raise DataError(path, "there is no such file", "--data-dir names a folder that holds posteriordb/")
    with np.load(paths[0]) as file:
        draws = file["draws"].reshape(-1, file["draws"].shape[-1])
    data = {key: np.asarray(value, float) for key, value in json.loads(paths[1].read_text(encoding="utf-8")).items()}
    response, columns, log_prior = _REGRESSIONS[name](data)
    design = np.stack([np.broadcast_to(column, response.shape) for column in columns], 1).astype(float)
    reference = np.column_stack([draws[:, :-1], np.log(draws[:, -1])])
    mean, sd = reference.mean(0), reference.std(0, ddof=1)
    # About the reference's mean, and in its units, so that single precision is enough.
    residual = (response - design @ mean[:-1]) / np.exp(mean[-1])
    slopes = design * sd[:-1] / np.exp(mean[-1])
    constants = [jnp.asarray(part, jnp.float32) for part in (residual, slopes, mean, sd)]

    def log_density(w: jax.Array) -> jax.Array:
        r, X, middle, width = constants
        u = middle + width * w
        error = r - jnp.matmul(X, w[:-1], precision="highest")
        log_ratio = width[-1] * w[-1]
        likelihood = -len(response) * log_ratio - jnp.sum(error**2) * jnp.exp(-2 * log_ratio) / 2
        return likelihood + log_prior(u[:-1], jnp.exp(u[-1])) + u[-1]

    return Posterior(log_density, reference.shape[1])


def _half_cauchy(beta: jax.Array, sigma: jax.Array) -> jax.Array:
    return -jnp.log1p((sigma / 2.5) ** 2)


def _normal_10(beta: jax.Array, sigma: jax.Array) -> jax.Array:
    return -(jnp.sum(beta**2) + sigma**2) / 200


def _flat(beta: jax.Array, sigma: jax.Array) -> jax.Array:
    return jnp.zeros(())


MESQUITE = ("diam1", "diam2", "canopy_height", "total_height", "density", "group")
_REGRESSIONS: dict[str, Callable[[dict[str, np.ndarray]], tuple[np.ndarray, list[Any], Any]]] = {
    "sblri-blr": lambda d: (d["y"], list(d["X"].T), _normal_10),
    "mesquite-mesquite": lambda d: (d["weight"], [1, *(d[key] for key in MESQUITE)], _flat),
    "kidiq-kidscore_momiq": lambda d: (d["kid_score"], [1, d["mom_iq"]], _half_cauchy),
    "kidiq-kidscore_interaction": lambda d: (
        d["kid_score"],
        [1, d["mom_hs"], d["mom_iq"], d["mom_hs"] * d["mom_iq"]],
        _half_cauchy,
    ),
}


class Contest(NamedTuple):
    """A way of spending the same gradients."""

    name: str
    every: int
    alpha: float


def contests(quick: bool) -> list[Contest]:
    """Independent chains, and springs of several strengths under each schedule."""
    found = [Contest("independent", 1, 0.0)]
    for name, every, alpha in itertools.product(("hold", "release", "cycle"), (1, 8), (1.0, 10.0, 100.0)):
        if not quick or (every == 8 and alpha == 10.0):
            found.append(Contest(name, every, alpha))
    return found


def _schedule(name: str, num_steps: int) -> hk.CouplingSchedule:
    return {"hold": hk.hold(), "release": hk.release()}.get(name) or hk.cycle(num_steps // 8)


def _sampled(report: Report, name: str, posterior: Posterior, contest: Contest, step_size: float) -> list[Row]:
    """Errors of mean and standard deviation, in the reference's standard deviations, for each seed."""
    settings = report.settings
    chains, num_steps, seeds = (int(settings[key]) for key in ("chains", "steps", "seeds"))
    coupling: hk.Coupling = hk.Independent()
    if contest.name != "independent":
        coupling = hk.Elastic(contest.alpha, contest.every, schedule=_schedule(contest.name, num_steps))
    target = hk.Target.from_log_density(posterior.log_density)

    def init(key: jax.Array) -> jax.Array:
        direction = jax.random.normal(key, (posterior.size,))
        return START_SD * direction / jnp.linalg.norm(direction)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hk.HookeanWarning)
        dynamics = hk.SGHMC(step_size, FRICTION)
        job = prepare(target, init, dynamics, coupling, chains, num_steps, num_steps // 4, 8, hk.Vectorised(), 0)
    found = Follower(job, init, lambda w, _: w, [int(step) for step in job.kept_steps])(range(SEED, SEED + seeds))
    draws = found.seen  # [draw, run, chain, parameter]
    rows = []
    for seed in range(seeds):
        flat = draws[:, seed].reshape(-1, posterior.size).astype(float)
        broken = bool(found.broken[seed] >= 0)
        rows.append(
            {
                "posterior": name,
                "schedule": contest.name,
                "K": chains,
                "s": contest.every,
                "alpha": contest.alpha,
                "step": step_size,
                "seed": seed,
                "draws": len(flat),
                "error of mean": float("nan") if broken else float(np.sqrt(np.mean(flat.mean(0) ** 2))),
                "error of sd": float("nan") if broken else float(np.sqrt(np.mean((flat.std(0) - 1) ** 2))),
                "sd ratio": float("nan") if broken else float(flat.std(0).mean()),
            }
        )
    return rows


def measure(report: Report, clock: Clock, say: Say) -> None:
    """Tables exact and sampled."""
    if not report.has("exact"):
        report.append("exact", exact_rows())
    settings = report.settings
    if settings["data_dir"] is None:
        report.note("The part with posteriordb is left out: name a folder that holds it with --data-dir.")
        return
    done = {(row["posterior"], row["schedule"], row["s"], row["alpha"]) for row in report.rows("sampled")}
    left_out = 0
    for name in settings["methods"] or POSTERIORS:
        posterior, began = load_posterior(name, Path(settings["data_dir"])), time.monotonic()
        # In these coordinates no direction is wider than 1; the sharpest decides which step is stable.
        hessian = jax.jit(jax.hessian(lambda w, p=posterior: -p.log_density(w)))(jnp.zeros(posterior.size))
        step_size = float(settings["step"]) / float(np.sqrt(np.linalg.eigvalsh(hessian)[-1]))
        for contest in contests(bool(settings["quick"])):
            if (name, *contest[:2], contest.alpha) in done:
                continue
            if clock.is_over:
                left_out += 1
                continue
            report.append("sampled", _sampled(report, name, posterior, contest, step_size))
        say(f"{name}: {time.monotonic() - began:.0f} s")
    if left_out:
        report.note(f"{left_out} contests are left out, for the time was up.")
    if not clock.is_over:
        posterior = load_posterior("sblri-blr", Path(settings["data_dir"]))
        keep_store(
            report,
            hk.Target.from_log_density(posterior.log_density),
            jnp.zeros(posterior.size),
            dynamics=hk.SGHMC(0.1, FRICTION),
            coupling=hk.Elastic(10.0, 8, schedule=hk.release()),
            chains=int(settings["chains"]),
            num_steps=int(settings["steps"]),
            warmup=int(settings["steps"]) // 4,
            thin=8,
        )


# -- figures and words -------------------------------------------------------------------------------------------------


def draw(report: Report) -> None:
    """Two figures, the tables in short, and what they say."""
    rows, sampled = report.rows("exact"), summary(report.rows("sampled"))
    _draw_exact(report, rows)
    parts = [report.shown("exact"), said("What it says", findings(rows, sampled))]
    if sampled:
        _draw_sampled(report, sampled)
        parts += [report.shown("sampled"), table("On posteriors with reference draws", sampled, SAMPLED)]
    parts += [table("Exactly, in short (all combinations are in exact.csv)", _in_short(rows), EXACT)]
    report.page(TITLE, INTRODUCTION, parts)


INTRODUCTION = (
    "Bias and speed of elastic chains and of stale gradients over s, K, alpha, O and the step, exactly; and springs "
    "that are held, let go or alternate against independent chains with the same number of gradients."
)
EXACT = (
    "On N(0, 1), friction 1, workers that exchange together every s steps. Relaxation: parallel steps after which a "
    "displacement is 1/e, by the spectral radius."
)
SAMPLED = (
    "K chains that start 5 standard deviations away, draws after a quarter of the steps; errors in standard deviations "
    "of the reference (root mean square over parameters), mean over seeds ± 95 %. sd ratio: 1 is the posterior."
)


def _select(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _in_short(rows: list[Row]) -> list[Row]:
    """The base case, one thing changed at a time."""
    base = {"K": BASE_CHAINS, "step": BASE_STEP}
    found = _select(rows, scheme="independent")
    found += [row for s in EVERY for row in _select(rows, scheme="elastic", s=s, alpha=1.0, **base)]
    found += [row for a in ALPHAS for row in _select(rows, scheme="elastic", s=8, alpha=a, **base)]
    found += [row for s in EVERY for row in _select(rows, scheme="stale gradient", s=s, **base)]
    return [row for i, row in enumerate(found) if row not in found[:i]]


def _draw_exact(report: Report, rows: list[Row]) -> None:
    plt = plot_style()
    figure, panels = plt.subplots(1, 4, figsize=(15, 4.2), layout="constrained")
    colours = plt.get_cmap("viridis")
    for index, alpha in enumerate(ALPHAS):
        own = _select(rows, scheme="elastic", K=BASE_CHAINS, step=BASE_STEP, alpha=alpha)
        style = {"color": colours(0.9 * index / (len(ALPHAS) - 1)), "marker": "o", "label": f"alpha = {alpha:g}"}
        panels[0].plot([row["s"] for row in own], [row["variance"] for row in own], **style)
        panels[2].plot([row["s"] for row in own], [row["relaxation"] for row in own], **style)
    panels[0].set(title=f"elastic, K = {BASE_CHAINS}, step {BASE_STEP:g}", ylabel="variance of a chain")
    panels[0].legend(fontsize=8)
    for index, step in enumerate(STEPS):
        for wait_for, line in ((1, "-"), (BASE_CHAINS, "--")):
            own = _select(rows, scheme="stale gradient", K=BASE_CHAINS, step=step, O=wait_for)
            own = [row for row in own if np.isfinite(row["variance"])]
            colour = [COLOURS[name] for name in ("green", "orange", "pink")][index]
            label = f"step {step:g}, O = {wait_for}"
            style = {"color": colour, "linestyle": line, "marker": "o", "label": label}
            panels[1].plot([row["s"] for row in own], [row["variance"] for row in own], **style)
            panels[3].plot([row["s"] for row in own], [row["relaxation"] for row in own], **style)
    panels[1].set(title=f"stale gradient, K = {BASE_CHAINS}", ylabel="variance of the chain", yscale="log")
    panels[1].legend(fontsize=7.5)
    alone = {row["step"]: row["relaxation"] for row in _select(rows, scheme="independent")}
    panels[2].axhline(alone[BASE_STEP], color=COLOURS["grey"], linestyle="--", linewidth=1)
    panels[2].set(title="elastic (dashed: one chain alone)", ylabel="relaxation, parallel steps", yscale="log")
    panels[3].set(title="stale gradient", ylabel="relaxation, parallel steps", yscale="log")
    for panel in panels[:2]:
        panel.axhline(1, color=COLOURS["grey"], linestyle="--", linewidth=1)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(EVERY, [str(s) for s in EVERY])
        panel.set_xlabel("s")
        panel.grid(alpha=0.25)
    caption = "Exact laws on N(0, 1); dashed at 1: the target. Where a point is missing there is no law: it diverges."
    report.figure("exact", figure, caption)
    plt.close(figure)


def summary(rows: list[Row]) -> list[Row]:
    """Over seeds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["posterior"], row["schedule"], row["s"], row["alpha"]), []).append(row)
    found = []
    for (posterior, schedule, every, alpha), own in groups.items():
        line: Row = {"posterior": posterior, "schedule": schedule, "s": every, "alpha": alpha, "seeds": len(own)}
        for name in ("error of mean", "error of sd", "sd ratio"):
            mean, half = interval([float(each[name]) for each in own])
            line |= {name: float(mean), f"± {name}": float(half)}
        found.append(line)
    return found


def _draw_sampled(report: Report, sampled: list[Row]) -> None:
    plt = plot_style()
    names = list(dict.fromkeys(row["posterior"] for row in sampled))
    figure, panels = plt.subplots(2, len(names), figsize=(3.4 * len(names) + 1, 6.4), squeeze=False, sharex="col")
    figure.set_layout_engine("constrained")
    colours = {"independent": "black", "hold": "orange", "release": "blue", "cycle": "green"}
    for column, name in enumerate(names):
        own = [row for row in sampled if row["posterior"] == name]
        labels = ["none" if r["schedule"] == "independent" else f"s={r['s']}, α={r['alpha']:g}" for r in own]
        places = {label: index for index, label in enumerate(dict.fromkeys(labels))}
        for line, (score, title) in enumerate((("error of mean", "error of the mean"), ("sd ratio", "sd ratio"))):
            panel = panels[line, column]
            for row, label in zip(own, labels, strict=True):
                shift = 0.2 * (list(colours).index(row["schedule"]) - 2) if row["schedule"] != "independent" else 0.0
                error = row[f"± {score}"]
                panel.errorbar(
                    places[label] + shift,
                    row[score],
                    yerr=error if np.isfinite(error) else None,
                    fmt="o",
                    markersize=4,
                    color=COLOURS[colours[row["schedule"]]],
                )
            if line == 0:
                panel.set_title(name, fontsize=9)
                panel.set_yscale("log")
            else:
                panel.axhline(1, color=COLOURS["grey"], linestyle="--", linewidth=1)
                panel.set_xticks(list(places.values()), list(places), rotation=60, fontsize=8)
            if column == 0:
                panel.set_ylabel(title)
            panel.grid(axis="y", alpha=0.25)
    handles = [
        plt.Line2D([], [], color=COLOURS[colour], marker="o", linestyle="", label=schedule)
        for schedule, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    report.figure("sampled", figure, SAMPLED)
    plt.close(figure)


def findings(rows: list[Row], sampled: list[Row]) -> list[str]:
    """In words, from the numbers."""
    base = {"K": BASE_CHAINS, "step": BASE_STEP}
    held = {row["s"]: row for row in _select(rows, scheme="elastic", alpha=1.0, **base)}
    stale = {row["s"]: row for row in _select(rows, scheme="stale gradient", O=1, **base)}
    lost = [s for s, row in stale.items() if not np.isfinite(row["variance"])]
    said_so = [
        f"Held springs (alpha = 1, K = {BASE_CHAINS}, step {BASE_STEP:g}) give a chain "
        f"{100 * held[1]['variance']:.1f} % of the posterior's variance at s = 1 and "
        f"{100 * held[16]['variance']:.1f} % at s = 16: the bias belongs to the springs, not to staleness.",
        f"A stale gradient (O = 1, the same K and step) has {100 * stale[1]['variance']:.1f} % at s = 1; "
        + (
            f"with s = {', '.join(map(str, lost))} it has no stationary law."
            if lost
            else "it is stable for all s here."
        ),
    ]
    alone = {row["step"]: row["relaxation"] for row in _select(rows, scheme="independent")}
    slower = [r for r in _select(rows, scheme="elastic") if r["relaxation"] > 1.001 * alone[r["step"]]]
    total = len(_select(rows, scheme="elastic"))
    said_so.append(
        f"On a Gaussian springs never pay by themselves: in {len(slower)} of {total} combinations the coupled system "
        "forgets more slowly than a chain alone with the same step, and in none much faster; what they may buy is a "
        "larger step where gradients are noisy."
        if not [r for r in _select(rows, scheme="elastic") if r["relaxation"] < 0.9 * alone[r["step"]]]
        else f"In {len(slower)} of {total} combinations the elastic system forgets more slowly than a chain alone with "
        "the same step."
    )
    for name in dict.fromkeys(row["posterior"] for row in sampled):
        own = [row for row in sampled if row["posterior"] == name]
        (free,) = [row for row in own if row["schedule"] == "independent"]
        text = f"{name}: independent chains err by {free['error of mean']:.3f} sd in the mean, with an sd ratio of "
        text += f"{free['sd ratio']:.3f}; "
        best = []
        for schedule in ("hold", "release", "cycle"):
            each = [row for row in own if row["schedule"] == schedule and np.isfinite(row["error of mean"])]
            if each:
                row = min(each, key=lambda row: row["error of mean"])
                best.append(f"{schedule} by {row['error of mean']:.3f} at best, sd ratio {row['sd ratio']:.3f}")
        said_so.append(text + "; ".join(best) + ".")
    return said_so
