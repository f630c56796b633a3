"""A random tree of conversations: agents, their sub-agents, forks, titles, windows, compactions, edits and hang-ups.

An agent's actions depend only on the tree's seed and the agent's position in the tree, not on timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import zlib
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import anthropic
import msgpack
import openai

from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.rollout import _add
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import AgentResult, Rollout
from tests.model.gateway.trees.clients import KINDS, Clients, Left, Request, Said, ToolCall
from tests.model.gateway.trees.engine import MODELS, PROMPTS, Engine

SYSTEMS = ("You are a helper.", "Be exact.")
RESULTS = ("ok", "ok", "")
FOLLOW_UPS = ("Go on.", "Why?")
REFUSALS = (openai.BadRequestError, anthropic.BadRequestError)
LATE_S = 0.03
"""Delay in seconds of an answer whose client leaves before it arrives."""


@dataclass
class Exchange:
    """One call, as its client knows it."""

    request: Request
    kind: tuple[str, str]
    replies: list[Said] | None = None
    """``None`` if the client left or was refused."""


@dataclass
class Tree:
    """One rollout. :meth:`grow` returns its trajectory."""

    seed: str
    gateway: ModelGateway
    clients: Clients
    engine: Engine
    exchanges: list[Exchange] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)
    """Counts of what happened in the tree."""
    left: int = 12
    """Number of calls that it may still make."""

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.policy = self.draw.choice(list(MODELS))
        self._aside: list[asyncio.Task[Any]] = []

    async def grow(self, number: int) -> Trajectory:
        """Runs one or two steps of a task. The second step continues the conversations of the first."""
        rollout = Rollout("tree", self.policy, number, "random")
        try:
            return await self._steps(rollout)
        except BaseException:
            for task in self._aside:
                task.cancel()
            await asyncio.gather(*self._aside, return_exceptions=True)
            with contextlib.suppress(MegaflowError, KeyError):
                await self._quiet(rollout)
                await self.gateway.close(rollout.id)
            raise

    async def _steps(self, rollout: Rollout) -> Trajectory:
        trajectory = Trajectory.begin(rollout, 0, "completed")
        agents: list[Agent] = []
        for step in range(self.draw.choice((1, 1, 1, 2))):
            await self._connect(rollout, None)
            agents += [self.agent(f"{step}.{n}") for n in range(self.draw.choice((1, 1, 2)))]
            for part in range(self.draw.choice((1, 1, 1, 2))):
                if part:
                    await self._resume(rollout)
                for agent in agents:
                    self.aside(agent.run(self.draw.choice((2, 3, 4))))
                while self._aside:
                    done, _ = await asyncio.wait(self._aside, return_when=asyncio.FIRST_COMPLETED)
                    self._aside = [task for task in self._aside if task not in done]
                    for task in done:
                        task.result()
                await self._quiet(rollout)
            _add(trajectory, AgentResult(), await self.gateway.close(rollout.id))
            self.did["steps"] += 1
        return trajectory

    async def _quiet(self, rollout: Rollout) -> None:
        """Waits for calls whose clients have left."""
        while self.engine.working or self.gateway.activity()[rollout.id][2]:
            await asyncio.sleep(0.002)

    async def _connect(self, rollout: Rollout, recorded: Any) -> None:
        self.clients.connect(await self.gateway.open(rollout.id, self.policy, recorded=recorded))

    async def _resume(self, rollout: Rollout) -> None:
        """Continues in another allocation."""
        self.gateway.suspend(rollout.id, now=False)
        try:
            await self.clients.ask(("openai", "chat"), Request(self.policy, 1, [Said("user", "last")]))
            raise AssertionError("a suspended rollout was answered")
        except openai.InternalServerError:
            state = msgpack.packb(self.gateway.suspended(rollout.id))
        await self.gateway.close(rollout.id)
        await self._connect(rollout, msgpack.unpackb(state, strict_map_key=False))
        self.did["resumed"] += 1

    def aside(self, work: Coroutine[Any, Any, Any]) -> None:
        """Does something beside the rest."""
        self._aside.append(asyncio.create_task(work))

    def agent(self, path: str, told: str = "", depth: int = 0) -> Agent:
        draw = random.Random(f"{self.seed}/{path}")
        history = [Said("user", told or draw.choice((*PROMPTS, f"Task {path}.")))]
        if draw.random() < 0.8:
            history.insert(0, Said("system", draw.choice(SYSTEMS)))
        policy = self.policy if draw.random() < 0.8 else draw.choice(list(MODELS))
        kinds = KINDS["litellm" if self.clients.litellm and draw.random() < 0.25 else "native"]
        return Agent(self, path, draw, draw.choice(kinds), history, policy, depth)


@dataclass
class Agent:
    """One conversation of a client."""

    tree: Tree
    path: str
    draw: random.Random
    kind: tuple[str, str]
    history: list[Said]
    policy: str
    depth: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        self.thinks = self.kind != ("litellm", "chat") and self.draw.random() < 0.4
        """Whether the client sends thoughts back."""

    def chance(self, share: float, what: str = "") -> bool:
        happens = self.draw.random() < share
        if happens and what:
            self.tree.did[what] += 1
        return happens

    async def run(self, turns: int) -> str:
        """Makes some calls; returns the last answer's text."""
        last = ""
        for _ in range(turns):
            if self.history[-1].role == "assistant":
                self.history.append(Said("user", "And now?"))
            self._change()
            replies = await self.ask(Request(self._model(), 0, list(self.history), n=self._answers()))
            if replies is None:
                if self.tree.left and self.chance(0.5, "asked again after no answer"):
                    replies = await self.ask(Request(self._model(), 0, list(self.history)))
                if replies is None:
                    continue
            if self.chance(0.1, "forks"):
                fork = replace(self, path=f"{self.path}.f{self.calls}", history=list(self.history))
                fork.draw = random.Random(f"{self.tree.seed}/{fork.path}")
                self._take(self.draw.choice(replies), fork)
                self.tree.aside(fork.run(2))
            answer = self.draw.choice(replies)
            last = answer.text
            self._take(answer, self)
            await self._go_on(answer)
            if self.chance(0.12, "titles"):
                self._title()
        return last

    async def ask(self, request: Request) -> list[Said] | None:
        """Makes one call. Returns its answers, or ``None`` if the client left or was refused."""
        tree = self.tree
        if tree.left <= 0:
            return None
        tree.left -= 1
        self.calls += 1
        request.call = 100_000 + zlib.crc32(f"{tree.seed}/{self.path}/{self.calls}".encode()) % 2**30
        request.stream, request.parts = self.chance(0.5, "streams"), self.chance(0.2)
        maker = self.kind[0]
        if maker == "litellm" and request.stream:
            request.n = 1  # it puts the alternatives of a stream together as one
        leaves = self.chance(0.1, "hang-ups")
        request.leave = leaves and request.stream and maker != "litellm" and self.chance(0.6, "hang-ups in a stream")
        exchange = Exchange(request, self.kind)
        tree.exchanges.append(exchange)
        tree.did[" ".join(self.kind)] += 1
        work = tree.clients.ask(self.kind, request)
        try:
            if leaves and not request.leave:
                tree.engine.delays[request.call] = LATE_S
                exchange.replies = await asyncio.wait_for(work, self.draw.choice((LATE_S / 3, LATE_S)))
            else:
                exchange.replies = await work
        except (Left, TimeoutError):
            return None
        except (*REFUSALS, RuntimeError) as error:
            # An engine that tells no tokens where it should is taken for broken if it gives several answers.
            if request.n == 1 or self._policy_of(request.model) != "mute" or "BadRequest" not in repr(error):
                raise
            tree.did["refused"] += 1
            return None
        return exchange.replies

    def _policy_of(self, model: str) -> str:
        return model if model in MODELS else self.tree.policy

    def _model(self) -> str:
        if self.chance(0.1, "policy changed"):
            return self.draw.choice(list(MODELS))
        return self.policy if self.policy != self.tree.policy or self.chance(0.5) else "gpt-of-the-agent"

    def _answers(self) -> int:
        return self.draw.choice((2, 3)) if self.kind[1] == "chat" and self.chance(0.25, "n > 1") else 1

    # --- what becomes of an answer ---------------------------------------------------------------------------------

    def _take(self, answer: Said, agent: Agent) -> None:
        """Appends an answer in the form in which this client sends it back."""
        calls = answer.calls
        if self.chance(0.3, "arguments encoded anew"):
            calls = tuple(replace(c, arguments=json.dumps(c.values, sort_keys=True, indent=1)) for c in calls)
        elif self.chance(0.2, "arguments completed"):
            calls = tuple(replace(c, arguments=json.dumps({**c.values, "timeout": 30})) for c in calls)
        text = answer.text.strip() if self.chance(0.2) else answer.text
        thought = answer.thought if self.thinks else ""
        if self.kind == ("litellm", "messages") and not (text.strip() or thought or calls):
            text, answer = "(nothing)", replace(answer, origin=None)  # it would leave the message out
        agent.history.append(replace(answer, text=text, thought=thought, calls=calls))

    async def _go_on(self, answer: Said) -> None:
        calls = self.history[-1].calls
        results = list(await asyncio.gather(*(self._result(n, call) for n, call in enumerate(calls))))
        if self.chance(0.1):
            self.draw.shuffle(results)
        if results and self.chance(0.05, "results left out"):
            results.pop()
        self.history += results
        if not results:
            self.history.append(
                Said("user", self.draw.choice((*FOLLOW_UPS, *FOLLOW_UPS, f"More of {self.path} {self.calls}.")))
            )

    async def _result(self, number: int, call: ToolCall) -> Said:
        text = self.draw.choice((*RESULTS, f"out {self.path} {self.calls} {number}"))
        if call.name == "task" and self.depth < 2 and self.chance(0.7, "sub-agents"):
            told = str(call.values.get("prompt", "?"))
            child = self.tree.agent(f"{self.path}.{self.calls}{number}", told, self.depth + 1)
            text = await child.run(child.draw.choice((1, 2, 3)))
        return Said("tool", text, result_of=call.id)

    def _title(self) -> None:
        agent = self.tree.agent(f"{self.path}.t{self.calls}")
        told = self.history[min(1, len(self.history) - 1)].text or "Nothing."
        agent.history = [Said("system", "Give a title."), Said("user", told)]
        self.tree.aside(agent.ask(Request(agent._model(), 0, list(agent.history), tools=False)))

    # --- what becomes of the history -------------------------------------------------------------------------------

    def _change(self) -> None:
        """Changes the history like agents that limit their context or are asked to correct something."""
        head = [self.history[0]] if self.history[0].role == "system" else []
        rest = self.history[len(head) :]
        if len(rest) < 3:
            return
        if self.chance(0.1, "windows"):
            rest = rest[self.draw.randrange(1, len(rest)) :]
        elif self.chance(0.08, "compactions"):
            rest = [Said("user", self.draw.choice(("Summary: all is well.", f"Summary of {self.path}.")))]
        elif self.chance(0.08, "rewinds"):
            answers = [place for place, said in enumerate(rest) if said.role == "assistant" and place]
            rest = rest[: self.draw.choice(answers)] if answers else rest
        elif self.chance(0.12, "edits"):
            place = self.draw.randrange(len(rest))
            text = self.draw.choice(("(cut)", "OK.", "Done.", f"edited {self.path} {self.calls}"))
            if rest[place].role == "assistant":
                rest[place] = replace(rest[place], text=text, thought="", origin=None)
            else:
                rest[place] = replace(rest[place], text=text)
        if rest[-1].role == "assistant":
            rest.append(Said("user", "And now?"))
        self.history = [*head, *rest]
