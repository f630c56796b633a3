"""Who works on which block: blocks, claims, leases and seals in ``RUN/tasks`` and ``RUN/ledger``. Rollouts come in as
blocks; out come claims, and the seals by which readers know what of a journal counts. Pods meet only here, and every
rule holds on NFS and Lustre: no wall clock, no mtime and no lock is compared across hosts. Planning writes blocks, pods
claim them through :class:`Ledger`, and anybody may open one without an identity to read.
"""

from megaflow_hpc.ledger.blocks import Block, read_block, read_blocks, write_blocks
from megaflow_hpc.ledger.claims import Ledger
from megaflow_hpc.ledger.lease import PodIdentity
from megaflow_hpc.ledger.rules import Claim

__all__ = ["Block", "Claim", "Ledger", "PodIdentity", "read_block", "read_blocks", "write_blocks"]
