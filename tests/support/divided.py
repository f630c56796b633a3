"""Small models divided among ranks, one step with them, and comparisons. For scripts of the engine's environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from safetensors import safe_open  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found]
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megaflow_hpc.training.trainer.model import ProcessGroup
from megaflow_hpc.training.trainer.optimizer import Optimizer

ROWS = [[7, 33, 1], [2, 60], [24, 9, 5], [31]]
"""Lengths of the sequences in each row."""


def make_models() -> None:
    """Writes the models ``dense``, ``tied`` and ``moe`` to the working directory."""
    common = dict(
        vocab_size=260, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**common)).save_pretrained("dense")
    Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True)).save_pretrained("tied")
    moe = Qwen3MoeConfig(**common, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
    Qwen3MoeForCausalLM(moe).save_pretrained("moe")


def row(lengths: list[int], seed: int) -> tuple[Any, Any, list[int], Any]:
    """Returns tokens, positions, offsets, and every second token that may be judged."""
    tokens = torch.randint(0, 260, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return tokens, positions, offsets, (positions > 0).nonzero()[::2, 0]


def whole(tensor: Any) -> Any:
    """Returns a copy of a tensor that may be divided. All ranks must call it."""
    with torch.no_grad():
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def masters(optimizer: Optimizer) -> dict[str, Any]:
    """Returns copies of the whole masters. All ranks must call it."""
    return {name: whole(share) for name, share in optimizer.policy.shares(optimizer.masters).items()}


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Returns the largest difference, as a share of the largest entry of its tensor."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max() / b[n].abs().max().clamp(min=1e-30)) for n in a)


def learn(optimizer: Optimizer, ranks: ProcessGroup, copies: int = 1) -> tuple[float, dict[str, Any], float]:
    """Takes one step. Returns the loss over all rows, the gradients and their norm.

    Args:
        copies: number of successive ranks that compute the same rows.
    """
    total = 0.0
    for seed, lengths in list(enumerate(ROWS))[ranks.rank // copies :: ranks.count // copies]:
        tokens, positions, offsets, where = row(lengths, seed)
        logprobs, entropies = optimizer.policy(tokens, positions, offsets, where)
        loss = (logprobs * torch.linspace(0.5, 1.5, len(tokens))).sum() + 0.3 * (entropies * positions.sin()).sum()
        loss.backward()
        total += float(loss.detach())
    total = sum(ranks.gather(total)[::copies])
    optimizer.reduce()
    return total, {n: whole(m.grad) for n, m in optimizer.masters.items()}, optimizer.step()


def stored_tensors(folder: Path | str) -> dict[str, Any]:
    """Reads all safetensors of a directory."""
    found: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    return found
