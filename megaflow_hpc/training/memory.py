"""Predicts the memory and the floating-point operations that training needs, from a model's ``config.json`` and the
headers of its safetensors files.

A GPU's peak memory is the maximum over these phases of a step. Each phase includes the parameters, master weights,
optimizer moments and gradients, which stay allocated:

====== ================================================================================================
layers the backward pass of a layer: the inputs of the layers before it, its own recomputed activations, the
       gradients in flight, the gathered layer and the next one, and the last layer's gradients before reduction
logits the backward pass of the last chunk of logits: a chunk in float32, and gradients of the output embedding
reduce unsharded gradients: with FSDP, of both embeddings, in the model's dtype and in float32, at the
       end of the backward pass; on a single GPU, of a layer's largest matrix, while they are added to
       float32
update the optimizer step
====== ================================================================================================

The formulas apply to :mod:`~megaflow_hpc.training.trainer` with transformers models that use RMSNorm in float32, rotary
embeddings, and gated MLPs or experts. ``tests/bench/memory.py`` compares them with torch's memory tracker. They assume
that all experts get the same number of tokens. They omit the CUDA context, NCCL's buffers and fragmentation, which take
a few GB. For the vision part of an image-text model, they include the parameters but not the activations, which depend
on the images in a row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.safetensors import BITS, read_directory
from megaflow_hpc.training.layout import Layout, key_copies

CHUNK_LOGITS = 2**26
"""Number of logits that the trainer computes at once."""
PROCESS_BYTES = 10**9
"""Host memory in bytes of a rank on a GPU, without tensors. Python, torch, transformers and CUDA's libraries need it.
Estimated."""
MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of a safetensors file in a published version. The writer holds each file in memory twice."""
GPU_GB = {
    "a40": 48, "b200": 180, "h100": 80, "h200": 141, "l4": 24, "l40": 48, "l40s": 48, "mi300x": 192, "t4": 16,
}  # fmt: skip
"""Memory in GB (10^9 bytes) by GPU type, from the data sheets. Types sold with several memory sizes are missing."""
GPU_TFLOPS = {
    "a100": 312, "a40": 150, "b200": 2250, "h100": 989, "h200": 989, "l4": 121, "l40": 181, "l40s": 362, "mi300x": 1307,
}  # fmt: skip
"""Peak dense matmul throughput in bfloat16, in TFLOPS, from the data sheets. For GPUs sold in several variants, this is
the fastest variant's figure."""
SHARE_OF_PEAK = 0.25
"""Assumed fraction of :data:`GPU_TFLOPS` that training reaches. A model with 1.7 billion parameters reached 24 to 29 %
on one H200. Communication between GPUs lowers the fraction."""


