"""Arranges the trainer's ranks in a grid, with one rank per GPU. Planning checks layouts, so this module does not
import torch.

Ranks are numbered in this order, with the last dimension varying fastest::

    replicas × shards × context × tensor
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megaflow_hpc.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each dimension of the grid.

    Raises:
        ConfigError: the dimensions do not divide the number of ranks.
    """

    ranks: int = 1
    """Total number of ranks."""
    replicas: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for names in (("replicas", "context", "tensor"), ("replicas", "expert")):
            product = math.prod(getattr(self, name) for name in names)
            if self.ranks % product:
                asked = " × ".join(f"{name} {getattr(self, name)}" for name in names)
                raise ConfigError(
                    f"parallel: {asked} = {product} does not divide the trainer's {self.ranks} ranks (one for each "
                    "GPU); change it, or slurm.trainer.nodes and gpus"
                )
        if self.expert > 1 and self.expert % self.tensor:
            raise ConfigError(
                f"parallel.expert: {self.expert} is not a multiple of tensor: {self.tensor}; set it to {self.tensor}"
            )

    @property
    def copies(self) -> int:
        """Number of consecutive ranks that process the same rows of tokens."""
        return self.context * self.tensor

    @property
    def sharded(self) -> int:
        """Number of ranks over which FSDP shards each parameter."""
        return self.ranks // (self.replicas * self.tensor)

    def check_heads(self, kind: str, heads: int, key_heads: int) -> None:
        """Checks that this layout can divide the attention heads of a model.

        Raises:
            ConfigError: the heads cannot be divided evenly.
        """
        if self.tensor > 1 and (heads % self.tensor or key_heads % self.tensor):
            raise ConfigError(
                f"parallel.tensor: {self.tensor} does not divide the {heads} heads and {key_heads} key heads of {kind}"
            )
        if self.context > 1 and not key_copies(heads // self.tensor, key_heads // self.tensor, self.context):
            raise ConfigError(
                f"parallel.context: the {heads} heads and {key_heads} key heads of {kind} cannot be divided among "
                f"{self.context} × tensor {self.tensor} ranks"
            )


def key_copies(heads: int, key_heads: int, ranks: int) -> int:
    """Returns how often each key head must be copied so that the heads can be divided equally among ranks.

    Each rank needs the key head that belongs to each of its heads. Returns 0 if the heads cannot be divided.
    """
    copies = ranks // math.gcd(key_heads, ranks)
    return 0 if heads % ranks or heads % (key_heads * copies) else copies
