"""Makes the model that a learning curve starts from, by supervised training on sloppy demonstrations.

A random model never writes a command, and rewards cannot reinforce what never happens. SmolLM2 writes sentences
instead of commands. So the model first learns from demonstrations: most do what was asked, and most of those have a
slip that costs the reward. About one attempt in ten then succeeds, which is what training reinforces. Run this with an
interpreter that has torch and transformers, by path::

    ENGINE_VENV/bin/python launchers/learning/demonstrations.py OUT [--turns 1|2|3] [--model tiny|smollm2] [--seed 0]

``OUT`` becomes a model directory. A complete one with the same settings is left as it is. ``OUT/taught.json`` reports
the settings and the rate of success afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import packaged_model
import tiny_model
from operations import OPERATIONS
from searches import SEARCHES

FORMAT = 4
"""Version of the files made. Increase it when a change here or of the tasks makes other files of the same settings."""
ANSWER = 24
"""Maximum number of tokens in an answer; the agent's limit."""
TRIES = 32
"""Number of answers to each request from which the rate of success is computed."""
REPORT = "taught.json"

Demonstration = list[tuple[str, str]]
"""Commands in order, each with its output."""

SLIPS: tuple[Callable[[str], str], ...] = (
    lambda command: command.replace(" > out", "").replace(" out", ""),  # no result
    lambda command: command.replace(" > out", " > in").replace(" out", " in"),  # the result in another file
    lambda command: command.replace(" in ", " out ").replace(" d/", " "),  # a file that does not exist
    lambda command: command.replace(" > out", " | out").replace("cp ", "cp | "),
    lambda command: f"cat {command}",
)


@dataclass(frozen=True)
class Teaching:
    """Settings of the supervised training."""

    batches: int
    rate: float
    """Learning rate at the start."""
    right: float
    """Share of demonstrations that do what was asked, before slips are added. The others do something else."""
    spoiled: float
    """Share of commands with a slip, of the last turn; a third of it in earlier turns."""
    batch: int = 64
    """Conversations in an update."""
    microbatch: int = 8192
    dtype: str = "float32"
    threads: int = 1
    """Threads of torch. A tiny model gains nothing by more."""


TEACHING: Mapping[tuple[str, int], Teaching] = {
    ("tiny", 1): Teaching(batches=200, rate=2e-3, right=0.85, spoiled=0.9),
    ("tiny", 2): Teaching(batches=150, rate=2e-3, right=0.85, spoiled=0.85, batch=32),
    ("tiny", 3): Teaching(batches=200, rate=2e-3, right=0.9, spoiled=0.9, batch=24),
    **{
        ("smollm2", turns): Teaching(
            batches=60, rate=5e-5, right=0.9, spoiled=0.75, batch=8, microbatch=2048, dtype="bfloat16", threads=2
        )
        for turns in (2, 3)
    },
}
"""(model, number of turns) → settings."""


@dataclass(frozen=True)
class Lesson:
    """Requests, and the commands that fulfil them."""

    turns: int

    def names(self) -> list[str]:
        """Names of the tasks."""
        return list(OPERATIONS if self.turns == 1 else SEARCHES[self.turns])

    def instruction(self, name: str) -> str:
        """Returns a task's request."""
        return OPERATIONS[name].instruction if self.turns == 1 else SEARCHES[self.turns][name].instruction

    def solution(self, name: str, chance: random.Random) -> Demonstration:
        """Returns the commands that solve a task."""
        if self.turns == 1:
            return [(OPERATIONS[name].solution, "")]
        search = SEARCHES[self.turns][name]
        return search.turns(search.world(chance))

    def demonstration(self, teaching: Teaching, chance: random.Random) -> tuple[str, Demonstration]:
        """Returns a request and what is shown for it. Commands may have slips, but outputs are those of the right
        commands, so that a slip does not spoil the next turn."""
        asked = chance.choice(self.names())
        done = asked if chance.random() < teaching.right else chance.choice(self.names())
        shown = []
        for turn, (command, output) in enumerate(self.solution(done, chance), 1):
            spoiled = teaching.spoiled if turn == self.turns else teaching.spoiled / 3
            shown.append((chance.choice(SLIPS)(command) if chance.random() < spoiled else command, output))
        return self.instruction(asked), shown


