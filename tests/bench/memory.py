"""Compare the predicted memory of training with torch's own count of every tensor of the real trainer.

    $MEGAFLOW_ENGINE_VENV/bin/python -m tests.bench.memory [--large|--fsdp] [--model NAME] [--gpus N] [--json]

The trainer's model, sharding, attention, loss and optimizer run one micro-batch and one optimizer step of a training
that has run for some steps, on one rank of N. Tensors are fake: they have shapes and devices, and no data
(``FakeTensorMode``), and collective operations do nothing (fake process groups). ``MemTracker`` counts their bytes. So
a model of 32 billion parameters on 64 GPUs takes a minute of one core.

torch's CPU build knows no CUDA. A made-up device takes its place, with the kernel for packed rows and the fused
optimizer, as on CUDA. The exchange of tokens among experts is replaced by one of equal numbers of tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # type: ignore[import-not-found]
from torch.distributed._tools.mem_tracker import MemTracker  # type: ignore[import-not-found]
from torch.distributed.tensor import DTensor  # type: ignore[import-not-found]
from torch.distributed.tensor._sharding_prop import ShardingPropagator  # type: ignore[import-not-found]
from torch.testing._internal.distributed.fake_pg import FakeStore  # type: ignore[import-not-found]
from torch.utils import backend_registration  # type: ignore[import-not-found]

from megaflow_hpc.cli.output import say, table
from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.training.layout import Layout
from megaflow_hpc.training.memory import ModelShape, predict
from megaflow_hpc.training.trainer import layers, losses
from megaflow_hpc.training.trainer.model import DTYPES, PolicyModel, ProcessGroup
from megaflow_hpc.training.trainer.optimizer import Optimizer
from megaflow_hpc.training.trainer.sharding import Grid
from tests.support.tensors import headers

DEVICE = "fakegpu"
QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-32B": QWEN3
    | {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "Qwen3-30B-A3B": QWEN3
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}
"""Sizes as in the models' config.json (Qwen3 technical report, arXiv 2505.09388, tables 1 and 2; the hidden sizes are
those of THUDM/slime, scripts/models/qwen3-*.sh)."""
TOKENS = (32_768, 131_072)


class Case(NamedTuple):
    """A model, and how it is trained."""

    model: str
    gpus: int
    settings: dict[str, Any]


def _case(model: str, gpus: int, tokens: int, offload: bool = False, **parallel: int) -> Case:
    settings: dict[str, Any] = {"microbatch": tokens} | ({"parallel": parallel} if parallel else {})
    return Case(model, gpus, settings | ({"optimizer": {"offload": True}} if offload else {}))


LARGE = [
    _case("Qwen3-30B-A3B", 8, 32_768, True, context=4, expert=8),
    _case("Qwen3-32B", 8, 32_768, True, context=4),
    _case("Qwen3-8B", 8, 131_072, context=4),
    _case("Qwen3-30B-A3B", 16, 32_768, context=2, expert=8),
    _case("Qwen3-32B", 16, 32_768, context=4),
]
"""The table of large models in docs/how-to/training.md."""


def matrix(names: Sequence[str], gpus: Sequence[int], lengths: Sequence[int], fsdp: bool = False) -> Iterator[Case]:
    """Yield all combinations with FSDP alone. Unless ``fsdp``, also yield each with the settings for large models."""
    for name, ranks, tokens in itertools.product(names, gpus, lengths):
        yield _case(name, ranks, tokens)
        if ranks > 1 and not fsdp:
            experts = {"expert": 8} if "A3B" in name else {}
            yield _case(name, ranks, tokens, context=4, **experts)
            yield _case(name, ranks, tokens, True, context=4, **experts)


# --- a checkpoint without weights ---


def save_headers(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write ``config.json`` and a sparse safetensors file with the model's true header."""
    from transformers import AutoConfig, AutoModelForCausalLM  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    shapes = {id(t): (name, t.shape) for name, t in reversed(model.state_dict(keep_vars=True).items())}
    headers(folder / "model.safetensors", dict(shapes.values()))
    return folder


# --- a GPU that exists in name only ---


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> _Event:
        return self

    def wait(self, *_: Any) -> None: ...

    synchronize = wait


class _Stream(torch.cpu.Stream):  # type: ignore[misc]
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def record_event(self, *_: Any) -> _Event:
        return _Event()

    def wait_event(self, *_: Any) -> None: ...

    wait_stream = wait_event


