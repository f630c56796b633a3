"""The launch of an engine: how it is started and reached."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Launch:
    """How an engine is started and reached. An external engine has no ``command``, because it runs already."""

    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Variables added to the server's own environment."""
    uds: str | None = None
    """Path of the engine's Unix socket; ``None`` if it listens at ``base_url``."""
    base_url: str = ""
    """Root URL, without ``/v1``."""
    api_url: str = ""
    """URL before ``/chat/completions`` of an external endpoint; empty: ``base_url/v1``."""
    key: str = field(default="", repr=False)
    """Bearer token that the engine expects; empty if it expects none."""
    model_name: str = ""
    """Name under which the engine serves the model."""
    protocol: str = "text"
    """The highest gateway protocol that the engine supports: ``text``, ``plain`` or ``split``."""
    reload: str = ""
    """API that loads weights in place: ``vllm`` or ``sglang``; empty: the engine must be restarted for new weights."""
    metrics: bool = False
    """True if ``/metrics`` reports how many requests wait."""
    slots: int = 0
    """Requests that the engine answers at once; 0 if unknown."""
    start_timeout_s: float = 900.0
    """Seconds from the start to the first completion. Large models load for minutes."""

    def url(self, path: str) -> str:
        """Returns the URL of a path of the engine's API, such as ``/v1/models``."""
        if self.uds:
            return f"http://engine{path}"
        if self.api_url and path.startswith("/v1/"):
            return self.api_url + path.removeprefix("/v1")
        return self.base_url + path
