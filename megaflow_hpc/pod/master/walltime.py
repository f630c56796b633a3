"""The walltime of a pod."""

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
    """Time that rollouts of this pod may take. Infinite if the job has no limit.

    The batch script asks Slurm once. The monotonic clock counts from then on.
    """

    whole_s: float = math.inf
    """Seconds that were left when the pod began."""
    end: float = math.inf
    """When rollouts must have ended, by the monotonic clock."""

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Walltime:
        """Reads ``MEGAFLOW_END`` (seconds UTC; missing or empty: no limit), which ``pods.sh`` sets."""
        try:
            left = float(environment.get("MEGAFLOW_END", "")) - time.time() - MARGIN_S
        except ValueError:
            return cls()
        if left <= 0:
            return cls()  # invalid, or the pod is about to be warned anyway
        return cls(left, time.monotonic() + left)

    @property
    def remaining_s(self) -> float:
        """Seconds until the end."""
        return self.end - time.monotonic()
