"""An engine that is about to be started, or one that runs already."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Launch:
    """How an engine is started and reached. Without a ``command`` it runs already, outside of the campaign."""

    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Variables added to the server's own environment."""
    uds: str | None = None
    """Path of its Unix socket; ``None``: it listens at ``base_url``."""
    base_url: str = ""
    """Its root, without ``/v1``."""
    api_url: str = ""
    """What stands before ``/chat/completions`` at an endpoint of somebody else's; empty: ``base_url/v1``."""
    key: str = field(default="", repr=False)
    """Bearer token that the engine expects; empty: none."""
    model_name: str = ""
    """Name under which the engine serves the model."""
    protocol: str = "text"
    """The highest gateway protocol that it has: ``text``, ``plain`` or ``split``."""
    reload: str = ""
    """API by which it loads weights in place: ``vllm`` or ``sglang``; empty: it must be restarted for them."""
    metrics: bool = False
    """Whether its ``/metrics`` tell how many requests wait."""
    slots: int = 0
    """Requests that it answers at once; 0 if unknown."""
    start_timeout_s: float = 900.0
    """Seconds from the start to the first completion; large models load for minutes."""

    def url(self, path: str) -> str:
        """Returns where a path of an engine's API (``/v1/models``) is asked for."""
        if self.uds:
            return f"http://engine{path}"
        if self.api_url and path.startswith("/v1/"):
            return self.api_url + path.removeprefix("/v1")
        return self.base_url + path
