"""Parallel stochastic-gradient MCMC with coupled chains, in JAX.

import hookean as hk

hk.Target       a posterior                 hk.sample      draws from it
dynamics        hk.SGHMC, hk.SGLD, ...      coupling       hk.Elastic, hk.Independent, hk.StaleGradient, ...
engine          hk.Vectorised, hk.Simulated schedules      hk.hold, hk.release, hk.cycle
hookean.testing law suites for dynamics and couplings of your own
hookean.scores  how good predictions are     hookean.datasets  real data sets
"""

from typing import TYPE_CHECKING

from hookean import coupling as _coupling
from hookean import dynamics as _dynamics
from hookean import engines as _engines
from hookean.api import Run, sample
from hookean.coupling import Coupling
from hookean.dynamics import Dynamics
from hookean.engines import Engine
from hookean.exchange import Crash, Join, Scenario, Straggler
from hookean.schedules import CouplingSchedule, cycle, hold, release
from hookean.targets import Target
from hookean.types import ArgumentError, BatchError, DivergenceError, HookeanError, HookeanWarning

if TYPE_CHECKING:  # at run time they are found by their files; this is for editors and type checkers
    from hookean.coupling.eamsgd import EAMSGD as EAMSGD
    from hookean.coupling.easgd import EASGD as EASGD
    from hookean.coupling.elastic import Elastic as Elastic
    from hookean.coupling.elastic_as_printed import ElasticAsPrinted as ElasticAsPrinted
    from hookean.coupling.independent import Independent as Independent
    from hookean.coupling.stale_gradient import StaleGradient as StaleGradient
    from hookean.dynamics.psgld import PSGLD as PSGLD
    from hookean.dynamics.scale_adapted import ScaleAdaptedSGHMC as ScaleAdaptedSGHMC
    from hookean.dynamics.sghmc import SGHMC as SGHMC
    from hookean.dynamics.sgld import SGLD as SGLD
    from hookean.dynamics.sgnht import SGNHT as SGNHT
    from hookean.engines.simulated import Simulated as Simulated
    from hookean.engines.vectorised import Vectorised as Vectorised

_found = {**_dynamics.ALL, **_coupling.ALL, **_engines.ALL}
globals().update(_found)

__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "BatchError",
    "Coupling",
    "CouplingSchedule",
    "Crash",
    "DivergenceError",
    "Dynamics",
    "Engine",
    "HookeanError",
    "HookeanWarning",
    "Join",
    "Run",
    "Scenario",
    "Straggler",
    "Target",
    "cycle",
    "hold",
    "release",
    "sample",
    *_found,
]
