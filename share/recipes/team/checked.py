"""The puzzles of the recipe reasoning, with a reward for the checker if it is right about the last answer."""

import re

from puzzles import TestPuzzle


class CheckedTestPuzzle(TestPuzzle):
    def score(self, sandbox, messages, roles):
        reward = super().score(sandbox, messages)
        words = re.findall(r"[a-z]+", (roles["checker"][-1]["content"] or "").lower())
        return {"reward": reward, "right": float((words[-1:] == ["yes"]) == (reward == 1))}


class CheckedPuzzle(CheckedTestPuzzle):
    file = "train.jsonl"
