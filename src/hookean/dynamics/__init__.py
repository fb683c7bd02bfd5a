"""Every dynamics, found by its file: a new module here is exported, tested and known to the command line by itself."""

import importlib
import pkgutil

from hookean.dynamics.base import Dynamics, LinearMap, Recipe, pack

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

ALL: dict[str, type[Dynamics]] = {cls.__name__: cls for cls in Dynamics.__subclasses__()}
globals().update(ALL)

__all__ = ["ALL", "Dynamics", "LinearMap", "Recipe", "pack", *ALL]
