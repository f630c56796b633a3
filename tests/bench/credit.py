"""Credit for turns against one number for the rollout: the steps that a tiny model needs, by the real trainer.

    ENGINE_VENV/bin/python -m tests.bench.credit [--seeds 3] [--turns 64] [--lr 0.0005 0.001 0.002] [--steps 150]

Each rollout is a conversation of many turns. Each turn asks one of 16 questions, and one of four answers is right. The
model begins with a small preference for right answers. The reward is the number of right answers, known at the end.

All runs of a seed have the same tasks, start and settings but two. ``advantage`` compares either the rewards of whole
rollouts (``dr_grpo``), or those of each turn (``returns_to_go`` with ``discount: 0``). And each of the two is run with
every learning rate, so that its best one counts. Planner, data flow, trainer and published weights are the product's
own. The published model itself samples all rollouts, in this process, without vLLM.

Prints the number of steps until 0.8 of the answers of five steps are right, and until the model's probability of the
right answer is 0.8 in the first turn, over all questions. Exit status 1: credit for turns needed more than 0.6 of the
other's steps, by the medians of either number.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

from launchers.tiny_model import make
from megaflow_hpc.ledger.blocks import numbers, read_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import current
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.trainer.loop import TrainingLoop
from megaflow_hpc.training.trainer.model import join
from megaflow_hpc.trajectory import TokenSequence, Trajectory, Turn
from megaflow_hpc.types import Rollout
from tests.support.training import Pods, training_run

QUESTIONS, ANSWERS, GOAL, MAX_RATIO = 16, b"abcd", 0.8, 0.6
SLOPPY = 0.1
"""Share of the first answers that are right for sure; the others are by chance."""
TASKS, BATCH, SAMPLES = 16, 2, 2
"""Tasks of the campaign, tasks of a step, and rollouts of each. So few, that noise limits what a step can learn."""
AVERAGED = 5
"""Steps whose rewards are averaged."""
START, ASKED = 257, 3
"""Token that begins a question, and the tokens of one."""


@dataclass(frozen=True)
class Game:
    """The right answers, and the questions of each task."""

    seed: int
    turns: int

    def right(self, question: int) -> int:
        """Return the token that answers a question."""
        return random.Random(f"{self.seed} {question}").choice(ANSWERS)

    def answer(self, question: int, chance: random.Random) -> int:
        """Return an answer as the first model gives them: seldom right for sure."""
        return self.right(question) if chance.random() < SLOPPY else chance.choice(ANSWERS)

    def questions(self, task: str) -> list[int]:
        """Return the questions of a task in their order."""
        chance = random.Random(f"{self.seed} {task}")
        return [chance.randrange(QUESTIONS) for _ in range(self.turns)]


def asked(question: int) -> list[int]:
    """Return the tokens of a question."""
    return [START, ord("Q"), ord("A") + question]


def teach(base: Path, out: Path, game: Game, batches: int = 300) -> None:
    """Teach the random model at ``base`` to answer by chance, with a small preference for what is right."""
    torch.manual_seed(game.seed)
    chance = random.Random(game.seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(batches):
        rows = []
        for _ in range(16):
            questions = chance.choices(range(QUESTIONS), k=game.turns)
            rows.append([token for one in questions for token in (*asked(one), game.answer(one, chance))])
        tokens = torch.tensor(rows)
        where = torch.arange(ASKED, tokens.shape[1], ASKED + 1)
        scores = model(input_ids=tokens).logits[:, where - 1]
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, where].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    for file in base.iterdir():
        if not (out / file.name).exists():
            (out / file.name).write_bytes(file.read_bytes())


class Sampler(Pods):
    """Samples the requested rollouts by the newest published weights."""

    def __init__(self, run: RunDir, game: Game, base: Path, seed: int) -> None:
        super().__init__(run, lambda rollout: None)
        self._own, self._game, self._base = run, game, base
        self._random = torch.Generator().manual_seed(seed)
        self._model: Any = None
        self._loaded = -1
        self._read: set[int] = set()
        self.first: dict[int, float] = {}
        """Weight version → probability of the right answer in a first turn, over all questions."""

    def work(self, *_: Any, **__: Any) -> int:
        """Sample all rollouts that are missing as one batch; return their number."""
        if not (new := set(numbers(self._own)) - self._read):
            return 0
        self._read |= new
        todo = [(block.number, rollout) for block in read_blocks(self._own, sorted(new)) for rollout in block.rollouts]
        newest = current(self._own, "default")
        if newest.version != self._loaded:
            path = newest.path or self._base
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            self._loaded = newest.version
            self.first[newest.version] = self._of_first_turns()
        for (block, _), trajectory in zip(todo, self._sampled([r for _, r in todo], newest.version), strict=True):
            self.store(block, trajectory)
        self._journal.commit()
        return len(todo)

    @torch.inference_mode()
    def _of_first_turns(self) -> float:
        scores = self._model(input_ids=torch.tensor([asked(one) for one in range(QUESTIONS)])).logits[:, -1]
        right = torch.tensor([[self._game.right(one)] for one in range(QUESTIONS)])
        return float(scores.softmax(-1).gather(-1, right).mean())

    @torch.inference_mode()
    def _sampled(self, rollouts: list[Rollout], version: int) -> list[Trajectory]:
        questions = [self._game.questions(rollout.task_id) for rollout in rollouts]
        cache, answers, logprobs = None, [], []
        for turn in range(self._game.turns):
            prompt = torch.tensor([asked(own[turn]) for own in questions])
            if turn:
                prompt = torch.cat([answers[-1], prompt], dim=1)
            out = self._model(input_ids=prompt, past_key_values=cache, use_cache=True)
            cache, scores = out.past_key_values, out.logits[:, -1].float().log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1, generator=self._random)
            answers.append(drawn)
            logprobs.append(scores.gather(-1, drawn))
        drawn, told = torch.cat(answers, dim=1).tolist(), torch.cat(logprobs, dim=1).tolist()
        return [self._trajectory(*one, version) for one in zip(rollouts, questions, drawn, told, strict=True)]

    def _trajectory(
        self, rollout: Rollout, questions: list[int], drawn: list[int], told: list[float], version: int
    ) -> Trajectory:
        one, turns, rights = TokenSequence(rollout.policy), [], []
        for question, answer, logprob in zip(questions, drawn, told, strict=True):
            one.tokens.extend([*asked(question), answer])
            one.logprobs.extend([float("nan")] * ASKED + [logprob])
            one.loss_mask.extend([0] * ASKED + [1])
            one.weight_versions.extend([-1] * ASKED + [version])
            turns.append(Turn(0, len(one.tokens) - 1, len(one.tokens), policy=rollout.policy))
            rights.append(answer == self._game.right(question))
        reward = float(sum(rights))
        rewards = {
            "reward": reward,
            "beyond_turns": 0.0,
            **{f"turn.{n}": float(right) for n, right in enumerate(rights)},
        }
        return Trajectory.begin(rollout, 0, "completed", reward=reward, rewards=rewards, sequences=[one], turns=turns)


def learn(folder: Path, base: Path, game: Game, advantage: dict[str, Any], lr: float, most: int) -> tuple[int, int]:
    """Train until both goals are reached. Return the steps to 0.8 right answers, in all turns and in first ones."""
    policy = {
        "loss": {"kind": "dapo", "entropy": 0.01},
        "advantage": advantage,
        "optimizer": {"lr": lr, "schedule": "constant", "warmup": 5},
        "dtype": "float32",
        "recompute": False,
        "microbatch": 2048,
    }
    fields = {"policies": {"default": policy}, "batch": BATCH, "steps": most, "staleness": 0, "checkpoint_every": 1000}
    run = training_run(folder, fields, TASKS, SAMPLES, str(base))
    sampler, over = Sampler(run, game, base, game.seed), threading.Event()

    def work() -> None:
        while not over.wait(0.1):
            sampler.work()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    flow = Dataflow(run, say=lambda text: None)
    reached: dict[str, int] = {}
    shares: list[float] = []
    try:
        for metrics in TrainingLoop(flow, join()).steps():
            step = int(metrics["step"])
            first = sampler.first[step - 1]
            shares.append(metrics["reward"] / game.turns)
            share = float(np.mean(shares[-AVERAGED:]))
            if first >= GOAL:
                reached.setdefault("first", step)
            if share >= GOAL and len(shares) >= AVERAGED:
                reached.setdefault("reward", step)
            if step % 20 == 0:
                told = f"reward {share:.3f}, first turn {first:.3f}, {time.process_time():.0f} s of CPU"
                print(f"  step {step}: {told}", file=sys.stderr)
            if len(reached) == 2:
                break
    finally:
        over.set()
        thread.join()
        flow.leave()
    return reached.get("reward", most), reached.get("first", most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--lr", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3], help="learning rates to try")
    parser.add_argument("--steps", type=int, default=150, help="maximum number of steps")
    given = parser.parse_args()
    torch.set_num_threads(1)
    to_go = {"name": "megaflow_hpc.training.recipes:returns_to_go", "args": {"discount": 0.0}}
    kinds = {
        # The rollout's reward is the sum of its turns' rewards, so it is not added to the last turn once more.
        "credit for turns": {"kind": to_go, "rewards": {"beyond_turns": 1.0}},
        "one number": {"kind": "dr_grpo"},
    }
    found: dict[tuple[str, float], list[tuple[int, int]]] = {}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        with tempfile.TemporaryDirectory() as temporary:
            folder, game = Path(temporary), Game(seed, given.turns)
            make(folder / "random", seed=seed, context=512)
            teach(folder / "random", folder / "base", game)
            for number, ((name, advantage), lr) in enumerate(itertools.product(kinds.items(), given.lr)):
                reached = learn(folder / str(number), folder / "base", game, advantage, lr, given.steps)
                found.setdefault((name, lr), []).append(reached)
                told = {"seed": seed, "kind": name, "lr": lr, "reward": reached[0], "first": reached[1]}
                print(json.dumps(told), flush=True)
    ratios = []
    for number, what in enumerate(("all turns", "the first turn")):
        best = {name: min(median(one[number] for one in found[name, lr]) for lr in given.lr) for name in kinds}
        turns, plain = best.values()
        ratios.append(turns / plain)
        counts = f"one number {plain:g}, credit for turns {turns:g}, ratio {turns / plain:.2f}"
        print(f"steps to {GOAL} of right answers in {what}: {counts}")
    return int(max(ratios) > MAX_RATIO)


if __name__ == "__main__":
    raise SystemExit(main())
