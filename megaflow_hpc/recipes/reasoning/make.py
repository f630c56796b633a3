"""Writes train.jsonl, test.jsonl and the scripted answers of the rehearsal, by reasoning-gym.

usage: python make.py [--train N] [--test N]      N puzzles of each kind

Training and test puzzles come from different seeds. The same versions and seeds make the same puzzles.
"""

import argparse
import json
from pathlib import Path

try:
    import reasoning_gym
except ModuleNotFoundError:
    raise SystemExit("error: this recipe needs reasoning-gym: pip install reasoning-gym==0.1.25") from None

KINDS = {
    "chain_sum": {"max_terms": 4, "max_digits": 2},
    "basic_arithmetic": {"max_terms": 4, "max_digits": 2},
    "gcd": {},
    "leg_counting": {"max_animals": 4},
    "simple_equations": {},
    "number_sequence": {},
    "syllogism": {},
    "family_relationships": {},
    "knights_knaves": {},
}
"""Kind of puzzle → settings. Some other kinds of reasoning-gym call ``eval`` on the model's answer: do not add them."""
SEEDS = {"train": 0, "test": 1}
HERE = Path(__file__).parent


def puzzles(seed: int, size: int):
    """Yields puzzles of every kind."""
    for kind, settings in KINDS.items():
        dataset = reasoning_gym.create_dataset(kind, seed=seed, size=size, **settings)
        for number, entry in enumerate(dataset):
            yield {"id": f"{kind}-{seed}-{number:05}", "kind": kind, **entry}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--test", type=int, default=20)
    asked = parser.parse_args()
    for name, seed in SEEDS.items():
        made = list(puzzles(seed, vars(asked)[name]))
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(each, default=str) + "\n" for each in made))
        print(f"{name}.jsonl: {len(made)} puzzles")
    answers = [
        {"when": each["question"], "answers": [f"I know it: <answer>{each['answer']}</answer>"]}
        for each in puzzles(SEEDS["test"], 1)
    ]
    (HERE / "answers.yaml").write_text(json.dumps({"tasks": answers}, indent=1))  # JSON is YAML
    (HERE / "nothing.yaml").write_text('default: [""]\n')


if __name__ == "__main__":
    main()
