"""Answers of a scripted engine to mini-swe-agent."""

from __future__ import annotations

ENGINE = "engine: scripted, script: answers.yaml"
"""Fields of a campaign's ``model`` that answers from ``answers.yaml`` in the campaign file's directory."""


def block(command: str) -> str:
    """An answer that carries out one shell command."""
    return f"THOUGHT: so.\n\n```mswea_bash_command\n{command}\n```"


SOLVE = [block("echo 42 > answer"), block("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
"""Answers that solve a task of :func:`tests.support.harbor_tasks.write_solved_task`."""
