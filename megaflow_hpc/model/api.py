"""Names of the engines' HTTP API that engines, proxy and gateway share: paths, and the header of the weights."""

from __future__ import annotations

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
GENERATE = "/inference/v1/generate"
"""vLLM's endpoint from token ids to token ids (``--enable-scale-out``)."""
RENDER, DERENDER = f"{CHAT}/render", f"{CHAT}/derender"
"""vLLM's endpoints from messages to token ids and back."""
TEXTS = f"{COMPLETIONS}/derender"
"""vLLM's endpoint that decodes token ids to plain text."""
WEIGHT_VERSION = "X-Megaflow-Weight-Version"
"""Header of every answer of a proxy, with the version of the weights that sampled it."""
