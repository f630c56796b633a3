"""Games of make.py as tasks, and two players: a model, and one that walks at random.

``score`` plays the commands of the conversation again in a fresh game, and reads the points there. So no answer of the
model and no state of the player can change the reward.
"""

import json
import random
import re
import threading
from pathlib import Path

from megaflow_hpc.agents import ask
from megaflow_hpc.types import AgentResult

HERE = Path(__file__).parent
MAX_COMMANDS = 100
SCORING = threading.Lock()
"""TextWorld parses with global state, and ``score`` runs in threads. Agents of a process take turns anyway."""
COMMAND = re.compile(r"^> *(.+)$", re.MULTILINE)
RULES = """\
You play a text game. Answer with one command per turn, on a line of its own that begins with >, for example:
> open fridge
Useful commands: look, inventory, examine THING, go north, open THING, take THING from THING, cook THING with THING,
chop THING with THING, slice THING with THING, dice THING with THING, drop THING, prepare meal, eat meal.
Read the cookbook first. A wrong preparation of food loses the game.
"""


class CookingGame:
    """A game of the directory games. Its reward is the share of the game's points."""

    image = "none"
    timeout_s = 3600

    @classmethod
    def instances(cls):
        games = json.loads((HERE / "games" / "games.json").read_text())
        return {name: {"name": name, "walkthrough": walkthrough} for name, walkthrough in games.items()}

    def __init__(self, name, walkthrough):
        self.file = str(HERE / "games" / f"{name}.z8")
        self.walkthrough = walkthrough
        self.instruction = f"{RULES}This is game {name}."
        self.commands = None

    async def solve(self, sandbox):  # what the agent `oracle` does
        self.commands = self.walkthrough

    def score(self, sandbox, messages):
        commands = self.commands or [command_of(m) for m in messages if m["role"] == "assistant"]
        with SCORING, Game(self.file) as game:
            for command in commands[:MAX_COMMANDS]:
                game.play(command)
            return {"reward": game.points / game.max_points, "won": float(game.won)}


class Game:
    """A game under way."""

    def __init__(self, file):
        import textworld  # takes a second or two, and planning needs no game

        infos = textworld.EnvInfos(score=True, max_score=True, won=True, admissible_commands=True)
        self._environment = textworld.start(file, infos)
        self._state = self._environment.reset()
        self.over, self.text = False, self._read()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._environment.close()

    def play(self, command):
        """Carries out a command. Does nothing when the game is over."""
        if not self.over:
            self._state, _, self.over = self._environment.step(command)
            self.text = self._read()

    def _read(self):
        lines = (line.rstrip() for line in self._state.feedback.splitlines())
        # The banner of a game is a picture, whose lines have no letters.
        return "\n".join(line for line in lines if re.search("[A-Za-z0-9]", line) and not line.startswith(">"))

    @property
    def points(self):
        return self._state.score

    @property
    def max_points(self):
        return self._state.max_score

    @property
    def won(self):
        return self._state.won

    @property
    def commands(self):
        """Commands that have an effect now."""
        return self._state.admissible_commands


def command_of(message):
    """Returns the command of an answer: its first line that begins with >, or else its first line."""
    text = message.get("content") or ""
    found = COMMAND.search(text)
    return (found[1] if found else text.strip().partition("\n")[0]).strip()[:200] or "look"


class Player:
    """Lets the model play.

    Args:
        max_turns: maximum number of commands.
        max_tokens: maximum length of an answer.
    """

    def __init__(self, max_turns=None, max_tokens=256):
        self.turns = min(max_turns or MAX_COMMANDS, MAX_COMMANDS)
        self.max_tokens = max_tokens

    async def run(self, task, sandbox, model):
        with Game(CookingGame(**task.metadata["python"]["arguments"]).file) as game:
            messages = [{"role": "user", "content": f"{task.instruction}\n{game.text}"}]
            for _ in range(self.turns):
                answer = await ask(model, messages, max_tokens=self.max_tokens)
                messages.append(answer.message)
                game.play(command_of(answer.message))
                if game.over:
                    break
                messages.append({"role": "user", "content": game.text})
        return AgentResult(messages=messages)


class RandomWalker:
    """Plays commands that have an effect, at random. Calls no model: a score that a model should exceed.

    Args:
        max_turns: number of commands.
        seed: start of the random numbers.
    """

    def __init__(self, max_turns=None, seed=0):
        self.turns, self.seed = min(max_turns or MAX_COMMANDS, MAX_COMMANDS), seed

    async def run(self, task, sandbox, model):
        choice = random.Random(f"{self.seed} {task.id}")
        messages = []
        with Game(CookingGame(**task.metadata["python"]["arguments"]).file) as game:
            for _ in range(self.turns):
                messages.append({"role": "user", "content": game.text})
                command = choice.choice(game.commands)
                messages.append({"role": "assistant", "content": f"> {command}"})
                game.play(command)
                if game.over:
                    break
        return AgentResult(messages=messages)
