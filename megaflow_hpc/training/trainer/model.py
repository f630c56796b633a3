"""The policy in the trainer: log-probabilities and entropies of the tokens of a packed row.

A row holds several sequences without padding, and each attends only to itself. Attention runs over one sequence after
the other, causally. So no T × T mask is made, and the fused kernels apply. (Transformers' own ``sdpa`` recognises
packed sequences by their positions too, but makes that mask: 1 GB for 32,768 tokens.) Models that mix tokens in other
ways (convolutions, state spaces) would leak one sequence into another. :func:`load` compares a packed row with its
single sequences through the model's own forward, and refuses a model that gives different results.

Logits are computed for the judged tokens only, in chunks, and again in the backward pass. So the logits of 150,000
words × 32,768 tokens are never in memory together.

Several ranks (``torchrun``) share parameters by FSDP2. Gradients are summed over ranks, because losses divide by the
tokens of all ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch.utils.checkpoint import checkpoint  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError

CHUNK_LOGITS = 2**26
"""Number of logits in a chunk: 256 MB in float32. The backward pass needs three or four times as much."""
COLLECTIVE_TIMEOUT_S = 3600.0
"""Seconds that a rank waits for the others. torch's 10 minutes are less than writing a large version may take."""
ATTENTION_NAME = "megaflow_packed"
"""Name under which :func:`_attend` is registered with transformers."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_PACKING_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Maximum mean difference of log-probabilities between packed and single sequences. It is large for bfloat16, which
rounds logits around 16 by 0.06."""


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train one policy, from the perspective of one of them."""

    rank: int = 0
    count: int = 1
    device: Any = None
    background: Any = None
    """torch's group of the same processes for threads, on CPUs. ``None`` for a single process."""

    @property
    def first(self) -> bool:
        """True on rank 0, which writes files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.count > 1:
            dist.barrier()

    def tell(self, value: Any) -> Any:
        """Broadcasts the first rank's value to all ranks."""
        box = [value]
        if self.count > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Gathers the values of all ranks on every rank."""
        values = [value]
        if self.count > 1:
            values = [None] * self.count
            dist.all_gather_object(values, value)
        return values

    def leave(self) -> None:
        """Waits for all ranks, then leaves the group. A rank that exits without this would bring down the others."""
        if self.count > 1:
            dist.barrier()
            dist.destroy_process_group()


def join() -> ProcessGroup:
    """Joins the ranks that torchrun started (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``). A single rank opens no port.

    If ``MEGAFLOW_TRAINER_STORE`` is set, the ranks meet at this URL, in the format of ``init_process_group``. torch's
    own store listens on every address of a node; ranks on one node can use a file instead.
    """
    here, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if count > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = os.environ.get("MEGAFLOW_TRAINER_STORE")
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        dist.init_process_group(backend, store, rank=here, world_size=count, timeout=timeout)
        return ProcessGroup(here, count, device, dist.new_group(backend="gloo", timeout=timeout))
    return ProcessGroup(here, count, device)


class PolicyModel(torch.nn.Module):
    """A causal language model over packed rows; created by :func:`load`.

    Attributes:
        causal: the transformers model, with LoRA layers if configured.
        adapter: the peft model that wraps it, or ``None``.
        stored: dtype of the weights in the model directory and in published versions.
        temperature: sampling temperature, by which logits are divided.
    """

    def __init__(self, causal: Any, source: Path) -> None:
        super().__init__()
        self.causal = causal
        self.source = source
        self.words = int(causal.get_input_embeddings().weight.shape[0])
        self.stored = causal.dtype
        self.temperature = 1.0
        # The tuple hides the adapter from torch, which would otherwise find the parameters of ``causal`` twice.
        self._adapter: tuple[Any, ...] = ()

    @property
    def adapter(self) -> Any:
        return self._adapter[0] if self._adapter else None

    def forward(self, tokens: Any, positions: Any, offsets: Sequence[int], where: Any) -> tuple[Any, Any]:
        """Returns log-probabilities and entropies, each float32 (T), 0 for tokens that are not judged.

        Args:
            tokens: int64 (T), the concatenated sequences.
            positions: int64 (T), from 0 in each sequence.
            offsets: (S + 1), start of each sequence.
            where: int64 (N), indices of the tokens to judge. The first token of a sequence cannot be judged.
        """
        lengths = [end - begin for begin, end in pairwise(offsets)]
        inner = self.causal.base_model
        out = inner(input_ids=tokens[None], position_ids=positions[None], use_cache=False, sequence_lengths=lengths)
        hidden = out.last_hidden_state[0]
        picked, wanted = hidden[where - 1], tokens[where]
        size = max(1, CHUNK_LOGITS // self.words)
        parts = [
            checkpoint(self._judge, h, w, use_reentrant=False, preserve_rng_state=False)
            for h, w in zip(picked.split(size), wanted.split(size), strict=True)
        ]
        # A rank with only masked tokens must still take part in the backward pass.
        nothing = hidden.sum(dtype=torch.float32) * 0.0
        logprobs, entropies = (
            (torch.zeros(len(tokens), device=tokens.device) + nothing).index_copy(0, where, torch.cat(column))
            for column in zip(*parts, strict=True)
        )
        return logprobs, entropies

    def _judge(self, hidden: Any, tokens: Any) -> tuple[Any, Any]:
        """Returns the log-probabilities of ``tokens`` (n) given ``hidden`` (n, H), and the entropies of the
        distributions."""
        logits = self.causal.get_output_embeddings()(hidden).float()
        config = self.causal.config
        logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap:
            logits = cap * torch.tanh(logits / cap)
        every = torch.log_softmax(logits / self.temperature, -1)
        return every.gather(-1, tokens[:, None])[:, 0], -(every.exp() * every).sum(-1)

    def trained(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of each trained parameter, in a fixed order."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def share(self, ranks: ProcessGroup) -> PolicyModel:
        """Moves the parameters to the device, and shards them if there are several ranks."""
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
        # Layer by layer, so that the device never has to hold the whole model.
        for module in [m for m in self.modules() if type(m).__name__ in layers]:
            fully_shard(module, **how)
        fully_shard(self, **how)
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while reducing
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
        dtype: ``float32`` or ``bfloat16`` for computing. The optimizer keeps trained parameters in float32.
        lora: ``rank``, ``alpha`` and ``targets`` (module names, or ``all-linear``), as in the campaign file. Needs
            peft.
        recompute: compute layers again in the backward pass instead of keeping their results.

    Raises:
        ConfigError: the directory is not a model, peft is missing, or the model's sequences cannot be packed.
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
        # If trust_remote_code is unset, transformers asks on the terminal whether to run the model's code.
        causal = AutoModelForCausalLM.from_pretrained(
            source, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{source}: its config.json names its own Python code (auto_map), which is not run; train a model "
                "that transformers has a class for"
            ) from None
        raise ConfigError(f"{source}: cannot be loaded as a causal language model: {error}") from None
    for parameter in causal.parameters():
        parameter.data = parameter.data.clone()  # copied, because another process may replace the memory-mapped file
    for module in causal.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the engine samples without dropout
    policy = PolicyModel(causal, source)
    about = json.loads((source / "config.json").read_text())
    stored = about.get("dtype") or about.get("torch_dtype")
    policy.stored = getattr(torch, str(stored)) if stored in DTYPES or stored == "float16" else DTYPES[dtype]
    reference = _alone(policy)
    # torch prefers cuDNN on recent GPUs, but cuDNN builds forward and backward plans for each new sequence length.
    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register(ATTENTION_NAME, _attend)
    causal.set_attn_implementation(ATTENTION_NAME)
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
    """Applies attention to each sequence of the row (1, heads, T, size) alone, by transformers' attention interface.

    The causal kernels need no mask. If the sliding window is narrower than a sequence, that sequence gets a mask.
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
    """Returns the tokens and offsets of three short sequences that fit any vocabulary."""
    offsets = [0, 5, 6, 14]
    return torch.arange(1, offsets[-1] + 1) * 7 % words, offsets


@torch.no_grad()
def _alone(policy: PolicyModel) -> Any:
    """Returns the log-probabilities of :func:`_row`. Each sequence passes alone through the model's own forward and
    head."""
    tokens, offsets = _row(policy.words)
    policy.eval()
    tensors = []
    for begin, end in pairwise(offsets):
        logits = policy.causal(input_ids=tokens[None, begin:end], use_cache=False).logits[0].float()
        tensors.append(torch.log_softmax(logits[:-1], -1).gather(-1, tokens[begin + 1 : end, None])[:, 0])
    return torch.cat(tensors)


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
    if not (off := float((packed - alone).abs().mean())) <= MAX_PACKING_ERROR[policy.causal.dtype]:
        raise ConfigError(
            f"{policy.source}: {kind} gives different log-probabilities for packed and for single sequences (mean "
            f"difference {off:.2g}): its layers mix tokens in ways that this trainer does not support, or its head "
            "scales logits; train a model with softmax attention, or use another trainer"
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
    # Keep the model's dtype, because FSDP needs a uniform one. The optimizer holds float32 copies.
    return get_peft_model(causal, config, autocast_adapter_dtype=False)
