"""Measure the trainer on a GPU in at most eight minutes, without network and without files but this repository.

    python tests/gpu/bench.py                        # on a GPU: Qwen3-1.7B's shape, random weights
    python tests/gpu/bench.py --device cpu --small   # the same code in seconds, with tiny sizes

Needs torch and transformers; this package need not be installed. Each part prints one line of JSON as soon as it ends.
A part that fails or takes too long prints its error, and the next one runs. Each has a process of its own, so that no
memory and no error of CUDA is left for the next one. Parts that do not start within the budget are named.

Parts: ``machine``; ``product``, the speed of one large product of matrices in bfloat16; ``attention``, the kernel for
packed rows (varlen) and the loop, compared with the loop in float32; ``weights``, which makes the model; then whole
steps of it: rows of 32,768 tokens, packed and of one sequence, and one sequence of 131,072. A step is a forward and a
backward pass and an optimizer step whose moments exist. ``peak_gb`` is the peak of allocated memory, ``predicted_gb``
that of ``megaflow_hpc.training.memory``, which needs msgspec and pydantic. ``tflops`` counts 6 operations per parameter
and token, without the input embedding, and those of causal attention; recomputed layers do not count. ``mfu`` is its
share of ``--peak-tflops``, by default of the large product.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
GRACE_S = 5.0
"""Seconds of the budget in which no part starts."""
REPEATS = 5


class Bench:
    """Sizes and the device."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.device, self.small, self.folder, self.peak = asked.device, asked.small, folder / "model", asked.peak_tflops
        self.product_tflops = math.nan
        self.shape = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
        self.shape |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        self.short, self.long, self.matrix = 32_768, 131_072, 8192
        if self.small:
            self.shape |= {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
            self.shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
            self.short, self.long, self.matrix = 256, 512, 256

    # --- parts ---

    def machine(self) -> dict[str, Any]:
        """Returns what the machine has."""
        import torch  # type: ignore[import-not-found]
        import transformers  # type: ignore[import-not-found]

        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f"torch {torch.__version__} finds no GPU; give --device cpu --small to try this script")
        found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
        found |= {"transformers": transformers.__version__, "device": self.device, "cores": os.cpu_count()}
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            about = torch.cuda.get_device_properties(0)
            found |= {"gpu": about.name, "capability": f"{about.major}.{about.minor}"}
            found |= {"gpu_gb": total / 1e9, "free_gb": free / 1e9}
        return found

    def product(self) -> dict[str, Any]:
        """Measures one large product of matrices in bfloat16."""
        import torch

        a, b = (torch.randn(self.matrix, self.matrix, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        taken = self._seconds(lambda: a @ b, 4 * REPEATS)
        return {"tflops": 2 * self.matrix**3 / median(taken) / 1e12}

    def attention(self) -> dict[str, Any]:
        """Compares the kernel for packed rows with the loop, in bits and in speed."""
        import torch

        from megaflow_hpc.training.trainer import layers

        layers.register()  # switches cuDNN's attention off, as the trainer does
        kernels = {"varlen": layers._fused, "loop": layers._one_by_one}
        found: dict[str, Any] = {}
        lengths = self._lengths(self.short // 4)
        packing = layers.Packing.of(lengths, self.device)
        exact = self._attend(layers._one_by_one, packing, torch.float32)
        results = {}
        for name, kernel in kernels.items():
            try:
                results[name] = self._attend(kernel, packing, torch.bfloat16)
            except Exception as error:  # the kernel does not run here
                found[name] = {"error": _about(error)}
                continue
            parts = zip(("out", "query", "key", "value"), results[name], exact, strict=True)
            found[name] = {"bits": {part: _bits(mine, right) for part, mine, right in parts}}
        if len(results) == 2:
            pairs = list(zip(results["varlen"], results["loop"], strict=True))
            found["equal_bits"] = [bool(torch.equal(a, b)) for a, b in pairs]
            found["bits_between"] = [_bits(a, b.float()) for a, b in pairs]
        found["row"] = {"tokens": sum(lengths), "sequences": len(lengths)}
        lengths = self._lengths(self.short)
        packing = layers.Packing.of(lengths, self.device)
        found["timed_row"] = {"tokens": sum(lengths), "sequences": len(lengths)}
        for name in results:
            taken = self._seconds(lambda name=name: self._attend(kernels[name], packing, torch.bfloat16))
            found[name]["forward_backward_ms"] = 1e3 * median(taken)
        return found

    def weights(self) -> dict[str, Any]:
        """Makes the model's directory, with random weights."""
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            **self.shape, tie_word_embeddings=True, max_position_embeddings=self.long, dtype="bfloat16"
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(self.folder)
        return {"parameters": sum(p.numel() for p in model.parameters())}

    def step(self, lengths: Sequence[int], recompute: bool) -> dict[str, Any]:
        """Measures whole steps with a row of sequences of these lengths."""
        import torch

        from megaflow_hpc.training.trainer.model import ProcessGroup, load
        from megaflow_hpc.training.trainer.optimizer import Optimizer

        ranks = ProcessGroup(0, 1, torch.device(self.device))
        optimizer = Optimizer(load(self.folder, "bfloat16", ranks, recompute=recompute), 1e-6)
        policy = optimizer.policy
        positions = torch.cat([torch.arange(length) for length in lengths])
        offsets = torch.tensor([0, *lengths]).cumsum(0).tolist()
        tokens = torch.randint(0, policy.words, (offsets[-1],), generator=torch.Generator().manual_seed(1))
        where = (positions > 0).nonzero()[:, 0]
        tokens, positions, where = (tensor.to(self.device) for tensor in (tokens, positions, where))

        def once() -> None:
            logprobs, entropies = policy(tokens, positions, offsets, where)
            (logprobs.sum() + 0.01 * entropies.sum()).backward()
            if not math.isfinite(norm := optimizer.step()):
                raise FloatingPointError(f"a gradient of norm {norm}")

        began = time.perf_counter()
        once()  # makes the moments
        self._synchronize()
        result: dict[str, Any] = {"tokens": offsets[-1], "sequences": len(lengths), "recompute": recompute}
        result["first_step_s"] = time.perf_counter() - began
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = self._seconds(once, REPEATS, warm=False, most_s=30)
        speed = self._operations(policy, lengths) / median(taken) / 1e12
        result |= {"steps": len(taken), "step_s": median(taken), "tokens_per_s": offsets[-1] / median(taken)}
        result |= {"tflops": speed, "mfu": speed / (self.peak or self.product_tflops)}
        if self.device == "cuda":
            result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        else:
            result["process_peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        return result | self._predicted(offsets[-1], recompute)

    # --- help ---

    def _predicted(self, tokens: int, recompute: bool) -> dict[str, Any]:
        try:
            from megaflow_hpc.config.training import PolicyTraining
            from megaflow_hpc.training.memory import ModelShape, predict  # type: ignore[import-not-found]
        except ImportError as error:
            return {"predicted_gb": None, "why": _about(error)}
        settings = PolicyTraining(microbatch=tokens, recompute=recompute)
        prediction = predict(ModelShape.read(self.folder), settings, 1 if self.device == "cuda" else 0)
        return {"predicted_gb": prediction.peak / 1e9, "predicted_moment": prediction.moment}

    def _operations(self, policy: Any, lengths: Sequence[int]) -> float:
        """Returns the operations of a forward and a backward pass."""
        shape = self.shape
        used = sum(parameter.numel() for parameter in policy.parameters())  # the tied embedding counts once, as output
        attended = sum(length**2 for length in lengths) * shape["num_attention_heads"] * shape["head_dim"]
        return 6.0 * used * sum(lengths) + 6.0 * shape["num_hidden_layers"] * attended

    def _lengths(self, tokens: int) -> list[int]:
        """Returns lengths as of agents' rollouts: lognormal, median 600 tokens (a row of 32,768)."""
        import numpy as np

        draw, lengths, middle = np.random.default_rng(0), list[int](), 600 if not self.small else 20
        while sum(lengths) < tokens:
            length = min(max(round(draw.lognormal(math.log(middle), 1.0)), 2), tokens - sum(lengths))
            lengths += [length] if length > 1 else []
            tokens -= length == 1
        return lengths

    def _attend(self, kernel: Callable[..., Any], packing: Any, dtype: Any) -> list[Any]:
        """Returns the result of a kernel and the gradients of its inputs, which are the same at each call."""
        import torch

        heads, keys, size = (self.shape[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        generator = torch.Generator(self.device).manual_seed(2)
        tokens = sum(packing.lengths)

        def drawn(*sizes: int) -> Any:
            values = torch.randn(*sizes, generator=generator, device=self.device).to(torch.bfloat16)
            return values.to(dtype)

        inputs = [drawn(1, count, tokens, size).requires_grad_() for count in (heads, keys, keys)]
        out = kernel(*inputs, packing, size**-0.5, None)
        gradients = torch.autograd.grad(out, inputs, drawn(*out.shape))
        return [out.detach(), *gradients]

    def _synchronize(self) -> None:
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def _seconds(
        self, call: Callable[[], Any], repeats: int = REPEATS, warm: bool = True, most_s: float = 10.0
    ) -> list[float]:
        """Returns the seconds of each call, of fewer calls if they take longer than ``most_s`` together."""
        if warm:
            call()
        taken: list[float] = []
        while len(taken) < repeats and sum(taken) < most_s:
            self._synchronize()
            began = time.perf_counter()
            call()
            self._synchronize()
            taken.append(time.perf_counter() - began)
        return taken


def _bits(values: Any, right: Any) -> float:
    """Returns the number of correct bits of the worst entry, relative to the largest entry."""
    error = float((values.float() - right).abs().max() / right.abs().max())
    return round(-math.log2(error), 2) if error else math.inf


def _about(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]


def apart(name: str, call: Callable[[], dict[str, Any]], most_s: float) -> dict[str, Any]:
    """Runs a part in a process of its own, and prints and returns its result."""
    reader, writer = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            result = call()
        except BaseException as error:
            result = {"error": _about(error)}
        with suppress(BaseException), open(writer, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, most_s)
    with open(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        result = json.loads(text)
    except ValueError:
        late = time.monotonic() - began >= most_s
        result = {"error": f"took longer than {most_s:.0f} s" if late else f"its process ended: wait status {status}"}
    result = {"part": name, "seconds": round(time.monotonic() - began, 2), **result}
    print(json.dumps(result), flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.replace("``", ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a test of this script")
    parser.add_argument("--budget", type=float, default=480.0, metavar="SECONDS")
    parser.add_argument("--peak-tflops", type=float, metavar="N", help="the GPU's data sheet, dense bfloat16")
    asked = parser.parse_args()
    end = time.monotonic() + asked.budget
    sys.path.insert(0, str(ROOT))
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        # Imported once, before the processes are forked. None of it touches the GPU.
        import torch  # noqa: F401
        from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401

        from megaflow_hpc.training.trainer import optimizer  # noqa: F401
    except ImportError as error:
        print(json.dumps({"part": "machine", "error": _about(error), "python": sys.executable}))
        return 2
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(asked, Path(folder))
        row, short, long = bench._lengths(bench.short), [bench.short], [bench.long]
        parts: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
            "machine": (bench.machine, 30),
            "product": (bench.product, 30),
            "attention": (bench.attention, 60),
            "weights": (bench.weights, 60),
            "step: packed, short": (lambda: bench.step(row, True), 90),
            "step: one sequence, short": (lambda: bench.step(short, True), 90),
            "step: one sequence, long": (lambda: bench.step(long, True), 120),
            "step: packed, short, layers kept": (lambda: bench.step(row, False), 90),
        }
        failed = 0
        for name, (call, most_s) in parts.items():
            left = end - time.monotonic() - GRACE_S
            if left < GRACE_S:
                result = {"part": name, "error": f"not started: the budget of {asked.budget:.0f} s is used up"}
                print(json.dumps(result), flush=True)
            else:
                result = apart(name, call, min(most_s, left))
            if name == "machine" and "error" in result:
                return 2
            if name == "product":
                bench.product_tflops = result.get("tflops", math.nan)
            failed += "error" in result
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
