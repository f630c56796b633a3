"""An engine that is about to be started, or one that runs already."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Launch:
    """An engine about to be started, or one that is there (``command`` empty)."""

    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    uds: str | None = None
    base_url: str = ""
    """Without ``/v1``."""
    key: str = field(default="", repr=False)
    model_name: str = ""
    protocol: str = "text"
    """What of :mod:`megaflow_hpc.model.gateway.protocols` it can do."""
    reload: str = ""
    """How it loads weights in place (:data:`.weight_updates.RELOADERS`); empty: it is started anew."""
    metrics: bool = False
    """Its ``/metrics`` tell how many requests wait."""
    slots: int = 0
    """Requests that it answers at once, where that is known without its telling."""
    start_timeout_s: float = 900.0
    """Seconds from the start to the first completion; large models load for minutes."""
