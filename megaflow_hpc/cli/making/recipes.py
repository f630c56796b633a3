"""``recipes``: lists the recipes, or shows one."""

from __future__ import annotations

import argparse

from megaflow_hpc.cli.output import print_json, say, table
from megaflow_hpc.cli.verb import Subparsers, add_verb
from megaflow_hpc.resources import docs


def register(subparsers: Subparsers) -> None:
    """Registers ``recipes``."""
    verb = add_verb(
        subparsers,
        "recipes",
        _recipes,
        "list complete campaigns to start from, or show one",
        examples=["recipes", "recipes reasoning", "init --recipe reasoning"],
        description="A recipe is a campaign with its tasks, its agent, a rehearsal that takes seconds, and figures to "
        f"compare with. megaflow-hpc init --recipe NAME writes its files. {docs('how-to/recipes.md')} compares all.",
    )
    verb.add_argument("name", metavar="NAME", nargs="?", help="show this recipe; default: list all")


def _recipes(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.recipes import find_recipe, recipe_names

    recipes = [find_recipe(name) for name in ([arguments.name] if arguments.name else recipe_names())]
    if arguments.json:
        print_json([recipe.to_builtins() for recipe in recipes])
        return 0
    if not arguments.name:
        rows = [(recipe.name, recipe.title, recipe.needs.image, recipe.needs.gpu) for recipe in recipes]
        say(table(("recipe", "what it is", "image", "GPU"), rows))
        say("One of them: megaflow-hpc recipes NAME; its files: megaflow-hpc init --recipe NAME")
        return 0
    [recipe] = recipes
    say(f"{recipe.title}\n{recipe.summary}")
    say(f"  image     {recipe.needs.image}\n  GPU       {recipe.needs.gpu}")
    missing = recipe.missing
    for package in recipe.needs.packages:
        lacks = ", not installed" if package in missing else ""
        say(f"  package   {package.name} {package.version} ({package.licence}{lacks})")
    for expected in recipe.expected:
        say(f"  expected  {expected.figure}\n            {expected.source}")
    for measured in recipe.measured:
        say(f"  measured  {measured.figure}\n            {measured.on}; {measured.took}; {measured.date}")
    if not recipe.measured:
        say("  measured  nothing yet")
    say(f"  files     {', '.join(recipe.files)}")
    say("Next:")
    for command in (f"megaflow-hpc init --recipe {recipe.name} && cd {recipe.name}", *recipe.commands):
        say(f"  {command}")
    return 0
