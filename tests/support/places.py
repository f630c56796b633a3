"""Paths of the checkout's own files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "launchers"
TINY_MODEL = LAUNCHERS / "tiny_model.py"
"""Script that makes a small random model; its interpreter needs transformers."""
