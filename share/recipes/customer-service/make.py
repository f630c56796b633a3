"""Writes the scripted answers of the rehearsal: what each customer says, and what the clerk does.

usage: python make.py
"""

import json
from pathlib import Path

import shop

HERE = Path(__file__).parent


def main() -> None:
    customers, clerks = [], []
    for request in shop.requests().values():
        opening = request["brief"].replace("You are", "Hello, I am", 1)
        customers.append({"when": request["brief"], "answers": [opening, "Thank you. DONE"]})
        calls = [{"tool": name, "arguments": arguments} for name, arguments in request["calls"]]
        clerks.append({"when": opening, "answers": [*calls, "That is done, or I must refuse it, as our rules say."]})
    for name, answers in (("customer", customers), ("clerk", clerks)):
        (HERE / f"{name}.yaml").write_text(json.dumps({"tasks": answers}, indent=1))  # JSON is YAML
    print(f"customer.yaml, clerk.yaml: {len(customers)} conversations")


if __name__ == "__main__":
    main()