class _DeviceModule(backend_registration._DummyBackendModule):  # type: ignore[misc]
    Stream, Event = _Stream, _Event

    def stream(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, *_: Any) -> _Stream:
        return _Stream()

    def set_device(self, *_: Any) -> None: ...

    def get_amp_supported_dtype(self) -> list[Any]:
        return [torch.bfloat16]


def prepare() -> Any:
    """Register the device, and let the trainer take the paths that it takes on CUDA. Return what must be kept."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, _DeviceModule())
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl(
        "empty.memory_format",
        lambda size, dtype=None, **_: torch._C._acc.create_empty_tensor(size, dtype or torch.float32),
        "PrivateUse1",
    )
    # Without a kernel of its own, a device computes it in several steps, with more temporary tensors than CUDA.
    kernels.impl("silu_backward", lambda gradient, _: torch.empty_like(gradient), "PrivateUse1")
    layers._one_by_one = layers._fused

    from torch.distributed.device_mesh import DeviceMesh  # type: ignore[import-not-found]
    from transformers.distributed.tensor_parallel import (  # type: ignore[import-not-found]
        EpDispatchExpertsParallel,
        all_to_all_single,
    )

    def dispatch(self: Any, hidden: Any, chosen: Any, experts: int, group: Any, ranks: int) -> tuple[Any, ...]:
        order = torch.argsort(chosen.reshape(-1))
        rows = len(order)
        sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        tokens = all_to_all_single(hidden[order // chosen.size(-1)], sizes, sizes, group)
        return tokens, torch.zeros(rows, dtype=torch.int64, device=hidden.device), order, sizes, sizes

    EpDispatchExpertsParallel._dispatch_tokens = dispatch
    coordinates = DeviceMesh._compute_coordinates_from_mesh

    def real_coordinates(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return coordinates(*arguments)

    DeviceMesh._compute_coordinates_from_mesh = staticmethod(real_coordinates)
    return kernels


class Tracker(MemTracker):  # type: ignore[misc]
    """Counts tensors, without those of whole shapes by which torch finds out how results are divided."""

    paused = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Tracker.paused:
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)

    def peak(self, device: Any) -> int:
        """Return the largest number of bytes on a device."""
        return int(self.get_tracker_snapshot("peak").get(device, {"Total": 0})["Total"])


def _untracked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        Tracker.paused += 1
        try:
            return function(*arguments, **options)
        finally:
            Tracker.paused -= 1

    return call


class Where:
    """Indices of judged tokens, of which the model takes those of a rank. Fake tensors cannot tell how many."""

    def __init__(self, values: Any, device: Any) -> None:
        self._values, self._device = values, device

    def __gt__(self, other: int) -> Any:
        return self._values > other

    def __le__(self, other: int) -> Any:
        return self._values <= other

    def __getitem__(self, chosen: Any) -> Any:
        return torch.empty(int(chosen.sum()), dtype=torch.int64, device=self._device)


class Totals:
    """Denominators of the loss."""

    tokens = sequences = samples = 1


# --- the trainer ---


def tracked(folder: Path, settings: PolicyTraining, ranks: int) -> int:
    """Return the peak of one GPU's tensors in a step of the real trainer, in bytes."""
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _tracked(folder, settings, ranks)
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def _tracked(folder: Path, settings: PolicyTraining, ranks: int) -> int:
    from transformers import AutoConfig, AutoModelForCausalLM

    device = torch.device(DEVICE, 0)
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=DTYPES[settings.dtype])
    policy = PolicyModel(causal, folder, ProcessGroup(0, ranks, device))
    if ranks > 1:
        grid = Grid(Layout(ranks, **settings.parallel.model_dump()), DEVICE)
        policy.context = grid.context
        grid.shard(policy, causal)
    tracker = Tracker()
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:
        _materialise(policy, device)
        causal.requires_grad_(True)
        layers.register()
        causal.set_attn_implementation(layers.ATTENTION_NAME)
        if settings.recompute:
            causal.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
        tracker.track_external(policy)
        stack.enter_context(tracker)
        optimizer = _optimizer(policy, settings.optimizer.offload)
        _update(policy, optimizer, settings.microbatch, device)
    return tracker.peak(device)


