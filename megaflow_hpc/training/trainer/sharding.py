"""Divides a model and its input rows among ranks.

The ranks form a grid (:mod:`~megaflow_hpc.training.layout`). Along ``tensor``, ranks divide each layer's heads and
features according to transformers' plan for the model. Along ``context``, they divide the tokens of a row
(:mod:`~megaflow_hpc.training.trainer.layers`). Ranks that differ only in these two dimensions compute the same
micro-batch. Along all dimensions except ``tensor`` and ``replicas``, each rank stores a share of each parameter
(FSDP2). Replicas store the same shares, so a layer is gathered within a node, and gradients cross nodes only once
(HSDP). ``expert`` consecutive ranks store different experts of each layer, and tokens are sent to them (transformers'
token dispatch).

The model is divided while its parameters are placeholders on torch's meta device. After that, each rank reads only its
own slices of the safetensors files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.layout import Layout

PARTIAL_NORM = "replicated_with_grad_allreduce"
"""transformers' parallel style for weights that every rank holds in full but applies only to its own heads."""
COLUMNS, ROWS, WHOLE = "colwise", "rowwise", ""
"""transformers' parallel styles of linear layers. The first divides outputs, the second divides inputs. The empty style
marks layers that every rank computes in full."""
PACKED = ("packed_colwise", "packed_rowwise")
"""transformers' parallel styles for parameters that contain several matrices. A rank's share is not contiguous, so
checkpoints cannot be read with another layout."""


