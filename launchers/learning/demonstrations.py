"""Makes the model that the learning curve starts from: a tiny one, taught by sloppy demonstrations.

A random model never writes a command, and what is never done is never rewarded. So it is shown commands first: mostly
for what was asked, and most of them spoiled by a slip after which they earn nothing. What it then gets right, about
one time in ten, is what there is to reinforce. Run it with the interpreter that has torch and transformers, by path::

    ENGINE_VENV/bin/python launchers/learning/demonstrations.py OUT [--seed 0] [--batches 200]

``OUT`` becomes a model directory; one that is complete with the same settings is left as it is. ``OUT/taught.json``
says what was shown and what the model does after it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_model
from operations import OPERATIONS, Operation

FORMAT = 1
"""Version of the files made; increase it when a change here, or of the operations, makes others of the same
settings."""
RIGHT = 0.85
"""Share of demonstrations that do what was asked, before they are spoiled; the others do something else."""
SPOILED = 0.9
"""Share of demonstrations with a slip."""
SLIPS: tuple[Callable[[str], str], ...] = (
    lambda command: command.replace(" > out", ""),  # the result is nowhere
    lambda command: command.replace(" > out", " > in"),  # or where it does not belong
    lambda command: command.replace(" in ", " out "),  # it reads what is not there
    lambda command: command.replace(" > out", " | out"),
    lambda command: f"cat {command}",
)
BATCH = 64
RATE, WARM_UP, CLIP = 1e-3, 20, 1.0
"""Of AdamW without decay; the rate rises over that many batches. Gradients are cut to that norm."""
ANSWER = 24
"""Tokens of an answer at most, as the agent asks for."""
TRIES = 32
"""Answers to each request from which the model's success is told."""
REPORT = "taught.json"


def demonstration(chance: random.Random) -> tuple[str, str]:
    """Returns a request, and a command of the kind that was shown for it."""
    asked = chance.choice(list(OPERATIONS.values()))
    done = asked if chance.random() < RIGHT else chance.choice(list(OPERATIONS.values()))
    command = done.solution
    return asked.instruction, chance.choice(SLIPS)(command) if chance.random() < SPOILED else command


def make(out: Path, *, seed: int = 0, batches: int = 200) -> dict[str, Any]:
    """Makes the model at ``out``, whole or not at all, unless it is there; returns its report."""
    shown = {"right": RIGHT, "spoiled": SPOILED, "slips": len(SLIPS), "batch": BATCH, "rate": RATE}
    settings = {"format": FORMAT, "model": tiny_model.FORMAT, "seed": seed, "batches": batches, **shown}
    if tiny_model.is_complete(out, settings):
        report: dict[str, Any] = json.loads((out / REPORT).read_text())
        return report
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        staged = work / out.name
        tiny_model.make(staged, seed=seed, context=512)
        report = {"settings": settings, **_teach(staged, seed, batches)}
        (staged / REPORT).write_text(json.dumps(report, indent=1) + "\n")
        (staged / tiny_model.MARK).write_text(json.dumps(settings))
        if out.exists():
            shutil.rmtree(out)
        os.rename(staged, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return report


def _teach(folder: Path, seed: int, batches: int) -> dict[str, Any]:
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

    torch.set_num_threads(1)  # so small a model gains nothing by more, and on a busy machine they wait for each other
    torch.manual_seed(seed)
    chance = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    began, losses = time.monotonic(), []
    for number in range(batches):
        rows = [_row(tokenizer, *demonstration(chance)) for _ in range(BATCH)]
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((BATCH, longest), tokenizer.pad_token_id)
        wanted = torch.full((BATCH, longest), -100)
        for index, (prompt, answer) in enumerate(rows):
            length = len(prompt) + len(answer)
            ids[index, :length] = torch.tensor(prompt + answer)
            wanted[index, len(prompt) : length] = ids[index, len(prompt) : length]
        # Padding is on the right, where nothing that counts sees it.
        loss = model(input_ids=ids, labels=wanted).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (number + 1) / WARM_UP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number % 50 == 49:
            seconds = time.monotonic() - began
            print(f"batch {number + 1} of {batches}, loss {losses[-1]:.3f}, {seconds:.0f} s", flush=True)
    taught_s = time.monotonic() - began
    answers = {name: _answers(model, tokenizer, operation) for name, operation in OPERATIONS.items()}
    success = {name: answers[name].count(operation.solution) / TRIES for name, operation in OPERATIONS.items()}
    model.save_pretrained(folder, safe_serialization=True)
    return {
        "seconds": round(taught_s, 1),
        "demonstrations": batches * BATCH,
        "loss": round(sum(losses[-10:]) / len(losses[-10:]), 3),
        "success": {"mean": sum(success.values()) / len(success), **success},
        "answers": {name: given[:4] for name, given in answers.items()},
    }


def _prompt(tokenizer: Any, request: str) -> list[int]:
    messages = [{"role": "user", "content": request}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return found


def _row(tokenizer: Any, request: str, command: str) -> tuple[list[int], list[int]]:
    answer = tokenizer(command, add_special_tokens=False).input_ids
    return _prompt(tokenizer, request), [*answer, tokenizer.eos_token_id]


def _answers(model: Any, tokenizer: Any, operation: Operation) -> list[str]:
    """Answers to one request, sampled from the whole distribution."""
    import torch

    prompt = torch.tensor([_prompt(tokenizer, operation.instruction)] * TRIES)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": ANSWER}
    with torch.inference_mode():
        found = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **options,
        )
    return [tokenizer.decode(row[prompt.shape[1] :], skip_special_tokens=True) for row in found]


def main() -> int:
    parser = argparse.ArgumentParser(description="makes a tiny model and teaches it by sloppy demonstrations")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=200)
    arguments = parser.parse_args()
    report = make(arguments.out, seed=arguments.seed, batches=arguments.batches)
    print(
        f"{arguments.out}: {report['demonstrations']} demonstrations in {report['seconds']:.0f} s; "
        f"{report['success']['mean']:.3f} of its answers are right"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
