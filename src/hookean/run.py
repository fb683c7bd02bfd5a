"""What a run gives back: draws, statistics, and what is known of them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import numpy as np

from hookean import diagnostics
from hookean.exchange import Event
from hookean.job import Job, Result
from hookean.predict import Apply, Predictions, predict
from hookean.schedules import CouplingSchedule
from hookean.store import Stored
from hookean.tree import leaf_names
from hookean.types import Batch, HookeanError, Params

MOST_LEAVES = 4
"""Named when a run is printed."""


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """Kept draws and what is known of them.

    Attributes:
        draws: the parameters' pytree, leaves [chain, draw, ...].
        stats: arrays [chain, draw]: `potential` (of the batch of the last step), `kinetic_temperature`,
            `configurational_temperature` (theta . grad U / n), `distance` (to the centre), `staleness` (steps since the
            copy of the centre that was used had been asked for; with StaleGradient, steps of the server) and `live`
            (workers that count).
        info: `steps` taken, the `final` state, the `telemetry`, and what the engine adds (the `log` of exchanges).
        config: the run's settings.
        job: what was run, checked; None where a run was loaded without its target.
        stored: the run on disk, where there is one. Its draws and statistics are read when they are indexed.
    """

    draws: Params
    stats: dict[str, Any]
    info: dict[str, Any]
    config: dict[str, Any]
    job: Job | None
    stored: Stored | None = None

    def summary(self) -> str:
        """What was sampled, at which temperature, and what to be careful about."""
        if self.job is not None:
            return diagnostics.summary(self.job, Result(self.draws, self.stats, self.info))
        text = self.info.get("summary")
        if text is None:
            raise HookeanError("summary: the run has not ended yet, and needs its target: hk.load(path, target)")
        return str(text)

    def __repr__(self) -> str:
        """What was run, how many draws there are and where; a summary would read them all."""
        settings = self.config
        names = [self._name_of(settings[part]) for part in ("dynamics", "coupling", "engine")]
        chains, kept = self.stats["potential"].shape
        where = "in memory" if self.stored is None else f"{self.stored.state}, on disk in {self.stored.path}"
        leaves = ", ".join(
            f"{name} {list(leaf.shape[2:])}"
            for name, leaf in zip(leaf_names(self.draws)[:MOST_LEAVES], jax.tree.leaves(self.draws), strict=False)
        )
        more = ", ..." if len(jax.tree.leaves(self.draws)) > MOST_LEAVES else ""
        steps = f"{self.info.get('steps', 0):,} of {settings['num_steps']:,} steps"
        made = f"{names[0]} x {names[1]} by {names[2]}"
        return f"<hk.Run: {made}, {steps}, {chains} x {kept:,} draws of {leaves}{more}; {where}>"

    @staticmethod
    def _name_of(setting: Any) -> str:
        """Of an object, or of what a run on disk says of it."""
        return setting.partition("(")[0] if isinstance(setting, str) else type(setting).__name__

    @property
    def kept_steps(self) -> np.ndarray:
        """The steps after which a draw is kept."""
        if self.job is not None:
            return self.job.kept_steps
        schedule = CouplingSchedule(**self.config["schedule"])
        return schedule.kept_steps(self.config["num_steps"], self.config["warmup"], self.config["thin"])

    @property
    def couples_draws(self) -> bool:
        """Whether kept draws felt each other."""
        return bool(self.config["couples_draws"]) if self.job is None else self.job.coupling.couples_draws

    def log(self) -> list[Event]:
        """The exchanges, in the order in which they took effect."""
        return self.info.get("log", []) if self.stored is None else self.stored.log()

    def predict(self, apply: Apply, x: Batch, y: Any = None, **options: Any) -> Predictions:
        """Average the predictions of all draws at inputs `x`; see `hookean.predict.predict` for the options."""
        return predict(apply, self.draws, x, y, **options)

    def to_arviz(self) -> Any:
        """Draws and statistics for ArviZ (the extra `arviz`): a DataTree, or an InferenceData of ArviZ before 1.0.

        Variables are named by their leaves, `layers.0.kernel`; the coordinate `draw` is the step after which a draw was
        kept. Missing draws are NaN, and make a diagnostic NaN: select the chains and draws that are there.
        """
        try:
            import arviz
        except ImportError as error:
            raise HookeanError("to_arviz: ArviZ is not installed. Install hookean with its extra `arviz`.") from error
        # A slash would be a path in a DataTree. NumPy knows no bfloat16 of its own, nor does xarray.
        names = [name.replace("/", ".") for name in leaf_names(self.draws)]
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(self.draws)]
        arrays = [array.astype(np.float32) if array.dtype.kind == "V" else array for array in arrays]
        if len(set(names)) < len(names):
            raise HookeanError(f"to_arviz: two leaves would have one name, of {', '.join(names)}. Rename one.")
        posterior = dict(zip(names, arrays, strict=True))
        sample_stats = {name: np.asarray(values) for name, values in self.stats.items()}
        chains, kept = sample_stats["potential"].shape
        coords = {"chain": np.arange(chains), "draw": self.kept_steps[:kept]}
        settings = {name: value if isinstance(value, str) else repr(value) for name, value in self.config.items()}
        attributes = {"inference_library": "hookean", **settings}
        if "posterior" in inspect.signature(arviz.from_dict).parameters:  # before 1.0
            return arviz.from_dict(posterior=posterior, sample_stats=sample_stats, coords=coords, attrs=attributes)
        groups = {"posterior": posterior, "sample_stats": sample_stats}
        return arviz.from_dict(groups, coords=coords, attrs={"/": attributes})
