"""The policy as the trainer holds it: log-probabilities and entropies of the tokens of a packed row.

A row holds several sequences without padding. Each attends to itself alone: attention runs over one sequence after the
other, causally, so that no mask of T × T is made, and the fused kernels apply. (Transformers' own ``sdpa`` recognises
packed sequences by their positions too, and makes that mask: 1 GB for 32,768 tokens.) Of models that mix tokens in
other ways (convolutions, state spaces) sequences would leak into one another; :func:`load` compares a packed row with
its sequences one by one through the model's own forward, and refuses what differs.

Logits are computed for the tokens that count, a chunk at a time, and again in the backward pass, so that those of
150,000 words × 32,768 tokens never lie in memory together.

Several ranks (``torchrun``) share parameters by FSDP2; gradients are summed over ranks, as losses divide by the tokens
of all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch.utils.checkpoint import checkpoint  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError

LOGITS = 2**26
"""Logits computed at once, 256 MB in float32; backward holds three or four times as much."""
ATTENTION = "megaflow_packed"
"""The name under which transformers knows :func:`_attend`."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Mean difference of log-probabilities, packed against alone, above which a model does not pack; bfloat16 rounds logits
around 16 by 0.06."""


@dataclass(frozen=True)
class ProcessGroup:
    """This process among those that train one policy."""

    rank: int = 0
    count: int = 1
    device: Any = None

    @property
    def first(self) -> bool:
        """Whether it is the rank that writes."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.count > 1:
            dist.barrier()

    def tell(self, value: Any) -> Any:
        """Returns the first rank's value on every rank."""
        box = [value]
        if self.count > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on every rank."""
        found = [value]
        if self.count > 1:
            found = [None] * self.count
            dist.all_gather_object(found, value)
        return found

    def leave(self) -> None:
        """Waits for all ranks, and parts with them; one that just exits takes others down."""
        if self.count > 1:
            dist.barrier()
            dist.destroy_process_group()


def join() -> ProcessGroup:
    """Joins the ranks that torchrun started (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``); alone, no port is opened.

    They meet at ``MEGAFLOW_TRAINER_STORE``, a URL as ``init_process_group`` takes it, where that is set: torch's own
    store listens at every address of a node, and those of one node can do with a file.
    """
    here, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if count > 1:
        backend, store = "nccl" if device.type == "cuda" else "gloo", os.environ.get("MEGAFLOW_TRAINER_STORE")
        dist.init_process_group(backend, store, rank=here, world_size=count)
    return ProcessGroup(here, count, device)


class PolicyModel(torch.nn.Module):
    """A causal language model over packed rows; make one with :func:`load`.

    Attributes:
        causal: the transformers model, with LoRA layers if configured.
        adapter: the peft model that wraps it, or ``None``.
        stored: dtype of the weights in the model directory and in written versions.
        temperature: sampling temperature, by which logits are divided.
    """

    def __init__(self, causal: Any, source: Path) -> None:
        super().__init__()
        self.causal = causal
        self.source = source
        self.words = int(causal.get_input_embeddings().weight.shape[0])
        self.stored = causal.dtype
        self.temperature = 1.0
        self._adapter: tuple[Any, ...] = ()  # in a tuple: it holds ``causal``, whose parameters are to be found once

    @property
    def adapter(self) -> Any:
        return self._adapter[0] if self._adapter else None

    def forward(self, tokens: Any, positions: Any, offsets: Sequence[int], where: Any) -> tuple[Any, Any]:
        """Returns log-probabilities and entropies, each float32 (T), 0 where not asked for.

        Args:
            tokens: int64 (T), the sequences one after the other.
            positions: int64 (T), from 0 in each sequence.
            offsets: (S + 1), where sequences begin.
            where: int64 (N), the tokens to judge, each predicted from the one before; never a sequence's first.
        """
        lengths = [end - begin for begin, end in pairwise(offsets)]
        inner = self.causal.base_model
        out = inner(input_ids=tokens[None], position_ids=positions[None], use_cache=False, sequence_lengths=lengths)
        hidden = out.last_hidden_state[0]
        picked, wanted = hidden[where - 1], tokens[where]
        size = max(1, LOGITS // self.words)
        parts = [
            checkpoint(self._judge, h, w, use_reentrant=False, preserve_rng_state=False)
            for h, w in zip(picked.split(size), wanted.split(size), strict=True)
        ]
        nothing = hidden.sum(dtype=torch.float32) * 0.0  # ranks whose tokens are all masked take part in backward too
        logprobs, entropies = (
            (torch.zeros(len(tokens), device=tokens.device) + nothing).index_copy(0, where, torch.cat(column))
            for column in zip(*parts, strict=True)
        )
        return logprobs, entropies

    def _judge(self, hidden: Any, tokens: Any) -> tuple[Any, Any]:
        """Log-probabilities of ``tokens`` (n) after ``hidden`` (n, H), and the entropy of what could come there."""
        logits = self.causal.get_output_embeddings()(hidden).float()
        config = self.causal.config
        logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap:
            logits = cap * torch.tanh(logits / cap)
        every = torch.log_softmax(logits / self.temperature, -1)
        return every.gather(-1, tokens[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def trained(self) -> Iterator[tuple[str, Any]]:
        """Yields name and parameter of what is trained, in a fixed order."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def share(self, ranks: ProcessGroup) -> PolicyModel:
        """Moves the parameters to the device, and shares them among the ranks where there are several."""
        if ranks.count == 1:
            return self.to(ranks.device)
        from torch.distributed.device_mesh import init_device_mesh  # type: ignore[import-not-found]
        from torch.distributed.fsdp import (  # type: ignore[import-not-found]
            FSDPModule,
            MixedPrecisionPolicy,
            fully_shard,
        )

        mesh = init_device_mesh(ranks.device.type, (ranks.count,))
        how = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
            "reshard_after_forward": True,
        }
        layers = set(self.causal._no_split_modules or ())
        # Layer by layer to the device, and only a share of it stays there: the whole need not fit.
        for module in [m for m in self.modules() if type(m).__name__ in layers]:
            fully_shard(module, **how)
        fully_shard(self, **how)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo scales nothing by itself
        return self


