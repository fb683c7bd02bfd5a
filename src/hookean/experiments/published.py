"""Figures of other papers to stand beside ours. Each was compared with a text of its source, or as is said there."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """Mean and standard error over the standard splits; in the units of the target."""

    method: str
    paper: str
    rmse: dict[str, tuple[float, float]]
    log_likelihood: dict[str, tuple[float, float]]


PBP = Published(
    "PBP",
    "Hernández-Lobato and Adams 2015, as in table 1 of Gal and Ghahramani 2016",
    {
        "bostonHousing": (3.01, 0.18),
        "concrete": (5.67, 0.09),
        "energy": (1.80, 0.05),
        "kin8nm": (0.10, 0.00),
        "protein-tertiary-structure": (4.73, 0.01),
        "yacht": (1.02, 0.05),
    },
    {
        "bostonHousing": (-2.57, 0.09),
        "concrete": (-3.16, 0.02),
        "energy": (-2.04, 0.02),
        "kin8nm": (0.90, 0.01),
        "protein-tertiary-structure": (-2.97, 0.00),
        "yacht": (-1.63, 0.02),
    },
)
DROPOUT = Published(
    "MC-dropout",
    "Gal and Ghahramani 2016, table 1 with the standard errors corrected in October 2016 (arXiv 1506.02142)",
    {
        "bostonHousing": (2.97, 0.19),
        "concrete": (5.23, 0.12),
        "energy": (1.66, 0.04),
        "kin8nm": (0.10, 0.00),
        "protein-tertiary-structure": (4.36, 0.01),
        "yacht": (1.11, 0.09),
    },
    {
        "bostonHousing": (-2.46, 0.06),
        "concrete": (-3.04, 0.02),
        "energy": (-1.99, 0.02),
        "kin8nm": (0.95, 0.01),
        "protein-tertiary-structure": (-2.89, 0.00),
        "yacht": (-1.55, 0.03),
    },
)
SGHMC_TUNED = Published(
    "SGHMC, tuned for each set",
    "Springenberg, Klein, Falkner and Hutter 2016 (NIPS), as quoted in table 3 of Zhang et al., Ergodic measure "
    "preserving flows",
    {},
    {"bostonHousing": (-2.49, 0.15), "concrete": (-4.16, 0.72), "yacht": (-1.75, 0.19)},
)
SCALE_ADAPTED = Published(
    "scale-adapted SGHMC",
    SGHMC_TUNED.paper,
    {},
    {"bostonHousing": (-2.54, 0.04), "concrete": (-3.38, 0.24), "yacht": (-1.11, 0.08)},
)
REGRESSION = (PBP, DROPOUT, SGHMC_TUNED, SCALE_ADAPTED)
