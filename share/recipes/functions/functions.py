"""Functions of HumanEval as tasks, and the agent that writes them."""

import json
import re
import secrets
from pathlib import Path

from megaflow_hpc.agents import ask
from megaflow_hpc.types import AgentResult

PROBLEMS = Path(__file__).parent / "problems.jsonl"
# Reads everything before it imports the solution, which then finds neither the tests nor the word on its input.
TESTER = """\
import json, sys
given = json.load(sys.stdin)
sys.path.insert(0, ".")
import solution
names = dict(vars(solution))
exec(given["test"], names)
names["check"](getattr(solution, given["entry_point"]))
print("\\n" + given["word"])
"""
TEST_S = 20


class Function:
    """A function to complete. The reward is 1 if it passes the unit tests, which the agent never sees."""

    image = "python"
    workdir = "/app"
    memory_mb = 1024
    processes = 64
    timeout_s = 600

    @classmethod
    def instances(cls):
        if not PROBLEMS.exists():
            raise FileNotFoundError(f"{PROBLEMS}: make it with: python {PROBLEMS.parent / 'make.py'}")
        entries = [json.loads(line) for line in PROBLEMS.read_text().splitlines()]
        return {entry["id"]: {"entry": entry} for entry in entries}

    def __init__(self, entry):
        self.entry = entry
        self.instruction = (
            "Complete this Python function. Answer with the whole function and its imports, between ```python and "
            f"```:\n\n{entry['prompt']}"
        )

    async def score(self, sandbox):
        word = secrets.token_hex(16)
        given = {"test": self.entry["test"], "entry_point": self.entry["entry_point"], "word": word}
        tested = await sandbox.exec(["python3", "-c", TESTER], user_input=json.dumps(given), timeout_s=TEST_S)
        return float(tested.stdout.splitlines()[-1:] == [word])

    async def solve(self, sandbox):  # the agent `oracle`
        await write(sandbox, self.entry["prompt"] + self.entry["canonical_solution"])


async def write(sandbox, code):
    await sandbox.exec(["sh", "-c", "cat > solution.py"], user_input=code)


class Coder:
    """Writes the model's code to solution.py, and shows the model which examples of the docstring fail.

    Args:
        turns: answers of the model at most. 1 gives pass@1.
        max_tokens: maximum length of an answer.
    """

    def __init__(self, turns=1, max_tokens=1024):
        self.turns, self.max_tokens = turns, max_tokens

    async def run(self, task, sandbox, model):
        messages = [{"role": "user", "content": task.instruction}]
        for turn in range(self.turns):
            answer = await ask(model, messages, max_tokens=self.max_tokens)
            messages.append(answer.message)
            blocks = re.findall(r"```(?:python)?\n(.*?)(?:```|\Z)", answer.text, re.DOTALL)
            await write(sandbox, max(blocks, key=len, default=answer.text))
            if turn + 1 == self.turns:
                break
            tried = await sandbox.exec(["python3", "-m", "doctest", "solution.py"], timeout_s=TEST_S)
            if tried.exit_code == 0:
                break
            output = (tried.stdout + tried.stderr)[-2000:]
            messages.append({"role": "user", "content": f"The examples fail:\n{output}\nCorrect the function."})
        return AgentResult(messages=messages)
