"""Example agents that work in a team of models.

Each agent calls the roles that its docstring names. The section ``team`` of the campaign file maps roles to models. The
agents assign no rewards. The task's ``score`` function receives each role's conversation in its parameter ``roles``,
and returns the rewards by name.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from megaflow_hpc.agents.asking import ModelAnswer, ask
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

Messages = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    """Returns a user message."""
    return {"role": "user", "content": text}


def agrees(answer: ModelAnswer) -> bool:
    """Returns whether the last word of an answer is "yes"."""
    words = re.findall(r"[a-z]+", answer.text.lower())
    return bool(words) and words[-1] == "yes"


class WriterChecker:
    """``writer`` answers, ``checker`` judges the answer, and ``writer`` corrects it until ``checker`` accepts it.

    Args:
        rounds: Maximum number of answers by ``writer``.
        max_tokens: Maximum number of tokens per answer. ``None`` means no limit.
    """

    def __init__(self, rounds: int = 2, max_tokens: int | None = None) -> None:
        self._rounds = rounds
        self._options: dict[str, Any] = {"max_tokens": max_tokens} if max_tokens else {}

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        messages = [user(task.instruction)]
        for _ in range(self._rounds):
            answer = await ask(model, messages, "writer", **self._options)
            messages.append(answer.message)
            verdict = await ask(
                model, f"{task.instruction}\n{answer.text}\nright? yes or no", "checker", **self._options
            )
            if agrees(verdict):
                break
            messages.append(user("A checker rejects this answer. Correct it."))
        return AgentResult(messages=messages)


class PlannerExecutor:
    """``planner`` writes a plan, and ``executor`` runs shell commands until it answers without a command.

    Args:
        max_turns: Maximum number of answers by ``executor``. ``None`` means 30.
    """

    def __init__(self, max_turns: int | None = None) -> None:
        self._max_turns = max_turns or 30

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        plan = await ask(model, f"Plan how to solve this task in a shell, in steps:\n{task.instruction}", "planner")
        messages = [
            user(
                f"Solve this task:\n{task.instruction}\nThe plan is:\n{plan.text}\n"
                "Write one shell command between ```bash and ```. You are then told its output. Answer without a "
                "command when the task is solved."
            )
        ]
        for _ in range(self._max_turns):
            answer = await ask(model, messages, "executor")
            messages.append(answer.message)
            command = re.search(r"```bash\n(.*?)```", answer.text, re.DOTALL)
            if command is None:
                return AgentResult(messages=messages)
            done = await sandbox.exec(command[1], timeout_s=120)
            messages.append(user(f"exit code {done.exit_code}\n{(done.stdout + done.stderr)[-8000:]}"))
        return AgentResult(status="truncated", error=f"not done after {self._max_turns} turns", messages=messages)


class Debate:
    """``pro`` and ``contra`` take turns arguing, and ``judge`` decides.

    Args:
        rounds: Number of arguments per side.
    """

    def __init__(self, rounds: int = 2) -> None:
        self._rounds = rounds

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        sides = {
            side: [user(f"Argue {how} this claim in one paragraph: {task.instruction}")]
            for side, how in (("pro", "for"), ("contra", "against"))
        }
        arguments: list[str] = []
        for _ in range(self._rounds):
            for side, messages in sides.items():
                if arguments:
                    messages.append(user(f"The other side says: {arguments[-1]}"))
                answer = await ask(model, messages, side)
                messages.append(answer.message)
                arguments.append(answer.text)
        debate = "\n\n".join(f"{('pro', 'contra')[number % 2]}: {text}" for number, text in enumerate(arguments))
        question = f"{task.instruction}\n\n{debate}\n\nIs the claim true? Write a last line that is only yes or no."
        decision = await ask(model, question, "judge")
        return AgentResult(messages=[user(question), decision.message])


class SelfPlay:
    """``player`` and ``opponent`` take turns, each acting as the other's user. The task's ``score`` function decides
    who wins.

    Args:
        rounds: Number of answers per role.
    """

    def __init__(self, rounds: int = 4) -> None:
        self._rounds = rounds

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        player, opponent = [user(task.instruction)], [user(task.instruction)]
        for _ in range(self._rounds):
            move = await ask(model, player, "player")
            player.append(move.message)
            opponent.append(user(move.text))
            reply = await ask(model, opponent, "opponent")
            opponent.append(reply.message)
            player.append(user(reply.text))
        return AgentResult(messages=player)


class Recursive:
    """``solver`` answers a question, or divides it into one-line questions, which other calls of ``solver`` answer.

    The parts are solved concurrently. The record links each part to the call that divided the question.

    Args:
        depth: Maximum depth of nested divisions.
    """

    def __init__(self, depth: int = 2) -> None:
        self._depth = depth

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        return AgentResult(messages=await self._solve(model, task.instruction, self._depth, None))

    async def _solve(self, model: ModelEndpoint, question: str, depth: int, cause: ModelAnswer | None) -> Messages:
        how = "Answer it. Or divide it: write up to four lines, each PART: and a question." if depth else "Answer it."
        messages = [user(f"{question}\n{how}")]
        answer = await ask(model, messages, "solver", started_by=cause)
        messages.append(answer.message)
        parts = re.findall(r"^PART: *(.+)$", answer.text, re.MULTILINE)[:4] if depth else []
        if parts:
            solved = await asyncio.gather(*(self._solve(model, part, depth - 1, answer) for part in parts))
            answers = zip(parts, (str(conversation[-1].get("content")) for conversation in solved), strict=True)
            messages.append(user("\n".join(f"{part} {text}" for part, text in answers) + "\nNow answer."))
            messages.append((await ask(model, messages, "solver")).message)
        return messages


class ModelRouter:
    """``router`` chooses whether ``small`` or ``large`` answers."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        question = f"{task.instruction}\nIs this hard? Write a last line that is only yes or no."
        chosen = "large" if agrees(await ask(model, question, "router")) else "small"
        messages = [user(task.instruction)]
        messages.append((await ask(model, messages, chosen)).message)
        return AgentResult(messages=messages)
