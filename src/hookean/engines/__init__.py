"""Every engine, found by its file."""

import importlib
import pkgutil

from hookean.engines.base import Engine

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")

ALL: dict[str, type[Engine]] = {cls.__name__: cls for cls in Engine.__subclasses__()}
globals().update(ALL)

__all__ = ["ALL", "Engine", *ALL]
