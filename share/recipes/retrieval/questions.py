"""Questions of make.py as tasks, and an agent that searches: the protocol of Search-R1, with a BM25 service."""

import json
import re
import string
from pathlib import Path

from megaflow_hpc.agents import ask
from megaflow_hpc.types import AgentResult

HERE = Path(__file__).parent
PROMPT = """\
Answer the question. You can search an encyclopedia: write <search>words</search>, and you are told the best passages.
Search as often as you need, one search per turn. Then write the answer, as short as possible, between <answer> and
</answer>.

Question: """
FETCH = """\
import sys, urllib.parse, urllib.request
query = urllib.parse.urlencode({"q": sys.argv[1], "k": 3})
print(urllib.request.urlopen("http://search:8000/search?" + query, timeout=30).read().decode())
"""
"""Runs in the sandbox, from which the service is reached by its name."""


class Question:
    """A question of questions.jsonl."""

    image = "base"
    timeout_s = 1800

    @classmethod
    def instances(cls):
        path = HERE / "questions.jsonl"
        if not path.exists():
            raise FileNotFoundError(f"{path}: make it with: python {HERE / 'make.py'}")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return {f"question-{number:04}": row for number, row in enumerate(rows)}

    def __init__(self, question, answer, titles):
        self.answer, self.titles = answer, titles
        self.instruction = PROMPT + question
        self.found = None

    async def solve(self, sandbox):  # what the agent `oracle` does: the answer must be in the last passage found
        texts = [(await search(sandbox, title))[0]["text"] for title in self.titles]
        self.found = self.answer if self.answer in texts[-1] else None

    def score(self, sandbox, messages):
        answers = [m["content"] or "" for m in messages if m["role"] == "assistant"]
        given = self.found or (between("answer", answers[-1]) if answers else None)
        return float(given is not None and plain(given) == plain(self.answer))


async def search(sandbox, query):
    """Returns the best passages for a query."""
    done = await sandbox.exec(["python3", "-c", FETCH, query[:1000]], timeout_s=60)
    if done.exit_code:
        raise RuntimeError(f"the search service does not answer: {done.stderr[-300:]}")
    return json.loads(done.stdout)


def between(tag, text):
    """Returns the last text between <tag> and </tag>, or None."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def plain(answer):
    """Returns an answer without case, punctuation and articles, as SQuAD compares answers."""
    text = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


class Searcher:
    """Lets the model search until it answers.

    Args:
        max_turns: maximum number of answers of the model.
        max_tokens: maximum length of an answer.
    """

    def __init__(self, max_turns=None, max_tokens=512):
        self.turns, self.max_tokens = max_turns or 8, max_tokens

    async def run(self, task, sandbox, model):
        messages = [{"role": "user", "content": task.instruction}]
        for _ in range(self.turns):
            answer = await ask(model, messages, max_tokens=self.max_tokens)
            messages.append(answer.message)
            query = between("search", answer.text)
            if between("answer", answer.text) is not None:
                return AgentResult(messages=messages)
            text = "Write <search>words</search> or <answer>the answer</answer>."
            if query:
                passages = await search(sandbox, query)
                text = "\n".join(f"{p['title']}: {p['text']}" for p in passages) or "Nothing was found."
            messages.append({"role": "user", "content": text})
        return AgentResult(status="truncated", error=f"no answer after {self.turns} turns", messages=messages)
