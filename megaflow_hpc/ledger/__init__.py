"""Distributes blocks of rollouts over pods by files in ``RUN/tasks`` and ``RUN/ledger``.

Pods coordinate only through these files. Rollouts are grouped into blocks, and a pod claims a block before it runs the
block's rollouts. If another pod takes over the block, a seal tells readers how much of the first pod's journal is
valid. The protocol works on NFS and Lustre: it never compares wall clocks or mtimes of different hosts, and uses no
file locks.

Planning writes blocks. Pods claim them through :class:`Ledger`. A consumer of the rollouts adds blocks while it holds
an :class:`OpenLease`. Readers open a ledger without an identity.
"""

from megaflow_hpc.ledger.blocks import Block, add_blocks, read_block, read_blocks, write_blocks
from megaflow_hpc.ledger.consumers import OpenLease
from megaflow_hpc.ledger.lease import PodIdentity
from megaflow_hpc.ledger.ledger import Ledger
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
