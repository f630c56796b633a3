"""What rollouts leave behind: journal, the HDF5 campaign file, its reader and its validator.

The names are imported on first use: h5py and numpy stay out of processes that only append to a journal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.frames import pack_record as pack_record
    from megaflow_hpc.trajectories.frames import read_journal as read_journal
    from megaflow_hpc.trajectories.gathering import gather as gather
    from megaflow_hpc.trajectories.journal import JournalWriter as JournalWriter
    from megaflow_hpc.trajectories.journal import valid_length as valid_length
    from megaflow_hpc.trajectories.live import follow as follow
    from megaflow_hpc.trajectories.reader import open_trajectories as open_trajectories
    from megaflow_hpc.trajectories.validator import validate as validate

_HOME = {
    "JournalWriter": "journal",
    "pack_record": "frames",
    "read_journal": "frames",
    "valid_length": "journal",
    "follow": "live",
    "gather": "gathering",
    "open_trajectories": "reader",
    "validate": "validator",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