VISION = re.compile(r"(^|\.)(visual|vision_\w+|\w*_?projector|mlp_AR|connector|aligner|embed_vision)\.")
"""Matches parameter names of an image-text model's vision tower and projection."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model."""

    name: str
    hidden: int
    """Hidden size, which is the number of features per token between layers."""
    words: int
    """Vocabulary size."""
    layers: int
    heads: int
    key_heads: int
    """Number of key-value heads."""
    head: int
    """Features per attention head."""
    intermediate: int
    """Features inside the MLP, or inside the experts that process every token."""
    experts: int
    """Number of experts per layer. 0 for dense models."""
    chosen: int
    """Number of experts that process each token."""
    expert_intermediate: int
    """Features inside each routed expert."""
    norms: int
    """Number of norms over the hidden features in each layer."""
    head_norms: bool
    """True if queries and keys are normalised."""
    ends: int
    """Number of parameters outside the layers, such as those of embeddings."""
    output: int
    """Number of parameters of the output embedding. A tied input embedding shares them."""
    dense: int
    """Number of parameters in the largest layer, excluding experts."""
    expert: int
    """Total number of parameters of the experts in the largest layer."""
    all_experts: int
    """Total number of parameters of the experts in all layers."""
    total: int
    """Number of parameters of the whole model."""
    largest: int
    """Number of parameters of the largest tensor."""
    linear: Mapping[str, int]
    """Maps the name of each matrix inside a layer to the sum of its numbers of inputs and outputs."""
    stored_bytes: int
    """Size of the model's tensors on disk in bytes."""
    limit: int | None
    """Maximum number of positions, or ``None`` if the config has no limit."""
    vision: int = 0
    """Number of parameters of the vision part, included in ``total``. 0 if the model takes text only."""

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Reads ``config.json`` and the headers of the safetensors files.

        Raises:
            ConfigError: a file is missing or damaged, or the config lacks a required size.
        """
        path = folder / "config.json"
        try:
            config: dict[str, Any] = json.loads(read_regular(path))
            config = config | (config.get("text_config") or {})
            heads = int(config["num_attention_heads"])
            experts = int(_first(config, "num_experts", "num_local_experts", "n_routed_experts") or 0)
            expert_size = int(config.get("moe_intermediate_size") or config["intermediate_size"]) if experts else 0
            shared = config.get("shared_expert_intermediate_size")
            shared = shared or expert_size * (config.get("n_shared_experts") or 0)
            hidden, words = int(config["hidden_size"]), int(config["vocab_size"])
            sizes = {
                "hidden": hidden,
                "words": words,
                "layers": int(config["num_hidden_layers"]),
                "heads": heads,
                "key_heads": int(config.get("num_key_value_heads") or heads),
                "head": int(config.get("head_dim") or hidden // heads),
                "intermediate": int(shared) if experts else int(config["intermediate_size"]),
                "experts": experts,
                "chosen": int(config["num_experts_per_tok"]) if experts else 0,
                "expert_intermediate": expert_size,
            }
            limit = config.get("max_position_embeddings")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); memory cannot be predicted") from None
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            raise ConfigError(f"{path}: is damaged ({error!r:.100}); memory cannot be predicted") from None
        except KeyError as error:
            raise ConfigError(f"{path}: lacks {error}, without which memory cannot be predicted") from None
        tensors = read_directory(folder)
        if not tensors:
            raise ConfigError(f"{folder}: has no safetensors, whose headers give the sizes of all parameters")
        dense, inside, ends, norms = dict[str, int](), dict[str, int](), 0, dict[str, int]()
        head_norms, linear, vision = False, dict[str, int](), 0
        for name, (_, shape) in tensors.items():
            count, layer = math.prod(shape), re.search(r"\.(\d+)\.", name)
            if VISION.search(name):
                vision += count
                continue
            if layer is None:
                ends += count
                continue
            number = name[: layer.end()]
            which = inside if ".experts." in name else dense
            which[number] = which.get(number, 0) + count
            if len(shape) >= 2:
                linear[name] = sum(shape[-2:]) * math.prod(shape[:-2])
            elif "norm" in name and shape == (hidden,):
                norms[number] = norms.get(number, 0) + 1
            head_norms |= name.endswith(("q_norm.weight", "k_norm.weight"))
        total = sum(math.prod(shape) for _, shape in tensors.values())
        return cls(
            name=folder.name,
            **sizes,
            norms=max(norms.values(), default=2),
            head_norms=head_norms,
            ends=ends,
            output=min(words * hidden, ends),
            dense=max(dense.values(), default=0),
            expert=max(inside.values(), default=0),
            all_experts=sum(inside.values()),
            total=total,
            largest=max(math.prod(shape) for _, shape in tensors.values()),
            linear=linear,
            stored_bytes=sum(math.prod(shape) * BITS.get(dtype, 16) // 8 for dtype, shape in tensors.values()),
            limit=int(limit) if limit else None,
            vision=vision,
        )

    @property
    def tied(self) -> bool:
        """True if the input and output embeddings share their parameters."""
        return self.ends < 2 * self.output


@dataclass(frozen=True)
class Prediction:
    """Predicted memory for training, in bytes."""

    moments: Mapping[str, Mapping[str, int]]
    """GPU memory in bytes, by phase of a step and by use."""
    load: int
    """Host memory of a node in bytes while its ranks load the model."""
    node: int
    """Host memory of the first node in bytes during training. Includes offloaded optimizers, and the copies from which
    checkpoints and versions are written."""
    checkpoint: int
    """Size of a checkpoint in bytes."""
    version: int
    """Size of a published version in bytes."""
    trained: int
    """Number of trained parameters."""
    token_flops: float
    """Floating-point operations per token of one forward and backward pass."""
    seconds: float | None
    """Estimated seconds for the forward and backward passes of a million tokens on all GPUs together, without
    communication. ``None`` if the GPU type is unknown or ``dtype`` is not bfloat16."""

    @property
    def moment(self) -> str:
        """Phase of a step with the highest memory use."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def parts(self) -> Mapping[str, int]:
        """GPU memory in bytes at the peak, by use."""
        return self.moments[self.moment]

    @property
    def peak(self) -> int:
        """Peak memory of a GPU in bytes."""
        return sum(self.parts.values())


