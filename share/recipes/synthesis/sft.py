"""Writes right answers as demonstrations for supervised fine-tuning.

usage: python sft.py EXPORTED OUT.jsonl [--per-task N]

EXPORTED is the directory of megaflow-hpc export --format jsonl. Each line of OUT is {"messages": […]}. Equal answers to
a task count once, and a task gives at most N answers (4), so that easy tasks do not prevail.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-task", type=int, default=4)
    asked = parser.parse_args()
    kept = defaultdict(dict)
    for path in sorted(asked.exported.glob("*.jsonl")):
        for line in path.open():
            rollout = json.loads(line)
            answers = kept[rollout["task_id"]]
            if len(answers) < asked.per_task:
                answers[rollout["messages"][-1]["content"]] = rollout["messages"]
    lines = [json.dumps({"messages": messages}) for answers in kept.values() for messages in answers.values()]
    asked.out.write_text("".join(f"{line}\n" for line in lines))
    print(f"{asked.out}: {len(lines)} demonstrations of {len(kept)} tasks")


if __name__ == "__main__":
    main()
