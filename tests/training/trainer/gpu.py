"""Benchmark the trainer on a GPU: speed, memory, agreement of packed rows, and the cost of a GPU turn.

    python -m tests.training.trainer.gpu [--layers 28] [--tokens 8192 32768] [--json]

The model has the shape of Qwen3-1.7B (1.7 billion parameters, 28 layers) and random weights. The product's own classes
train it: bfloat16 on the GPU, float32 in the optimizer. Sequence lengths are those of agents' rollouts (lognormal,
median 600 tokens). The second number after tokens a second is the share of the speed of one large matrix product on the
same GPU; it counts 6 operations per parameter and token, 8 if layers are recomputed, and none for attention. Peaks of
memory are those of a whole step after the first one: AdamW makes its moments in the first step. Needs about 60 GB of
GPU memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]

from megaflow_hpc.training.trainer import checkpoint
from megaflow_hpc.training.trainer.model import PolicyModel, ProcessGroup, load
from megaflow_hpc.training.trainer.optimizer import Optimizer
from tests.bench.command import page
from tests.bench.figures import Figure, median, report

GPU = ProcessGroup(0, 1, torch.device("cuda", 0))
WORDS = 151_936
"""Size of Qwen3's vocabulary."""
SMALL, FEW = 2, 8192
"""Layers and vocabulary of the model that is compared with the CPU and restored from a checkpoint."""
REPEATS = 5


def make(folder: Path, layers: int, words: int, dtype: str) -> Path:
    """Make a random model of Qwen3-1.7B's shape with these numbers of layers and words."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # type: ignore[import-not-found]

    config = Qwen3Config(
        vocab_size=words,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with GPU.device:
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


def row(tokens: int, words: int, seed: int = 0) -> tuple[Any, Any, list[int], Any]:
    """Return a packed row of about this many tokens, in the form of
    :class:`~megaflow_hpc.training.trainer.model.PolicyModel`."""
    draw = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(min(max(draw.lognormal(np.log(600), 1.0), 16), tokens - sum(lengths))))
    lengths = [length for length in lengths if length > 1]
    offsets = np.cumsum([0, *lengths]).tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])
    made = torch.from_numpy(draw.integers(0, words, offsets[-1])), positions
    return *(tensor.to(GPU.device) for tensor in made), offsets, (positions > 0).nonzero()[:, 0].to(GPU.device)


def seconds(call: Callable[[int], Any], repeats: int = REPEATS) -> list[float]:
    """Return the seconds of each call, numbered from 1, after a warm-up call."""
    call(0)
    found = []
    for number in range(1, repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(number)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


def ceiling() -> float:
    """Return the operations a second of one large bfloat16 matrix product."""
    a, b = (torch.randn(8192, 8192, device=GPU.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / statistics.median(seconds(lambda _: a @ b, 20))


def learn(policy: PolicyModel, rows: list[Any], number: int) -> None:
    """Run the forward and the backward pass of a row."""
    logprobs, entropies = policy(*rows[number])
    (logprobs.sum() + 0.01 * entropies.sum()).backward()


@torch.no_grad()
def judge(policy: PolicyModel, rows: list[Any], number: int) -> None:
    """Run the forward pass of a row."""
    policy(*rows[number])


def update(optimizer: Optimizer, _: int) -> None:
    """Run one step of the optimizer."""
    for master in optimizer.masters.values():
        master.grad = torch.full_like(master, 1e-3)
    optimizer.step()


def speed(folder: Path, tokens: list[int], limit: float) -> list[Figure]:
    """Measure tokens a second and peak memory, with layers kept and recomputed."""
    found = []
    for how, operations in (("layers kept", 6), ("layers recomputed", 8)):
        optimizer = Optimizer(load(folder, "bfloat16", GPU, recompute=operations == 8), 1e-6)
        count = sum(parameter.numel() for parameter in optimizer.policy.parameters())
        update(optimizer, 0)
        for number in tokens:
            # Use other lengths for each row, as in real steps, because kernels cache preparations by length.
            rows = [row(number, optimizer.policy.words, seed) for seed in range(REPEATS + 1)]
            held = [len(taken[0]) for taken in rows[1:]]
            what = f"rows of {number}, {statistics.median(len(taken[2]) - 1 for taken in rows):.0f} sequences"
            if operations == 6:
                taken_s = seconds(partial(judge, optimizer.policy, rows))
                found.append(
                    median(f"{what}: forward", "tokens/s", [n / s for n, s in zip(held, taken_s, strict=True)])
                )
            torch.cuda.reset_peak_memory_stats()
            try:
                taken_s = seconds(partial(learn, optimizer.policy, rows))
                optimizer.step()
            except torch.OutOfMemoryError:
                print(f"{what}, {how}: does not fit", flush=True)
            else:
                rates = [n / s for n, s in zip(held, taken_s, strict=True)]
                share = operations * count * statistics.median(rates) / limit
                peak = torch.cuda.max_memory_allocated() / 1e9
                found.append(median(f"{what}: forward and backward, {how}", "tokens/s", rates))
                found.append(Figure("  of one large product of matrices", "×", share, len(rates)))
                found.append(Figure("  peak of memory of a whole step", "GB", peak, len(rates)))
            optimizer.adamw.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        if operations == 6:
            taken_s = seconds(partial(update, optimizer))
            found.append(median(f"optimizer step, {count / 1e9:.2f} billion parameters", "s", taken_s))
            found += moved(optimizer)
        del optimizer
        torch.cuda.empty_cache()
    return found


def moved(optimizer: Optimizer) -> list[Figure]:
    """Measure the time of leaving the GPU and returning and the memory that stays. Compare all bits afterwards."""
    size, away, back = torch.cuda.memory_allocated(), list[float](), list[float]()
    first: list[Any] = []
    for _ in range(3):
        for device, into in (("cpu", away), (GPU.device, back)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            optimizer.to(device)
            torch.cuda.synchronize()
            into.append(time.perf_counter() - began)
            if device == "cpu":
                left, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                tensors = [*optimizer.policy.parameters(), *optimizer.tensors().values()]
                first = first or [tensor.detach().clone() for tensor in tensors]
                assert all(torch.equal(a, b) for a, b in zip(first, tensors, strict=True)), "other bits came back"
    return [
        Figure("policy, masters and moments on the GPU", "GB", size / 1e9, 1),
        median("moved to the CPU in", "s", away),
        median("moved back in", "s", back),
        Figure("left on the GPU meanwhile", "GB", left / 1e9, 3),
        Figure("held by torch's allocator meanwhile", "GB", held / 1e9, 3),
    ]


@torch.no_grad()
def alone(policy: PolicyModel, taken: Any) -> Any:
    """Return the log-probabilities of a row's sequences, each computed without packing."""
    tokens, positions, offsets, _ = taken
    found = torch.zeros(len(tokens), device=tokens.device)
    for begin, end in pairwise(offsets):
        part = torch.arange(1, end - begin, device=tokens.device)
        found[begin:end] = policy(tokens[begin:end], positions[begin:end], [0, end - begin], part)[0]
    return found