class Grid:
    """Creates the process groups of a layout. All ranks must create it.

    Attributes:
        context: process group of the ranks that share a row, or ``None``.
    """

    def __init__(self, layout: Layout, device_type: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh  # type: ignore[import-not-found]

        names = ("replicas", "shards", "tensor")
        self.layout = layout
        self.dense = init_device_mesh(
            device_type, (layout.replicas, layout.sharded, layout.tensor), mesh_dim_names=names
        )
        self.experts = self.dense
        if layout.expert > 1:
            shape = (layout.replicas, layout.ranks // (layout.replicas * layout.expert), layout.expert)
            self.experts = init_device_mesh(device_type, shape, mesh_dim_names=("replicas", "shards", "expert"))
        self.context = None
        if layout.context > 1:
            shape = (layout.ranks // layout.copies, layout.context, layout.tensor)
            rows = init_device_mesh(device_type, shape, mesh_dim_names=("rows", "context", "tensor"))
            self.context = rows["context"].get_group()

    def shard(self, policy: torch.nn.Module, causal: Any) -> None:
        """Divides the parameters of ``causal``, a submodule of ``policy``. The parameters may be placeholders.

        Raises:
            ConfigError: transformers cannot divide this model according to the layout.
        """
        check_model(self.layout, causal)
        causal.tie_weights()  # FSDP must know which parameters are shared
        expert_modules = self._split(causal)
        if self.layout.replicas * self.layout.sharded > 1:
            self._fully_shard(policy, causal, expert_modules)

    def _split(self, causal: Any) -> list[torch.nn.Module]:
        """Applies transformers' tensor-parallel and expert-parallel plans. Returns the modules whose experts are
        divided."""
        layout = self.layout
        if layout.tensor == 1 and layout.expert == 1:
            return []
        from transformers.distributed import DistributedConfig  # type: ignore[import-not-found]
        from transformers.distributed.tensor_parallel import (  # type: ignore[import-not-found]
            apply_expert_parallelism,
            apply_tensor_parallelism,
            replace_layer_number_by_wildcard,
            resolve_parallel_plans,
        )

        try:
            sizes = DistributedConfig(
                tp_size=layout.tensor, fsdp_size=layout.ranks // layout.tensor, ep_size=layout.expert
            )
            plan, expert_plan = resolve_parallel_plans(causal, sizes)
        except ValueError as error:
            raise ConfigError(f"parallel: {type(causal).__name__}: {error}") from None
        modules = {name: module for name, module in causal.named_modules() if name}
        patterns = {name: replace_layer_number_by_wildcard(name) for name, _ in causal.named_modules()}
        patterns |= {name: replace_layer_number_by_wildcard(name) for name, _ in causal.named_parameters()}
        if packed := sorted(n for n, p in patterns.items() if plan.get(p) in PACKED):
            raise ConfigError(
                f"parallel.tensor: {packed[0]} of {type(causal).__name__} holds several matrices, which tensor ranks "
                f"cannot divide; experts can be stored whole: set parallel.expert to a multiple of {layout.tensor}"
            )
        if expert_plan and "ep_dispatch_experts" not in expert_plan.values():
            raise ConfigError(
                f"parallel.expert: transformers cannot send tokens to the experts of {type(causal).__name__}; leave "
                "expert out"
            )
        ends = causal.get_input_embeddings(), causal.get_output_embeddings()
        if ends[0].weight is ends[1].weight or len(ends[0].weight) % layout.tensor:  # cannot be divided
            plan = {name: style for name, style in plan.items() if modules.get(name) not in ends}
        norms = {name for name, pattern in patterns.items() if plan.get(pattern) == PARTIAL_NORM}
        plan = {name: style for name, style in plan.items() if style != PARTIAL_NORM}
        try:
            if plan:
                apply_tensor_parallelism(causal, self.dense["tensor"], plan)
            if expert_plan:
                apply_expert_parallelism(causal, self.experts["expert"], self.dense["tensor"], expert_plan)
        except ValueError as error:
            raise ConfigError(f"parallel: {type(causal).__name__}: {error}") from None
        if layout.tensor > 1:
            group = self.dense["tensor"].get_group()
            for name, module in modules.items():
                module.tensor_share = plan.get(patterns[name], WHOLE), group
        for name in norms & modules.keys():
            _sum_gradients(modules[name], self.dense["tensor"].get_group())
        return [m for n, m in modules.items() if expert_plan.get(patterns[n]) == "ep_dispatch_experts"]

    def _fully_shard(self, policy: torch.nn.Module, causal: Any, expert_modules: list[torch.nn.Module]) -> None:
        from torch.distributed.fsdp import (  # type: ignore[import-not-found]
            FSDPModule,
            MixedPrecisionPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        names = ("replicas", "shards") if self.layout.replicas > 1 else "shards"
        how = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32), "reshard_after_forward": True}
        for module in expert_modules:
            fully_shard(module, mesh=self.experts[names], **how)
        layers = set(causal._no_split_modules or ())
        # Shard layer by layer, so that the device never has to hold the whole model.
        for module in [m for m in causal.modules() if type(m).__name__ in layers]:
            fully_shard(module, mesh=self.dense[names], **how)
        fully_shard(policy, mesh=self.dense[names], **how)
        register_fsdp_forward_method(policy, "logprobs_alone")
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while reducing


def check_model(layout: Layout, causal: Any) -> None:
    """Checks that a layout can divide a model.

    Raises:
        ConfigError: the model's heads cannot be divided, or transformers has no plan for these dimensions.
    """
    kind, config = type(causal).__name__, causal.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if layout.tensor > 1 and not any("*" in name for name in causal.tp_plan):  # more than the embedding
        raise ConfigError(
            f"parallel.tensor: transformers has no tensor-parallel plan for {kind}; leave tensor out (FSDP "
            "divides parameters of every model, context divides long rows)"
        )
    if layout.expert > 1 and not causal.ep_plan:
        raise ConfigError(f"parallel.expert: transformers has no expert-parallel plan for {kind}; leave expert out")
    layout.check_heads(kind, heads, int(getattr(config, "num_key_value_heads", None) or heads))


def read_sharded(source: Any, kinds: Any, shard: Callable[[Any], None], **options: Any) -> Any:
    """Loads a model from a directory. Calls ``shard`` before any weight is read.

    Args:
        source: the directory.
        kinds: transformers' mapping of configurations to classes.
        shard: divides the model's parameters, which are still placeholders.
        options: options of ``from_pretrained``.
    """
    from transformers import AutoConfig  # type: ignore[import-not-found]
    from transformers.distributed import DistributedConfig

    config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    kind = kinds[type(config)]

    @classmethod  # type: ignore[misc]
    def prepare(cls: Any, config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
        return config, device_map, None

    @classmethod  # type: ignore[misc]
    def distribute(cls: Any, model: Any, config: Any, mesh: None) -> Any:
        shard(model)
        return model

    # transformers calls these hooks once the placeholders exist. Its own hooks do not support replicas or context.
    hooks = {"prepare_distribute_model": prepare, "maybe_distribute_model": distribute, "__module__": kind.__module__}
    hooked: Any = type(kind.__name__, (kind,), hooks)
    causal = hooked.from_pretrained(
        source, config=config, distributed_config=DistributedConfig(), trust_remote_code=False, **options
    )
    causal.config.distributed_config = None
    return causal


def _sum_gradients(module: torch.nn.Module, group: Any) -> None:
    """Sums the gradients of a module's weights over a group in each backward pass.

    transformers' own hook sums ``grad`` after the pass, which would count the gradients of earlier micro-batches
    repeatedly.
    """
    forward = module.forward

    def summing(*args: Any, **options: Any) -> Any:
        own = dict(module._parameters)
        module._parameters.update({name: SumGradients.apply(parameter, group) for name, parameter in own.items()})
        try:
            return forward(*args, **options)
        finally:
            module._parameters.update(own)

    module.forward = summing


def divide_adapters(causal: Any) -> None:
    """Makes the adapters of divided linear layers compute only this rank's share.

    Every rank stores whole adapters, and the gradients of all ranks are added up. So each rank must contribute only the
    gradient from its own outputs or inputs, or an equal fraction if all ranks compute the same.

    Raises:
        ConfigError: an adapted layer is divided in another way.
    """
    for name, layer in causal.named_modules():
        share = getattr(getattr(layer, "base_layer", None), "tensor_share", None)
        if share is None or not getattr(layer, "lora_A", None):
            continue
        style, group = share
        if style not in (COLUMNS, ROWS, WHOLE):
            raise ConfigError(
                f"parallel.tensor: adapters of {name} cannot be divided like its weights ({style}); "
                "leave parallel.tensor out"
            )
        for down, up in zip(layer.lora_A.values(), layer.lora_B.values(), strict=True):
            down.forward, up.forward = _shares_of(style, down, up, group)


def _shares_of(style: str, down: Any, up: Any, group: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Returns this rank's versions of the functions that apply an adapter's two matrices."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def local_part(matrix: Any, dimension: int) -> Any:
        return matrix.weight.chunk(size, dimension)[rank]

    def equal_part(matrix: Any) -> Any:
        return ScaleGradient.apply(matrix.weight, 1 / size)

    linear = torch.nn.functional.linear
    if style == COLUMNS:
        return lambda x: linear(SumGradients.apply(x, group), down.weight), lambda x: linear(x, local_part(up, 0))
    if style == ROWS:
        return lambda x: SumOverRanks.apply(linear(x, local_part(down, 1)), group), lambda x: linear(x, equal_part(up))
    return lambda x: linear(x, equal_part(down)), lambda x: linear(x, equal_part(up))


class ScaleGradient(torch.autograd.Function):
    """Identity in the forward pass. Multiplies the gradient by a factor in the backward pass."""

    @staticmethod
    def forward(context: Any, tensor: Any, factor: float) -> Any:
        context.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Any) -> tuple[Any, None]:
        return gradient * context.factor, None


class SumOverRanks(torch.autograd.Function):
    """Sums tensors over all ranks of a group. The backward pass returns the gradient unchanged, because every rank
    derives the same loss from the sum."""

    @staticmethod
    def forward(context: Any, part: Any, group: Any) -> Any:
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, gradient: Any) -> tuple[Any, None]:
        return gradient, None


class SumGradients(torch.autograd.Function):
    """Identity in the forward pass. Sums the gradient over the ranks of a group in the backward pass."""

    @staticmethod
    def forward(context: Any, tensor: Any, group: Any) -> Any:
        context.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Any) -> tuple[Any, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=context.group)
        return total, None
