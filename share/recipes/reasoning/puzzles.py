"""Puzzles of make.py as tasks, and the agent that answers them: one call of the model."""

import json
from pathlib import Path

from megaflow_hpc.agents import ask
from megaflow_hpc.types import AgentResult

HERE = Path(__file__).parent
FORMAT = "\n\nThink step by step. Then write the final answer between <answer> and </answer>."


class TestPuzzle:
    """A puzzle of test.jsonl."""

    image = "none"
    file = "test.jsonl"

    @classmethod
    def instances(cls):
        path = HERE / cls.file
        if not path.exists():
            raise FileNotFoundError(f"{path}: make it with: python {HERE / 'make.py'}")
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        return {entry["id"]: {"entry": entry} for entry in entries}

    def __init__(self, entry):
        self.entry = entry
        self.instruction = entry["question"] + FORMAT

    def score(self, sandbox, messages):
        # Imported here, because it takes seconds and only workers score.
        import reasoning_gym
        from reasoning_gym.utils import extract_answer

        answers = [message["content"] or "" for message in messages if message["role"] == "assistant"]
        answer = extract_answer(answers[-1]) if answers else None
        return float(reasoning_gym.get_score_answer_fn(self.entry["kind"])(answer, self.entry))


class TrainingPuzzle(TestPuzzle):
    """A puzzle of train.jsonl."""

    file = "train.jsonl"


class Answerer:
    """Asks the model once.

    Args:
        max_tokens: maximum length of the answer.
    """

    def __init__(self, max_tokens=1024):
        self.max_tokens = max_tokens

    async def run(self, task, sandbox, model):
        messages = [{"role": "user", "content": task.instruction}]
        answer = await ask(model, messages, max_tokens=self.max_tokens)
        return AgentResult(messages=[*messages, answer.message])
