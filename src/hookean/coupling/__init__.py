"""Every coupling, found by its file: a new module here is exported, tested and known to the command line by itself."""

import importlib
import pkgutil

from hookean.coupling.base import Centre, Coupling, Evaluation, Worker

_modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]

ALL: dict[str, type[Coupling]] = {
    name: value
    for module in _modules
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Coupling) and value.__module__ == module.__name__
    if value is not Coupling
}
globals().update(ALL)

__all__ = ["ALL", "Centre", "Coupling", "Evaluation", "Worker", *ALL]
