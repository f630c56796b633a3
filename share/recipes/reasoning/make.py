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
WRONG = "I do not know: <answer>?</answer>"
HERE = Path(__file__).parent


def puzzles(seed: int, size: int):
    """Yields puzzles of every kind."""
    for kind, settings in KINDS.items():
        dataset = reasoning_gym.create_dataset(kind, seed=seed, size=size, **settings)
        for number, entry in enumerate(dataset):
            yield {"id": f"{kind}-{seed}-{number:05}", "kind": kind, **entry}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=100)
    parser.add_argument("--test", type=int, default=20)
    asked = parser.parse_args()
    for name, seed in SEEDS.items():
        made = list(puzzles(seed, vars(asked)[name]))
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(each, default=str) + "\n" for each in made))
        print(f"{name}.jsonl: {len(made)} puzzles")
    right = {each["question"]: f"I know it: <answer>{each['answer']}</answer>" for each in puzzles(SEEDS["test"], 1)}
    script("answers", {question: [answer] for question, answer in right.items()})
    # In teams, the second answer of every other kind is right.
    script("corrected", {question: [WRONG, *[right[question]][n % 2 :]] for n, question in enumerate(right)})
    script("nothing", {})


def script(name: str, answers: dict[str, list[str]]) -> None:
    """Writes answers to questions for the scripted engine."""
    tasks = [{"when": question, "answers": each} for question, each in answers.items()]
    (HERE / f"{name}.yaml").write_text(json.dumps({"tasks": tasks, "default": [""]}, indent=1))  # JSON is YAML


if __name__ == "__main__":
    main()
