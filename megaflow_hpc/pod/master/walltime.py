"""When this pod's job ends: asked of Slurm once by the batch script, counted by the monotonic clock from then on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

MARGIN_S = 60.0
"""The batch script is warned, and the pod drains, this long before the end."""


@dataclass(frozen=True)
class Walltime:
    """Seconds that rollouts of this pod may take; infinite without a limit."""

    whole_s: float = math.inf
    """When the pod began."""
    end: float = math.inf
    """By the monotonic clock."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Walltime:
        """From ``MEGAFLOW_END`` (seconds UTC; absent or empty: no limit), which ``pods.sh`` sets."""
        try:
            left = float(environment.get("MEGAFLOW_END", "")) - time.time() - MARGIN_S
        except ValueError:
            return cls()
        if left <= 0:
            return cls()  # nonsense, or a pod that is about to be warned anyhow
        return cls(left, time.monotonic() + left)

    @property
    def remaining_s(self) -> float:
        return self.end - time.monotonic()