def predict(
    model: ModelShape,
    settings: PolicyTraining,
    gpus: int = 1,
    nodes: int = 1,
    tokens: int | None = None,
    gpu_type: str | None = None,
) -> Prediction:
    """Predicts the memory that training needs, and estimates its time.

    Args:
        model: sizes of the model.
        settings: settings of the policy, of which ``microbatch``, ``recompute``, ``dtype``, ``parallel``, ``lora`` and
            ``optimizer.offload`` are used.
        gpus: number of GPUs per node. 0 means a single process on CPUs.
        nodes: number of nodes.
        tokens: number of tokens in a row. Default: ``microbatch``.
        gpu_type: Slurm's name for the GPU type.

    Raises:
        ConfigError: ``parallel`` does not divide the ranks or the model's heads.
    """
    layout = Layout(nodes * max(gpus, 1), **settings.parallel.model_dump())
    layout.check_heads(model.name, model.heads, model.key_heads)
    size = 2 if settings.dtype == "bfloat16" else 4
    several, tensor = layout.ranks > 1, layout.tensor
    row = -(-(tokens or settings.microbatch) // layout.context)

    # Parameters that a rank stores, and parameters with which it computes.
    ends_divided = 1 if model.tied or model.words % tensor else tensor
    expert_shares = layout.ranks // layout.replicas
    dense_all = model.total - model.all_experts - model.ends - model.vision
    share = (dense_all / tensor + model.ends / ends_divided) / layout.sharded + model.all_experts / expert_shares
    vision = model.vision / layout.sharded
    layer = model.dense / tensor + model.expert / layout.expert
    gathered = model.dense / tensor + (model.expert / layout.expert if layout.expert < expert_shares else 0)
    ends, output = model.ends / ends_divided, model.output / ends_divided

    # Memory that stays allocated.
    adapters = (settings.lora or 0) * sum(model.linear.values())
    sees = settings.vision == "trained"
    trained = adapters or share + vision * sees
    on_gpu = 0.0 if settings.optimizer.offload else trained
    frozen = share + vision if adapters else vision * (not sees)
    stays: dict[str, float] = {
        "parameters": size * (frozen + trained),
        "masters": 4 * on_gpu if size == 2 else 0,
        "moments": 8 * on_gpu,
        "gradients": 4 * on_gpu,
    }
    full = not adapters
    held = _held(model, layout, size)
    flight = _in_flight(model, layout, size)
    inputs = size * model.hidden * row
    kept = inputs if settings.recompute else (held + size * model.hidden) * row
    matrix = max(2 / 3 * model.expert / layout.expert, model.hidden * model.intermediate / tensor) if full else 0
    gather = size * (ends + 2 * gathered) if several else 0
    reduced = 4 * layer if several and full else 0
    head = size * output if full and (several or model.tied) else 0
    chunk = min(CHUNK_LOGITS, row * model.words)
    to_master = 8 if size == 2 else 4  # bytes per gradient while it is added to its master, without FSDP
    logits: float = max(16 * chunk, head + 12 * chunk)
    if full:
        logits = max(logits, (3 * size if several or model.tied else to_master) * output)
    last = (4 + 4 * size) * model.hidden * row  # last norm, target tokens, and their gradients
    down = size * model.hidden * model.intermediate / tensor if several and full else 0  # gradient of the last matrix
    moments: dict[str, dict[str, float]] = {
        "layers": stays
        | {
            "gathered": gather,
            "reduction": reduced + head + down,
            "kept": kept * max(model.layers - 1, 0) + inputs,
            "layer": (held + flight) * row,
        },
        "logits": stays
        | {
            "gathered": size * (ends + gathered) if several else 0,
            "kept": kept * model.layers,
            "logits": logits + last,
        },
        "reduce": stays
        | (
            {"reduction": (size + 4) * ends if full else 0}
            if several
            else {
                "reduction": to_master * matrix + head,
                "kept": kept * model.layers,
                "layer": (held + flight - _inside(model, layout, size)) * row,
            }
        ),
        "update": stays | {"optimizer": 0 if gpus or settings.optimizer.offload else 4 * trained},
    }

    # Host memory and file sizes.
    ranks = max(gpus, 1)
    everything = adapters or model.total - model.vision * (not sees)
    version = adapters * size if adapters else model.stored_bytes
    load = ranks * (PROCESS_BYTES + size * (share + vision)) + size * model.largest
    flops = _token_flops(model, settings, tokens or settings.microbatch)
    speed = gpu_flops(gpu_type) if gpus and size == 2 else None
    node = ranks * (PROCESS_BYTES + 12 * trained + (16 * trained if settings.optimizer.offload else 0))
    return Prediction(
        moments={name: {part: round(value) for part, value in parts.items()} for name, parts in moments.items()},
        load=round(load),
        node=round(node + version + min(version, MAX_SHARD_BYTES)),
        checkpoint=12 * everything,
        version=version,
        trained=everything,
        token_flops=flops,
        seconds=1e6 * flops / (layout.ranks * speed) if speed else None,
    )


def _held(model: ModelShape, layout: Layout, size: int) -> float:
    """Returns the bytes per token that the forward pass of a layer keeps for the backward pass."""
    query = model.heads * model.head / layout.tensor
    key = model.key_heads * model.head / layout.tensor
    norm = 4 + size  # a float32 copy, and the normalised values
    held: float = model.norms * (norm + size) * model.hidden
    held += (norm if model.head_norms else 0) * (query + key)
    copies = 1
    if layout.context > 1:
        heads = model.heads // layout.tensor, model.key_heads // layout.tensor
        copies = key_copies(*heads, layout.context)
        held += size * query  # attention output before the exchange of heads
    held += size * (2 * query + 2 * key * copies) + 4 * model.heads / layout.tensor
    return held + _inside(model, layout, size)


def _inside(model: ModelShape, layout: Layout, size: int) -> float:
    """Returns the bytes per token that the forward pass of an MLP, or of experts, keeps for the backward pass."""
    held = 4 * size * model.intermediate / layout.tensor
    if model.experts:
        rows = model.chosen
        held += rows * size * ((3 if layout.expert > 1 else 2) * model.hidden + 4 * model.expert_intermediate)
        held += (8 + size) * model.experts + 40 * rows  # the router, and the order of tokens
    return held


def _in_flight(model: ModelShape, layout: Layout, size: int) -> float:
    """Returns the bytes per token that the backward pass of a layer needs temporarily."""
    flight = size * model.hidden
    if model.experts:
        return flight + (2 if layout.expert > 1 else 3) * model.chosen * size * model.hidden
    return flight + 2 * size * model.intermediate / layout.tensor


def _token_flops(model: ModelShape, settings: PolicyTraining, tokens: int) -> float:
    """Returns the floating-point operations per token of one forward and backward pass over one sequence.

    Per parameter, a matrix takes 2 operations in the forward pass, 2 for the gradient of its input, and 2 for its own
    gradient unless only adapters are trained. The backward pass always recomputes the logits and, with ``recompute``,
    also the layers. The vision part is not counted.
    """
    layers = model.total - model.all_experts - model.ends - model.vision
    layers += model.all_experts * model.chosen // max(model.experts, 1)
    attention = 2 * model.layers * model.heads * model.head * tokens  # causal, forward
    passes = 2 if settings.lora else 3
    again = int(settings.recompute)
    return 2 * layers * (passes + again) + 2 * model.output * (passes + 1) + attention * (3.5 + again)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name)), None)


def gpu_flops(gpu_type: str | None) -> float | None:
    """Returns the bfloat16 operations per second that training is assumed to reach on a GPU. Returns ``None`` for an
    unknown type."""
    peak = _of_type(gpu_type, GPU_TFLOPS)
    return None if peak is None else SHARE_OF_PEAK * peak * 1e12


def gpu_memory(gpu_type: str | None) -> float | None:
    """Returns the memory of a GPU in GB (10^9 bytes). Returns ``None`` if GPUs of this type have different sizes.

    Args:
        gpu_type: Slurm's name for the type, such as ``a100_80gb`` or ``h100``.
    """
    if stated := re.search(r"(\d+)\s*gb", (gpu_type or "").lower()):
        return float(stated[1])
    return _of_type(gpu_type, GPU_GB)


def _of_type(gpu_type: str | None, values: Mapping[str, int]) -> float | None:
    words = re.split(r"[^a-z0-9]+", (gpu_type or "").lower())
    return next((float(values[word]) for word in words if word in values), None)