def _materialise(policy: Any, device: Any) -> None:
    """Replace placeholders by fake tensors on the device, as loading does with real ones."""

    def empty(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        local = torch.empty(tensor.to_local().shape, dtype=tensor.dtype, device=device)
        whole = {"shape": tensor.shape, "stride": tensor.stride()}
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, **whole)

    made: dict[int, tuple[Any, Any]] = {}
    for module in policy.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and id(tensor) not in made:
                fake = empty(tensor)
                made[id(tensor)] = tensor, torch.nn.Parameter(fake) if name in module._parameters else fake
            if tensor is not None:
                (module._parameters if name in module._parameters else module._buffers)[name] = made[id(tensor)][1]


def _optimizer(policy: Any, offload: bool) -> Optimizer:
    """Return an optimizer in the middle of a training: with moments, and with gradients of an earlier micro-batch."""
    optimizer = Optimizer(policy, 1e-6, offload=offload)
    for group in optimizer.adamw.param_groups:
        group["fused"], group["foreach"] = True, False
    for master in optimizer.masters.values():
        moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.adamw.state[master].update(step=torch.zeros((), device=master.device), **moments)
        master.grad = torch.zeros_like(master)

    def norm() -> float:
        torch._foreach_norm(optimizer._gradients())
        return 1.0  # fake gradients have no norm

    optimizer._norm = norm  # type: ignore[method-assign]
    return optimizer


def _update(policy: Any, optimizer: Optimizer, tokens: int, device: Any) -> None:
    """Run a micro-batch of one sequence and a step of the optimizer, as the training loop does."""
    row = torch.zeros(tokens, dtype=torch.int64, device=device), torch.arange(tokens, device=device)
    where: Any = torch.arange(1, tokens, device=device)
    if policy.context is not None:
        where = Where(np.arange(1, tokens), device)
    new, entropies = policy(*row, [0, tokens], where)
    columns = [torch.zeros(tokens, device=device) for _ in range(3)]
    mask = torch.ones(tokens, dtype=torch.bool, device=device)
    counts = torch.arange(2, device=device), torch.ones(1, dtype=torch.int64, device=device)
    batch = losses.Tokens(counts[0], mask, new.detach(), *columns, counts[1])
    entropies = entropies.detach()
    loss, _ = losses.policy_loss(losses.Loss("dapo"), new, entropies, batch, Totals)
    loss.backward()
    del loss, new, entropies, batch
    optimizer.step()


# --- the table ---


def compare(cases: Iterable[Case], layers: int | None) -> Iterator[dict[str, Any]]:
    """Yield predicted and tracked peaks of each case."""
    kept = prepare()
    ShardingPropagator._propagate_tensor_meta_non_cached = _untracked(
        ShardingPropagator._propagate_tensor_meta_non_cached
    )
    with tempfile.TemporaryDirectory(prefix="memory-") as place:
        for case in cases:
            folder = Path(place) / case.model
            if not folder.is_dir():
                save_headers(folder, MODELS[case.model] | ({"num_hidden_layers": layers} if layers else {}))
            settings = PolicyTraining.model_validate(case.settings)
            found = predict(ModelShape.read(folder), settings, min(case.gpus, 8), max(case.gpus // 8, 1))
            peak = tracked(folder, settings, case.gpus)
            yield case._asdict() | {"moment": found.moment, "predicted": found.peak, "tracked": peak}
    del kept


def row(case: dict[str, Any]) -> tuple[Any, ...]:
    """Return the line of a case in the table."""
    settings = {**case["settings"].get("parallel", {}), **case["settings"].get("optimizer", {})}
    words = ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())
    predicted, peak = case["predicted"] / 1e9, case["tracked"] / 1e9
    ends = f"{predicted:.1f}", f"{peak:.1f}", f"{100 * (predicted / peak - 1):+.1f} %"
    return case["model"], case["settings"]["microbatch"], case["gpus"], words, *ends


def main() -> int:
    """Print a line for each case."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    parser = argparse.ArgumentParser(description="predicted and tracked memory of training")
    parser.add_argument("--large", action="store_true", help="only the large models of docs/how-to/training.md")
    parser.add_argument("--fsdp", action="store_true", help="every case with FSDP alone")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of a row")
    parser.add_argument("--layers", type=int, help="instead of the model's number")
    parser.add_argument("--json", action="store_true", help="print a JSON line for each case")
    asked = parser.parse_args()
    rows = []
    cases = LARGE if asked.large else matrix(asked.model, asked.gpus, asked.tokens, asked.fsdp)
    for case in compare(cases, asked.layers):
        if asked.json:
            print(json.dumps(case), flush=True)
        rows.append(row(case))
    if not asked.json:
        say(table(("model", "tokens", "GPUs", "settings", "predicted, GB", "tracked, GB", "difference"), rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
