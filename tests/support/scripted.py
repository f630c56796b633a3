"""Answers of a scripted engine to mini-swe-agent."""

from __future__ import annotations

ENGINE = "engine: scripted, script: answers.yaml"
"""Fields of a campaign's ``model`` that answers from ``answers.yaml`` beside the campaign file."""


def block(command: str) -> str:
    """An answer that carries out one shell command."""
    return f"THOUGHT: so.\n\n```mswea_bash_command\n{command}\n```"