def load(
    path: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    lora: Mapping[str, Any] | None = None,
    recompute: bool = False,
) -> PolicyModel:
    """Loads a causal language model from a Hugging Face directory, never from the network.

    Args:
        path: the directory.
        dtype: ``float32`` or ``bfloat16``, in which is computed; what is trained is kept in float32 by the optimizer.
        lora: ``rank``, ``alpha`` and ``targets`` (names of modules, or ``all-linear``), as in the campaign file; needs
            peft.
        recompute: compute layers again in the backward pass instead of keeping what they computed.

    Raises:
        ConfigError: no model directory, no peft, or a model whose sequences cannot be packed.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM  # type: ignore[import-not-found]
    from transformers.utils.logging import disable_progress_bar  # type: ignore[import-not-found]

    disable_progress_bar()
    source = Path(path)
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"{source}: has no config.json; give the directory of a Hugging Face model on this file system"
        )
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    try:
        # Without trust_remote_code, transformers would ask on the terminal whether to run the model's code.
        causal = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{source}: its config.json names Python code of its own (auto_map), which is not run; train a model "
                "that transformers has a class for"
            ) from None
        raise ConfigError(f"{source}: is not loaded as a causal language model: {error}") from None
    for parameter in causal.parameters():
        parameter.data = parameter.data.clone()  # they are views of the mapped file, which others may replace
    for module in causal.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # what was sampled without is judged without
    policy = PolicyModel(causal, source)
    about = json.loads((source / "config.json").read_text())
    stored = about.get("dtype") or about.get("torch_dtype")
    policy.stored = getattr(torch, str(stored)) if stored in DTYPES or stored == "float16" else DTYPES[dtype]
    reference = _alone(policy)
    # cuDNN, which torch prefers on recent GPUs, builds a plan for each new length of a sequence, forward and backward.
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(ATTENTION, _attend)
    causal.set_attn_implementation(ATTENTION)
    _check_packing(policy, reference)
    if lora is not None:
        policy._adapter = (_with_lora(causal, lora),)
    if recompute:
        causal.gradient_checkpointing_enable({"use_reentrant": False})
        if lora is not None:
            causal.enable_input_require_grads()
    return policy.train()


def _attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_lengths: Sequence[int] = (),
    **others: Any,
) -> tuple[Any, None]:
    """Attention of each sequence of the row (1, heads, T, size) to itself; as transformers' attention interface asks.

    Its causal kernels need no mask. A window narrower than a sequence has one, of that sequence alone.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # type: ignore[import-not-found]

    parts = []
    lengths = list(sequence_lengths) or [query.shape[2]]
    for q, k, v in zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True):
        mask, length = None, q.shape[2]
        if sliding_window is not None and sliding_window < length:
            mask = (
                torch.ones(length, length, dtype=torch.bool, device=q.device)
                .tril()
                .triu(1 - sliding_window)[None, None]
            )
        parts.append(sdpa_attention_forward(module, q, k, v, mask, 0.0, scaling)[0])
    return torch.cat(parts, 1), None


def _row(words: int) -> tuple[Any, list[int]]:
    """Three short sequences that any vocabulary has."""
    offsets = [0, 5, 6, 14]
    return torch.arange(1, offsets[-1] + 1) * 7 % words, offsets


@torch.no_grad()
def _alone(policy: PolicyModel) -> Any:
    """Log-probabilities of :func:`_row`, each sequence by itself through the model's own forward and head."""
    tokens, offsets = _row(policy.words)
    policy.eval()
    found = []
    for begin, end in pairwise(offsets):
        logits = policy.causal(input_ids=tokens[None, begin:end], use_cache=False).logits[0].float()
        found.append(torch.log_softmax(logits[:-1], -1).gather(-1, tokens[begin + 1 : end, None])[:, 0])
    return torch.cat(found)


@torch.no_grad()
def _check_packing(policy: PolicyModel, alone: Any) -> None:
    tokens, offsets = _row(policy.words)
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(offsets)])
    where = (positions > 0).nonzero()[:, 0]
    kind = type(policy.causal).__name__
    try:
        packed = policy(tokens, positions, offsets, where)[0][where]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{policy.source}: {kind} cannot be trained on packed sequences: {error}") from error
    if not (off := float((packed - alone).abs().mean())) <= TOLERANCE[policy.causal.dtype]:
        raise ConfigError(
            f"{policy.source}: {kind} gives other log-probabilities for packed sequences than for each alone (mean "
            f"difference {off:.2g}): its layers mix tokens in ways that this trainer does not know, or its head scales "
            "logits; train a model with softmax attention, or use a trainer of your own"
        )


def _with_lora(causal: Any, lora: Mapping[str, Any]) -> Any:
    try:
        from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(f"lora: needs peft in the trainer's environment (pip install peft): {error}") from None
    config = LoraConfig(
        r=int(lora["rank"]),
        lora_alpha=float(lora["alpha"]),
        target_modules="all-linear" if lora["targets"] == "all-linear" else list(lora["targets"]),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    # In the model's dtype, as FSDP takes parameters of one; the optimizer holds them in float32.
    return get_peft_model(causal, config, autocast_adapter_dtype=False)
