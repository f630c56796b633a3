"""The trajectories of a campaign, from durable journals to one HDF5 file, its reader, its upkeep and its exports.

Pods append finished rollouts to journals; a gather makes ``trajectories.h5`` of them; readers take either. The rooms
build on one another in the order ``hdf5``, ``journal``, ``reading``, ``maintenance`` and ``exports``. These names are
imported on first use: h5py and numpy stay out of processes that only append to a journal.
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
