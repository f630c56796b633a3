"""Attention over packed rows: each sequence of a row attends only to itself, causally.

On CUDA in half precision, one kernel for sequences of different lengths (``torch.nn.attention.varlen``) takes the whole
row. Elsewhere a loop runs scaled-dot-product attention on each sequence. Neither makes a T × T mask, except the loop
for a sliding window.

With *context parallelism* the tokens of a row are divided among C ranks. Attention needs whole sequences. So an
all-to-all exchange gives each rank all tokens of 1/C of the heads, and another one returns all heads of the rank's own
tokens (Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509). Each head is computed as on a single rank, so results
do not depend on C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]

from megaflow_hpc.training.layout import key_copies

ATTENTION_NAME = "megaflow_packed"
"""Name under which :func:`attend` is registered with transformers."""
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Packing:
    """The sequences of one row."""

    lengths: tuple[int, ...]
    """Length of each sequence, in the order of the row."""
    offsets: Any
    """int32 (S + 1), start of each sequence, then T, on the row's device."""
    group: Any = None
    """Process group of the ranks that share the row; ``None`` if a single rank has it."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: Any, group: Any = None) -> Packing:
        """Describes a row of sequences of these lengths."""
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return cls(tuple(lengths), offsets, group)


def register() -> None:
    """Registers :func:`attend` with transformers."""
    from transformers import AttentionInterface  # type: ignore[import-not-found]

    # torch prefers cuDNN on recent GPUs, but cuDNN builds forward and backward plans for each new sequence length.
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
    """Applies attention to each sequence of a row, by transformers' attention interface.

    Args:
        query, key, value: (1, heads, tokens of this rank, size).
        sliding_window: number of tokens that a token attends to, including itself.
        packing: the row's sequences; one sequence if ``None``.

    Returns:
        (1, tokens of this rank, heads, size)
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
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))  # kernels with a mask need as many key heads
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None and length > 1, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(attended.transpose(1, 2))
    return torch.cat(parts, 1).contiguous()


# --- context parallelism ---


def _with_all_tokens(query: Any, key: Any, value: Any, group: Any) -> list[Any]:
    ranks = dist.get_world_size(group)
    copies = key_copies(query.shape[1], key.shape[1], ranks)
    found = []
    for x in (query, key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)):
        _, heads, tokens, size = x.shape
        received = AllToAll.apply(x.reshape(ranks, heads // ranks, tokens, size), group)  # block j: tokens of rank j
        found.append(received.transpose(0, 1).reshape(1, heads // ranks, ranks * tokens, size))
    return found


def _with_all_heads(out: Any, group: Any) -> Any:
    ranks = dist.get_world_size(group)
    _, tokens, heads, size = out.shape
    received = AllToAll.apply(out.reshape(ranks, tokens // ranks, heads, size), group)  # block j: heads of rank j
    return received.transpose(0, 1).reshape(1, tokens // ranks, ranks * heads, size)


class AllToAll(torch.autograd.Function):
    """Sends block j of the first dimension to rank j. Gradients return the same way."""

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
