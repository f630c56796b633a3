"""Creates models with VeOmni's implementations and kernels, for ``training.trainer: veomni``.

VeOmni (ByteDance Seed) creates the model, divides it among the ranks (FSDP2, experts) and reads its weights. Loss,
optimizer, checkpoints and publishing are the same as in this package's own trainer, and so are the names of parameters.
So training can continue from a checkpoint of either trainer.

On GPUs, mixtures of experts use VeOmni's grouped Triton kernel. Norms, activations and rotary embeddings use
liger-kernel if it is installed. On CPUs, everything is plain PyTorch.

(VeOmni 0.1.12 from PyPI: ``models/auto.py:build_foundation_model``,
``distributed/torch_parallelize.py:build_parallelize_model``, ``checkpoint/dcp_checkpointer.py:ModelState``.)
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from torch.distributed import fsdp  # type: ignore[import-not-found]
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig  # type: ignore[import-not-found]
from transformers.conversion_mapping import get_model_conversion_mapping  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.layout import Layout
from megaflow_hpc.training.trainer.model import PolicyModel, ProcessGroup
from megaflow_hpc.training.trainer.sharding import Grid, check_model

VERSION = "0.1.12"
"""Supported version of VeOmni. The check is strict because this module uses internal interfaces."""


class VeOmniModel(PolicyModel):
    """A policy with a model that VeOmni created and divided."""

    def __init__(self, causal: Any, source: Path, ranks: ProcessGroup) -> None:
        super().__init__(causal, source, ranks)
        if ranks.count > 1:
            # FSDP's root is the model, not this module, and the root's hooks gather the embeddings, the last norm and
            # the head.
            causal.set_reshard_after_forward(True, recurse=False)  # by default, the root stays gathered
            causal.forward_row = super().forward
            fsdp.register_fsdp_forward_method(causal, "forward_row")
            self.forward = causal.forward_row  # type: ignore[method-assign]

    def shares(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Converts tensors to shares of unsharded tensors. With several expert groups, VeOmni's parameters are shares
        of one group's tensors only."""
        from veomni.checkpoint.dcp_checkpointer import ModelState  # type: ignore[import-not-found]

        if not getattr(self.causal, "_fqn2spec_info", None):
            return dict(tensors)
        prefix = "causal."
        named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        named = ModelState(self.causal).get_state_dict_with_extra_parallel_dim_preprocess(named, "restore")
        return {name: named[name.removeprefix(prefix)] for name in tensors}


def read(source: Path, dtype: str, ranks: ProcessGroup, layout: Layout) -> PolicyModel:
    """Reads a model with VeOmni. All ranks must call it.

    Raises:
        ConfigError: VeOmni is missing or has another version, lacks this model, or cannot divide it according to the
        layout.
    """
    if (found := _installed()) != VERSION:
        raise ConfigError(
            f"training.trainer: veomni needs VeOmni {VERSION} in the trainer's environment, which has {found}; "
            f"run there: pip install --no-deps veomni=={VERSION}"
        )
    # VeOmni could run code from the model directory and load pickled weights. This trainer allows neither.
    if "auto_map" in (source / "config.json").read_text():
        raise ConfigError(f"{source}: its config.json names its own Python code (auto_map), which is not run")
    if not any(source.glob("*.safetensors")):
        raise ConfigError(f"{source}: has no *.safetensors; convert its weights with transformers' save_pretrained")
    from veomni.models.loader import MODELING_REGISTRY  # type: ignore[import-not-found]

    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    kind = config.model_type
    if kind not in MODELING_REGISTRY.valid_keys() or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        known = ", ".join(sorted(MODELING_REGISTRY.valid_keys()))
        raise ConfigError(f"{source}: VeOmni has no language model {kind!r} among {known}; use training.trainer: own")
    if layout.expert > 1 and _kernels(ranks.device.type, dtype)["moe_implementation"] == "eager":
        raise ConfigError(
            "parallel.expert: VeOmni sends tokens to experts in bfloat16 on GPUs only; leave it out, or use "
            "training.trainer: own"
        )
    return divided(config, source, dtype, ranks, layout)


def divided(config: Any, source: Path, dtype: str, ranks: ProcessGroup, layout: Layout) -> VeOmniModel:
    """Creates a model from a transformers ``config``, shards it, and loads its weights from ``source``.

    Raises:
        ConfigError: the model cannot be divided according to the layout.
    """
    from veomni.arguments.arguments_types import (  # type: ignore[import-not-found]
        MixedPrecisionConfig,
        OpsImplementationConfig,
    )
    from veomni.distributed import parallel_state  # type: ignore[import-not-found]
    from veomni.distributed.torch_parallelize import build_parallelize_model  # type: ignore[import-not-found]
    from veomni.models import build_foundation_model  # type: ignore[import-not-found]

    logging.getLogger("veomni").setLevel(logging.WARNING)
    with torch.device("meta"):
        plain = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](deepcopy(config))  # the constructor modifies the config
    check_model(layout, plain)
    device = ranks.device.type
    kernels = OpsImplementationConfig(**_kernels(device, dtype))
    if ranks.count == 1:
        causal = build_foundation_model(config, str(source), dtype, init_device=device, ops_implementation=kernels)
    else:
        state = parallel_state.init_parallel_state(
            dp_size=ranks.count,
            dp_replicate_size=layout.replicas,
            dp_shard_size=layout.sharded,
            device_type=device,
            extra_parallel_sizes=(layout.expert,),
            name=None,
        )
        parallel_state.set_parallel_state(state)
        causal = build_foundation_model(config, None, dtype, init_device="meta", ops_implementation=kernels)
        causal = build_parallelize_model(
            causal,
            str(source),
            init_device="meta",
            mixed_precision=MixedPrecisionConfig(param_dtype=dtype, reduce_dtype="float32"),
            enable_gradient_checkpointing=False,  # the trainer enables it
            broadcast_model_weights_from_rank0=True,
        )
        for module in causal.modules():
            if isinstance(module, fsdp.FSDPModule):  # losses already divide by the tokens of all ranks
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    policy = VeOmniModel(causal, source, ranks)
    policy.context = Grid(layout, device).context if layout.context > 1 else None
    # VeOmni's classes lack the mapping from fused experts to the separate experts in model files.
    causal._weight_conversions = get_model_conversion_mapping(plain, add_legacy=False)
    return policy


def _installed() -> str:
    try:
        return metadata.version("veomni")
    except metadata.PackageNotFoundError:
        return "none"


def _kernels(device: str, dtype: str) -> dict[str, str]:
    """Returns VeOmni's kernel settings."""
    liger = "liger_kernel" if device == "cuda" and util.find_spec("liger_kernel") else "eager"
    names = ("rms_norm", "swiglu_mlp", "rotary_pos_emb")
    plain = ("cross_entropy_loss", "load_balancing_loss", "rms_norm_gated", "causal_conv1d", "chunk_gated_delta_rule")
    return {
        "attn_implementation": "sdpa",  # replaced by the trainer's own attention over packed rows
        "moe_implementation": "fused_triton" if device == "cuda" and dtype == "bfloat16" else "eager",
        **{f"{name}_implementation": liger for name in names},
        **{f"{name}_implementation": "eager" for name in plain},
    }