@torch.no_grad()
def agreement(folder: Path, small: Path) -> list[Figure]:
    """Measure the differences of log-probabilities of the same weights."""
    rough = load(folder, "bfloat16", GPU)
    taken = row(8192, rough.words, 1)
    where = taken[3]
    packed = rough(*taken)[0][where]
    found = apart("bfloat16, packed and each sequence alone", packed, alone(rough, taken)[where])
    del rough
    torch.cuda.empty_cache()
    exact = load(folder, "float32", GPU)
    whole = exact(*taken)[0][where]
    found += apart("float32, packed and each sequence alone", whole, alone(exact, taken)[where])
    found += apart("bfloat16 and float32, packed", packed, whole)
    del exact
    torch.cuda.empty_cache()
    taken = row(1024, FEW, 2)
    there = load(small, "float32", GPU)(*taken)[0].cpu()
    here = load(small, "float32")(*(t.cpu() if hasattr(t, "cpu") else t for t in taken))[0]
    return found + apart(f"float32, GPU and CPU, {SMALL} layers", there, here)


def apart(name: str, one: Any, other: Any) -> list[Figure]:
    """Return mean and maximum of the differences of two rows of log-probabilities."""
    difference = (one - other).abs()
    assert torch.isfinite(difference).all()
    return [
        Figure(f"{name}: mean |Δ|", "", float(difference.mean()), len(difference)),
        Figure(f"{name}: max |Δ|", "", float(difference.max()), len(difference)),
    ]


def resumed(small: Path, folder: Path, dtype: str) -> Figure:
    """Return the share of equal tensors after three steps, and after one step, a checkpoint and two steps."""

    def steps(optimizer: Optimizer, numbers: range) -> None:
        for number in numbers:
            logprobs, entropies = optimizer.policy(*row(4096, optimizer.policy.words, number))
            (logprobs.mean() + 0.01 * entropies.mean()).backward()
            optimizer.step()

    def fresh() -> Optimizer:
        return Optimizer(load(small, dtype, GPU), 1e-4)

    one, other = fresh(), fresh()
    steps(one, range(1))
    place = checkpoint.save(folder, 1, one, GPU).finish()
    checkpoint.restore(place, other, GPU)
    steps(one, range(1, 3))
    steps(other, range(1, 3))
    a, b = one.tensors(), other.tensors()
    same = [torch.equal(a[name], b[name]) for name in a]
    return Figure(
        f"{dtype}: tensors with the same bits after going on from a checkpoint", "of 1", np.mean(same), len(a)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="the trainer on a GPU")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32_768], help="of a packed row")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-") as place:
        folder = make(Path(place) / "model", asked.layers, WORDS, "bfloat16")
        small = make(Path(place) / "small", SMALL, FEW, "float32")
        limit = ceiling()
        figures = [Figure("one large product of matrices, bfloat16", "TFLOP/s", limit / 1e12, 20)]
        for name, part in {
            "speed": lambda: speed(folder, asked.tokens, limit),
            "agreement": lambda: agreement(folder, small),
            "resumed": lambda: [resumed(small, Path(place) / dtype, dtype) for dtype in ("float32", "bfloat16")],
        }.items():
            print(f"{name} …", flush=True)
            figures += part()
    told = torch.cuda.get_device_name(0), torch.__version__
    if asked.json:
        print(json.dumps({"gpu": told, **report(figures)}, indent=1))
    else:
        print(f"{told[0]}, torch {told[1]}")
        print(page(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
