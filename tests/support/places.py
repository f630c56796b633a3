"""Where the checkout's own files lie."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "launchers"
TINY_MODEL = LAUNCHERS / "tiny_model.py"
"""Makes a small random model; run by an interpreter that has transformers."""
