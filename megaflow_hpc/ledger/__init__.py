"""The ledger: blocks, claims, leases and seals in ``RUN/tasks`` and ``RUN/ledger``. Pods coordinate only here.

The input is rollouts, grouped into blocks. The outputs are claims and seals. A seal tells readers how much of a journal
is valid. All rules hold on NFS and Lustre: hosts never compare wall clocks or mtimes, and use no file locks. Planning
writes blocks. Pods claim them through :class:`Ledger`. A consumer of the rollouts adds blocks while it holds an
:class:`OpenLease`. Readers open a ledger without an identity.
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
