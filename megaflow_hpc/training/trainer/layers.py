"""Parts of a model that the trainer replaces: attention over packed rows, and the choice of experts.

*Attention.* Each sequence of a row attends only to itself, causally. On CUDA in half precision, a variable-length
kernel (``torch.nn.attention.varlen``) processes the whole row at once. Otherwise, a loop runs scaled-dot-product
attention on each sequence. Only the loop with a sliding window creates a T × T mask.

With *context parallelism*, the tokens of a row are divided among C ranks. Since attention needs whole sequences, an
all-to-all exchange gives each rank all tokens for 1/C of the heads. After attention, a second exchange gives each rank
all heads for its own tokens (Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509). Each head is computed as on a
single rank, so results do not depend on C.

*Router replay.* Trainer and engine compute router logits with different rounding, so they may choose different top-k
experts for a token, which changes its log-probability. With replay, the recorded experts replace the router's top-k.
The weights of the experts are still computed from the trainer's own logits, so gradients reach the router (Ma et al.
2025, arXiv 2510.11370). A router is a module of a transformers class named ``…TopKRouter``, which calls ``torch.topk``
once to choose experts. The router's code runs unchanged, except that the result of this call is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch.overrides import TorchFunctionMode  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.layout import key_copies

ATTENTION_NAME = "megaflow_packed"
"""Name under which :func:`attend` is registered with transformers."""
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Packing:
    """Lengths and offsets of the sequences that form one row."""

    lengths: tuple[int, ...]
    """Length of each sequence, in the order of the row."""
    offsets: Any
    """Start of each sequence, followed by T: an int32 tensor of shape (S + 1) on the row's device."""
    group: Any = None
    """Process group of the ranks that share a row of tokens, or ``None`` if each row is on a single rank."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: Any, group: Any = None) -> Packing:
        """Creates the packing of a row from its sequences' lengths."""
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return cls(tuple(lengths), offsets, group)


def register() -> None:
    """Registers :func:`attend` with transformers."""
    from transformers import AttentionInterface  # type: ignore[import-not-found]

    # torch prefers cuDNN on recent GPUs, but cuDNN builds new forward and backward plans for each sequence length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(ATTENTION_NAME, attend)


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[Any, None]:
    """Applies attention within each sequence of a row. Implements transformers' attention interface.

    Args:
        query, key, value: tensors of shape (1, heads, tokens of this rank, head size).
        sliding_window: number of tokens that a token attends to, including itself.
        packing: the row's sequences. ``None`` means a single sequence.

    Returns:
        The attention output, of shape (1, tokens of this rank, heads, head size), and ``None`` instead of attention
        weights.
    """
    packing = packing or Packing.of([query.shape[2]], query.device)
    if packing.group is not None:
        query, key, value = _with_all_tokens(query, key, value, packing.group)
    compute = _fused if query.is_cuda and query.dtype in HALF else _one_by_one
    out = compute(query, key, value, packing, scaling, sliding_window)
    return (out if packing.group is None else _with_all_heads(out, packing.group)), None


def _fused(query: Any, key: Any, value: Any, packing: Packing, scaling: float | None, window: int | None) -> Any:
    from torch.nn.attention.varlen import varlen_attn  # type: ignore[import-not-found]

    longest = max(packing.lengths)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    before = -1 if window is None else window - 1
    offsets = packing.offsets
    out = varlen_attn(
        q, k, v, offsets, offsets, longest, longest, scale=scaling, window_size=(before, 0), enable_gqa=True
    )
    return out[None]


def _one_by_one(query: Any, key: Any, value: Any, packing: Packing, scaling: float | None, window: int | None) -> Any:
    parts = []
    copies = query.shape[1] // key.shape[1]
    for q, k, v in zip(*(x.split(packing.lengths, 2) for x in (query, key, value)), strict=True):
        mask, length = None, q.shape[2]
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)[None, None]
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))  # with a mask, kernels need equal numbers of heads
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None and length > 1, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(attended.transpose(1, 2))
    return torch.cat(parts, 1).contiguous()


# --- context parallelism ---


def _with_all_tokens(query: Any, key: Any, value: Any, group: Any) -> list[Any]:
    ranks = dist.get_world_size(group)
    copies = key_copies(query.shape[1], key.shape[1], ranks)
    exchanged = []
    for x in (query, key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)):
        _, heads, tokens, size = x.shape
        received = AllToAll.apply(x.reshape(ranks, heads // ranks, tokens, size), group)  # block j: tokens of rank j
        exchanged.append(received.transpose(0, 1).reshape(1, heads // ranks, ranks * tokens, size))
    return exchanged


def _with_all_heads(out: Any, group: Any) -> Any:
    ranks = dist.get_world_size(group)
    _, tokens, heads, size = out.shape
    received = AllToAll.apply(out.reshape(ranks, tokens // ranks, heads, size), group)  # block j: heads of rank j
    return received.transpose(0, 1).reshape(1, tokens // ranks, ranks * heads, size)


class AllToAll(torch.autograd.Function):
    """Sends block j of the first dimension to rank j. The backward pass sends the gradients back."""

    @staticmethod
    def forward(context: Any, blocks: Any, group: Any) -> Any:
        context.group = group
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=group)
        return received

    @staticmethod
    def backward(context: Any, gradient: Any) -> tuple[Any, None]:
        return AllToAll.apply(gradient, context.group), None


# --- router replay ---


class RouterReplay:
    """Makes a causal language model's routers replay the experts that the engine chose.

    Attributes:
        experts: experts for the current row, int16 (T, layers, experts per token). -1 lets the router choose, and
            ``None`` lets it choose for all tokens. Backward passes that recompute layers read this attribute again.
        shape: numbers of layers, of experts per token, and of experts. ``None`` if the model is not a mixture of
            experts.
    """

    def __init__(self, causal: Any) -> None:
        config = causal.config.get_text_config()
        self.experts: Any = None
        self._kind, self._count = type(causal).__name__, 0
        per_token = getattr(config, "num_experts_per_tok", None)
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        count = next((own for name in names if (own := getattr(config, name, None))), None)
        layers = int(config.num_hidden_layers)
        self.shape = (layers, int(per_token), int(count)) if per_token and count else None

    def attach(self, causal: Any) -> None:
        """Patches the model's routers so that they use :attr:`experts`."""
        for name, module in causal.named_modules():
            layer = re.search(r"\blayers\.(\d+)\.", name)
            if type(module).__name__.endswith("TopKRouter") and layer:
                self._follow(module, int(layer[1]))
                self._count += 1

    def replay(self, experts: Any) -> None:
        """Sets the experts to replay in the next forward pass.

        Raises:
            ConfigError: the model has no router that can replay experts.
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
    """Replaces the indices that ``torch.topk`` returns with the given experts (T, k). Keeps the indices where the
    expert is negative."""

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
