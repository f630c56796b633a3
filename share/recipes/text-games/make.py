"""Makes games by TextWorld: cooking games of rising difficulty, each with a walkthrough.

usage: python make.py [--games N] [--seed S]

Writes games/NAME.z8, games/games.json and the scripted answers of the rehearsal. The same version and seed make the
same games. A game takes some seconds.
"""

import argparse
import json
from pathlib import Path

try:
    from textworld import GameOptions
    from textworld.challenges.tw_cooking.cooking import make
    from textworld.generator import compile_game
except ModuleNotFoundError:
    raise SystemExit("error: this recipe needs TextWorld: pip install textworld==1.7.0") from None

LEVELS = (
    {"recipe": 1, "take": 1, "go": 1, "open": False, "cook": False, "cut": False},
    {"recipe": 1, "take": 1, "go": 1, "open": True, "cook": True, "cut": False},
    {"recipe": 2, "take": 2, "go": 6, "open": True, "cook": True, "cut": True},
    {"recipe": 3, "take": 3, "go": 9, "open": True, "cook": True, "cut": True},
)
"""Ingredients of the recipe, ingredients to fetch, rooms, and what has to be done."""
HERE = Path(__file__).parent / "games"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=len(LEVELS))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    HERE.mkdir(exist_ok=True)
    walkthroughs = {}
    for number in range(asked.games):
        level, seed = number % len(LEVELS), asked.seed + number
        name = f"cooking-{level + 1}-{seed:04}"
        options = GameOptions()
        options.seeds = seed
        options.path = str(HERE / f"{name}.z8")
        options.force_recompile = True
        game = make({**LEVELS[level], "drop": False, "recipe_seed": seed, "split": "train", "seed": seed}, options)
        compile_game(game, options)
        (HERE / f"{name}.ni").unlink(missing_ok=True)
        walkthroughs[name] = game.metadata["walkthrough"]
        print(f"{name}: {len(walkthroughs[name])} commands to win")
    (HERE / "games.json").write_text(json.dumps(walkthroughs, indent=1))
    answers = [
        {"when": f"This is game {name}.", "answers": [f"> {command}" for command in commands]}
        for name, commands in walkthroughs.items()
    ]
    (HERE.parent / "answers.yaml").write_text(json.dumps({"tasks": answers}, indent=1))  # JSON is YAML
    (HERE.parent / "nothing.yaml").write_text('default: ["> look"]\n')


if __name__ == "__main__":
    main()
