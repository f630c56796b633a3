"""Code that scripts of the engine's environment share: small models, an engine, a training, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from safetensors import safe_open  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.rundir.weight_delta import put_together
from megaflow_hpc.rundir.weight_source import base_of
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.trainer.loop import TrainingLoop
from megaflow_hpc.training.trainer.model import PolicyModel, ProcessGroup, load
from megaflow_hpc.training.trainer.optimizer import Optimizer
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Rollout
from tests.support.training import Pods, by_index

ROWS = [[7, 33, 1], [2, 60], [24, 9, 5], [31]]
"""Lengths of the sequences in each row."""


def make_models() -> None:
    """Writes the models ``dense``, ``tied`` and ``moe`` to the working directory."""
    from transformers import (  # type: ignore[import-not-found]
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

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


def copies(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns copies of whole tensors. All ranks must call it."""
    return {name: whole(tensor) for name, tensor in tensors.items()}


def gradients(policy: PolicyModel) -> dict[str, Any]:
    """Returns copies of the gradients there are. All ranks must call it."""
    return copies({name: p.grad for name, p in policy.trained() if p.grad is not None})


def masters(optimizer: Optimizer) -> dict[str, Any]:
    """Returns copies of the whole masters. All ranks must call it."""
    return copies(optimizer.policy.shares(optimizer.masters))


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Returns the largest difference, as a share of the largest entry of its tensor."""
    assert a.keys() == b.keys()
    shares = [(a[n] - b[n]).abs().max().double() / b[n].abs().max().clamp(min=1e-30) for n in a]
    return float(torch.stack(shares).max())  # NaN if one is


def furthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Returns the largest difference of the tensors of ``b``."""
    return float(torch.stack([(a[n] - b[n]).abs().max().double() for n in b]).max())  # NaN if one is


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Tells whether all tensors have the same names, types and bits."""
    return a.keys() == b.keys() and all(a[n].dtype == t.dtype and torch.equal(a[n], t) for n, t in b.items())


def refusal(call: Callable[[], object], kind: type[Exception] = ConfigError) -> str:
    """Returns the message of the error that a call raises, or an empty text."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


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


class Engine(Pods):
    """Samples with the log-probabilities of the published weights. ``spoil`` may change each sequence."""

    def __init__(
        self, run: RunDir, reward: Callable[[Rollout], float] = by_index, spoil: Callable[[Any], object] | None = None
    ) -> None:
        super().__init__(run, reward)
        self._here, self._spoil, self.models = run, spoil, dict[int, PolicyModel]()
        campaign = read_run(run).campaign
        self._base = campaign["model"]["path"]
        self._dtype = campaign["training"]["policies"]["default"]["dtype"]

    def store(self, block: int, trajectory: Trajectory, epoch: int = 0, damage: str = "") -> None:
        version = current(self._here, "default")
        if version.version not in self.models:
            path = Path(version.path or self._base)
            if (base := base_of(path)) is not None:
                path = put_together(path, self._here.weights / str(base), self._here.path / f"whole-{version.version}")
            self.models[version.version] = load(path, self._dtype)
        (one,) = trajectory.sequences
        tokens, where = torch.tensor(one.tokens), torch.tensor(one.loss_mask).nonzero()[:, 0]
        with torch.no_grad():
            scores = self.models[version.version](tokens, torch.arange(len(tokens)), [0, len(tokens)], where)[0]
        for t in where.tolist():
            one.logprobs[t] = float(scores[t])
        if self._spoil:
            self._spoil(one)
        super().store(block, trajectory, epoch, damage)


def train(
    run: RunDir | str, ranks: ProcessGroup, most: int | None = None, read: Any = None, **options: Any
) -> tuple[list[dict[str, Any]], TrainingLoop]:
    """Trains a run, at most so many steps. Returns the metrics of each step, and the trainer."""
    flow = Dataflow(run, rank=ranks.rank, ranks=ranks.count, say=lambda text: None, **options)
    trainer, found = TrainingLoop(flow, ranks, *([read] if read else [])), list[dict[str, Any]]()
    for metrics in trainer.steps():
        found.append(metrics)
        if len(found) == most:
            break
    flow.leave()
    return found, trainer
