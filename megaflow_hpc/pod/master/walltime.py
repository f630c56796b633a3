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
    """How long rollouts of this pod may take; without end where the job has no limit."""

    whole_s: float = math.inf
    """Seconds that there were when the pod began."""
    end: float = math.inf
    """When rollouts must have ended, by the monotonic clock."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Walltime:
        """Reads ``MEGAFLOW_END`` (seconds UTC; absent or empty: no limit), which ``pods.sh`` sets."""
        try:
            left = float(environment.get("MEGAFLOW_END", "")) - time.time() - MARGIN_S
        except ValueError:
            return cls()
        if left <= 0:
            return cls()  # nonsense, or a pod that is about to be warned anyhow
        return cls(left, time.monotonic() + left)

    @property
    def remaining_s(self) -> float:
        """Seconds until then."""
        return self.end - time.monotonic()
