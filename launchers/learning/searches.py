"""Tasks of two and three turns for the learning curve: an agent must find a file before it can work on it.

``d`` holds one file for each animal, named by a colour that is drawn for each rollout. So the output of one command
decides the next one, and guessing finds one file in five.

- two turns: the request names the animal. ``grep -l owl d/*`` prints ``d/grey``; ``tac d/grey > out`` does the rest.
- three turns: the file ``note`` names the animal, so ``cat note`` comes first.

Needs only the standard library: the demonstrations import this module in the engine's environment, the tasks in the
workers'.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ANIMALS = ("cat", "dog", "owl", "fox", "hen")
COLOURS = ("red", "blue", "green", "grey", "pink")
CONSONANTS = "bcdfgklmnprst"
"""Letters of the words in files. So no word contains an animal, and ``grep -l`` finds one file."""


@dataclass(frozen=True)
class Verb:
    """What is done with the file that was found."""

    request: str
    command: str
    """Shell command; ``{}`` is the file's name."""
    result: Callable[[list[str]], list[str]]
    """Lines of the file → lines of ``out``."""


VERBS: Mapping[str, Verb] = {
    "copy": Verb("copy", "cp {} out", list),
    "turn": Verb("turn", "tac {} > out", lambda lines: lines[::-1]),
    "count": Verb("count", "wc -l < {} > out", lambda lines: [str(len(lines))]),
    "first": Verb("top of", "head -n 1 {} > out", lambda lines: lines[:1]),
    "last": Verb("end of", "tail -n 1 {} > out", lambda lines: lines[-1:]),
}


@dataclass(frozen=True)
class World:
    """The files of one rollout."""

    animal: str
    """The animal whose file is wanted."""
    names: Mapping[str, str]
    """Animal → name of its file in ``d``."""
    contents: Mapping[str, str]
    """Animal → content of its file."""


@dataclass(frozen=True)
class Search:
    """One task.

    Attributes:
        animal: the animal that the request names; ``None`` if ``note`` names it.
    """

    verb: str
    animal: str | None = None

    @property
    def instruction(self) -> str:
        """Request to the agent."""
        return f"{VERBS[self.verb].request} the {self.animal or 'note'}"

    def world(self, random: random.Random) -> World:
        """Draws the files of a rollout. They differ in length and content, so each verb has another result for each."""
        names = dict(zip(ANIMALS, random.sample(COLOURS, len(COLOURS)), strict=True))
        counts = random.sample(range(3, 9), len(ANIMALS))
        contents = {
            animal: "".join(f"{animal} {_word(random)}\n" for _ in range(count))
            for animal, count in zip(ANIMALS, counts, strict=True)
        }
        return World(self.animal or random.choice(ANIMALS), names, contents)

    def turns(self, world: World) -> list[tuple[str, str]]:
        """Returns the commands that solve the task in order, each with its output."""
        name = f"d/{world.names[world.animal]}"
        found = (f"grep -l {world.animal} d/*", f"{name}\n")
        done = (VERBS[self.verb].command.format(name), "")
        return [found, done] if self.animal else [("cat note", f"{world.animal}\n"), found, done]

    def is_done(self, world: World, output: str) -> bool:
        """Returns whether ``output`` is the result for the wanted file."""
        expected = VERBS[self.verb].result(world.contents[world.animal].splitlines())
        return [line.split() for line in output.splitlines()] == [line.split() for line in expected]


SEARCHES: Mapping[int, Mapping[str, Search]] = {
    2: {f"{verb}-{animal}": Search(verb, animal) for verb in ("copy", "turn") for animal in ANIMALS},
    3: {f"{verb}-note": Search(verb) for verb in VERBS},
}
"""Number of turns → tasks by name."""


def _word(random: random.Random) -> str:
    return "".join(random.choices(CONSONANTS, k=random.randint(4, 7)))
