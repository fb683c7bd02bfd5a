"""A run on disk: a folder that is one Zarr v3 group, which any reader of Zarr opens, and that survives a SIGKILL.

layout.py    what lies where, and how single files are written and read
writer.py    `Writer`, the one process that samples
reader.py    `load`, anybody else, also while the run goes on
"""

from hookean.store.layout import Checkpoint, Store
from hookean.store.reader import Lazy, Stored, load
from hookean.store.writer import Writer

__all__ = ["Checkpoint", "Lazy", "Store", "Stored", "Writer", "load"]
