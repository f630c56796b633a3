"""Who works on which block: blocks, claims, leases and seals in ``RUN/tasks`` and ``RUN/ledger``. Rollouts come in as
blocks; out come claims, and the seals by which readers know what of a journal counts. Pods meet only here, and every
rule holds on NFS and Lustre: no wall clock, no mtime and no lock is compared across hosts. Planning writes blocks, pods
claim them through :class:`Ledger`, who trains on the rollouts adds some under an :class:`OpenLease`, and anybody may
open a ledger without an identity to read.
"""

from megaflow_hpc.ledger.blocks import Block, add_blocks, read_block, read_blocks, write_blocks
from megaflow_hpc.ledger.claims import Ledger
from megaflow_hpc.ledger.lease import PodIdentity
from megaflow_hpc.ledger.open_lease import OpenLease
from megaflow_hpc.ledger.rules import Claim

__all__ = [
    "Block",
    "Claim",
    "Ledger",
    "OpenLease",
    "PodIdentity",
    "add_blocks",
    "read_block",
    "read_blocks",
    "write_blocks",
]
