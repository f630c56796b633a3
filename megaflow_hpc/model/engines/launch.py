"""Describes how an engine is started and reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Launch:
    """Command, environment and address of an engine. An external engine is already running, so it has no
    ``command``."""

    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables added to the server's own environment."""
    uds: str | None = None
    """Path of the engine's Unix socket, or ``None`` if it listens at ``base_url``."""
    base_url: str = ""
    """Root URL, without ``/v1``."""
    api_url: str = ""
    """Base URL of an external endpoint's API, before ``/chat/completions``. If empty, ``base_url/v1`` is used."""
    api: str = ""
    """API of an external endpoint, one of :data:`~megaflow_hpc.model.engines.upstream.UPSTREAMS`. If empty, it is
    asked as the gateway asks an engine."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields that an external endpoint gets with every completion request that does not set them."""
    key: str = field(default="", repr=False)
    """Bearer token that the engine requires. Empty if it requires none."""
    model_name: str = ""
    """Name under which the engine serves the model."""
    protocol: str = "text"
    """The highest gateway protocol that the engine supports: ``text``, ``plain``, ``split`` or ``sglang``. Of
    a reward model, ``reward``."""
    reload: str = ""
    """API for loading weights in place: ``vllm`` or ``sglang``. If empty, new weights require a restart."""
    metrics: bool = False
    """True if ``/metrics`` reports the number of waiting requests."""
    slots: int = 0
    """Maximum number of requests that the engine processes concurrently, or 0 if unknown."""
    start_timeout_s: float = 900.0
    """Maximum seconds from the start to the first completion. Large models take minutes to load."""

    def url(self, path: str) -> str:
        """Returns the URL of an engine API path such as ``/v1/models``."""
        if self.uds:
            return f"http://engine{path}"
        if self.api_url and path.startswith("/v1/"):
            return self.api_url + path.removeprefix("/v1")
        return self.base_url + path
