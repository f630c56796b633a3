"""Stores the trajectories of a campaign: durable journals, the HDF5 file made from them, and its reader and exports.

Pods append finished rollouts to journals. ``gather`` merges the journals into ``trajectories.h5``. Readers accept
either. The packages are layered: ``hdf5``, ``journal``, ``reading``, ``maintenance``, ``exports``. Each may import only
packages that precede it in this list. The names below are imported lazily, so processes that only append to a journal
never load h5py or numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.journal.frames import pack_record as pack_record
    from megaflow_hpc.trajectories.journal.frames import read_journal as read_journal
    from megaflow_hpc.trajectories.journal.writer import JournalWriter as JournalWriter
    from megaflow_hpc.trajectories.maintenance.gather import gather as gather
    from megaflow_hpc.trajectories.maintenance.validate import validate as validate
    from megaflow_hpc.trajectories.reading.follow import follow as follow
    from megaflow_hpc.trajectories.reading.store import open_trajectories as open_trajectories

_HOME = {
    "JournalWriter": "journal.writer",
    "pack_record": "journal.frames",
    "read_journal": "journal.frames",
    "follow": "reading.follow",
    "gather": "maintenance.gather",
    "open_trajectories": "reading.store",
    "validate": "maintenance.validate",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
