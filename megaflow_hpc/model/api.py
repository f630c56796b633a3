"""Paths and headers of the engines' HTTP API, shared by engines, proxy and gateway."""

from __future__ import annotations

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
GENERATE = "/inference/v1/generate"
"""vLLM's tokens-in, tokens-out endpoint (``--enable-scale-out``)."""
RENDER, DERENDER = f"{CHAT}/render", f"{CHAT}/derender"
"""vLLM's endpoints that convert messages to token ids and back."""
TEXTS = f"{COMPLETIONS}/derender"
"""vLLM's endpoint that decodes token ids to plain text."""
WEIGHT_VERSION = "X-Megaflow-Weight-Version"
"""Response header set by the proxy: the version of the weights that sampled the response."""
