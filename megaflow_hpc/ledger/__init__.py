"""Who works on which block: blocks, claims, leases and seals on the shared file system.

Pods meet only here. Every rule holds on NFS and Lustre: no wall clock, no mtime, no lock is compared across hosts.
"""

from megaflow_hpc.ledger.blocks import Block, read_block, read_blocks, write_blocks
from megaflow_hpc.ledger.claims import Ledger
from megaflow_hpc.ledger.lease import PodIdentity
from megaflow_hpc.ledger.rules import Claim

__all__ = ["Block", "Claim", "Ledger", "PodIdentity", "read_block", "read_blocks", "write_blocks"]