def make(
    out: Path, *, model: str = "tiny", turns: int = 1, seed: int = 0, batches: int | None = None
) -> dict[str, Any]:
    """Makes the model at ``out``, completely or not at all, unless it exists. Returns its report.

    Args:
        batches: another number of batches than that of :data:`TEACHING`.
    """
    teaching = TEACHING[model, turns]
    if batches is not None:
        teaching = Teaching(**{**asdict(teaching), "batches": batches})
    settings = {"format": FORMAT, "model": model, "turns": turns, "seed": seed, **asdict(teaching)}
    if tiny_model.is_complete(out, settings):
        report: dict[str, Any] = json.loads((out / REPORT).read_text())
        return report
    out.parent.mkdir(parents=True, exist_ok=True)
    if model != "tiny":
        packaged_model.make(model, out.parent / model)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        base, staged = work / "base", work / out.name
        if model == "tiny":
            tiny_model.make(base, seed=seed, context=512)
        else:
            base = out.parent / model
        report = {"settings": settings, **_teach(base, staged, Lesson(turns), teaching, seed)}
        (staged / REPORT).write_text(json.dumps(report, indent=1) + "\n")
        (staged / tiny_model.MARK).write_text(json.dumps(settings))
        if out.exists():
            shutil.rmtree(out)
        os.rename(staged, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report


def _teach(base: Path, out: Path, lesson: Lesson, teaching: Teaching, seed: int) -> dict[str, Any]:
    """Trains the model at ``base`` on demonstrations, writes it to ``out``, and returns its report."""
    chance = random.Random(seed)
    conversations = teaching.batches * teaching.batch
    path = out.with_name("demonstrations.jsonl")
    with path.open("w", encoding="utf-8") as file:
        for _ in range(conversations):
            file.write(json.dumps({"messages": _messages(*lesson.demonstration(teaching, chance))}) + "\n")
    options = {"lr": teaching.rate, "batch": teaching.batch, "microbatch": teaching.microbatch, "dtype": teaching.dtype}
    command = [sys.executable, "-m", "megaflow_hpc.training.trainer.warm_start", base, path, out]
    command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(teaching.threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    began = time.monotonic()
    subprocess.run(command, env=environment, check=True)
    taught_s = time.monotonic() - began
    return {
        "seconds": round(taught_s, 1),
        "rows": conversations * lesson.turns,
        "success": _success(out, lesson, teaching, seed),
    }


def _messages(instruction: str, turns: Demonstration) -> list[dict[str, str]]:
    """Returns a conversation that ends with the last command."""
    messages = [{"role": "user", "content": instruction}]
    for command, output in turns:
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": output}]
    return messages[:-1]


def _success(folder: Path, lesson: Lesson, teaching: Teaching, seed: int) -> dict[str, float]:
    """Returns the rate at which each task is solved by its solution, and their mean."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

    torch.set_num_threads(teaching.threads)
    torch.manual_seed(seed)
    chance = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    dtype = getattr(torch, teaching.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    rates = {name: _rate(model, tokenizer, lesson, name, chance) for name in lesson.names()}
    return {"mean": sum(rates.values()) / len(rates), **rates}


def _rate(model: Any, tokenizer: Any, lesson: Lesson, name: str, chance: random.Random) -> float:
    """Returns the rate at which a task is solved by its solution: the product of the rates of its turns."""
    messages = _messages(lesson.instruction(name), lesson.solution(name, chance))
    rate = 1.0
    for turn in range(1, len(messages), 2):
        text = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        rate *= _answers(model, tokenizer, prompt).count(messages[turn]["content"]) / TRIES
    return rate


def _answers(model: Any, tokenizer: Any, prompt: list[int]) -> list[str]:
    """Samples answers to a prompt from the whole distribution."""
    import torch

    rows = torch.tensor([prompt] * TRIES)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": ANSWER}
    with torch.inference_mode():
        answers = model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **options,
        )
    return [tokenizer.decode(row[rows.shape[1] :], skip_special_tokens=True) for row in answers]


def main() -> int:
    parser = argparse.ArgumentParser(description="makes a model and teaches it by sloppy demonstrations")
    parser.add_argument("out", type=Path)
    parser.add_argument("--turns", type=int, default=1, choices=(1, 2, 3))
    parser.add_argument("--model", default="tiny", choices=("tiny", "smollm2"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=int, help="another number of batches than usual")
    asked = parser.parse_args()
    if (asked.model, asked.turns) not in TEACHING:
        parser.error(f"--model {asked.model} has no task of {asked.turns} turn; use --turns 2 or 3")
    report = make(asked.out, model=asked.model, turns=asked.turns, seed=asked.seed, batches=asked.batches)
    print(
        f"{asked.out}: {report['rows']} demonstrated answers in {report['seconds']:.0f} s; "
        f"{report['success']['mean']:.3f} of its attempts are right"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
