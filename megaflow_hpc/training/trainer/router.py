"""Router replay: the routers of a mixture of experts choose the experts that the engine chose.

Trainer and engine compute router logits with different rounding, so some of a token's top-k experts differ, and with
them its log-probabilities. With replay, the recorded experts take the place of the router's top-k. Their weights are
still computed from the trainer's own logits, so gradients reach the router (Ma et al. 2025, arXiv 2510.11370).

A router is a module of a transformers class named ``…TopKRouter``, which calls ``torch.topk`` once to choose experts.
Its code runs unchanged; only the result of that call is replaced.
"""

from __future__ import annotations

import re
from typing import Any

import torch  # type: ignore[import-not-found]
from torch.overrides import TorchFunctionMode  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError


class RouterReplay:
    """The routers of a causal language model.

    Attributes:
        experts: int16 (T, layers, experts per token) for the present row, -1 where routers choose themselves; ``None``
            if they always do. Backward passes that recompute layers read it again.
        shape: layers, experts per token, and experts; ``None`` if the model is not a mixture of experts.
    """

    def __init__(self, causal: Any) -> None:
        config = causal.config.get_text_config()
        self.experts: Any = None
        self._kind, self._count = type(causal).__name__, 0
        per_token = getattr(config, "num_experts_per_tok", None)
        count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        count = count or getattr(config, "n_routed_experts", None)
        layers = int(config.num_hidden_layers)
        self.shape = (layers, int(per_token), int(count)) if per_token and count else None

    def attach(self, causal: Any) -> None:
        """Makes the model's routers follow :attr:`experts`."""
        for name, module in causal.named_modules():
            layer = re.search(r"\blayers\.(\d+)\.", name)
            if type(module).__name__.endswith("TopKRouter") and layer:
                self._follow(module, int(layer[1]))
                self._count += 1

    def replay(self, experts: Any) -> None:
        """Sets :attr:`experts`.

        Raises:
            ConfigError: the model has no router that can follow them.
        """
        if experts is not None and not self._count:
            raise self._refusal("has no router")
        self.experts = experts

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._kind} {what} whose choice of experts can be replayed; leave enable-return-routed-experts out of "
            "the engine's args"
        )

    def _follow(self, router: Any, layer: int) -> None:
        own = router.forward

        def forward(*args: Any, **options: Any) -> Any:
            if self.experts is None:
                return own(*args, **options)
            with _Chosen(self.experts[:, layer].long()) as chosen:
                result = own(*args, **options)
            if chosen.calls != 1:
                raise self._refusal(f"has no router in layer {layer}")
            return result

        router.forward = forward


class _Chosen(TorchFunctionMode):
    """Replaces the choice of ``torch.topk`` by given experts (T, k), where they are not negative."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._experts, self.calls = experts, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (torch.topk, torch.Tensor.topk) and result.indices.shape == self._experts.shape:
            self.calls += 1
            indices = torch.where(self._experts < 0, result.indices, self._experts)
            return torch.return_types.topk((args[0].gather(-1, indices), indices))
        return result
