"""Finds in an engine's log why it ended, as one line for ``status``."""

from __future__ import annotations

import re

CAUSES: tuple[tuple[str, str], ...] = (
    (r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks", "out of GPU memory"),
    (r"Cannot allocate memory|std::bad_alloc|MemoryError", "out of memory on the node"),
    (r"No space left on device", "no space left on a disk"),
    (r"[Aa]ddress already in use", "its port was taken"),
    (r"No module named '?([\w.]+)'?", "its virtual environment lacks a module"),
    (r"unrecognized arguments: .*|invalid choice: .*|No such option", "it does not know an option"),
    (r"(is not a valid model identifier|Repo id must be|Can't load the configuration|does not appear to have a file"
     r"|No such file or directory: '.*(safetensors|config\.json)|Invalid repository ID)",
     "the model cannot be found"),
    (r"^error: wrong script: ", "its script cannot be used"),
    (r"^FATAL:", "its image cannot be started"),
    (r"max seq len|KV cache is needed|max_model_len", "the context length does not fit"),
)  # fmt: skip

KEY, REFUSED = "refuses the key", "refuses the request"
"""Causes at an external endpoint."""
LASTING = (
    KEY,
    REFUSED,
    "its virtual environment lacks a module",
    "it does not know an option",
    "the model cannot be found",
    "its script cannot be used",
)
"""Causes that another start would meet again."""

FOLLOWS = r"EngineDeadError|Engine core initialization failed|See (stack trace|root cause)"
"""Errors that only point to another error."""

ASIDE = r"^(\([^)]*\)\s*)?(DEBUG|INFO|WARNING)\b|^slurmstepd-\S+: error: \*\*\* STEP|^srun: launch"
"""Lines that name no cause: those of engines that go on, and of a job step that ends because a part of it has."""


def cause(log_tail: str, exit_code: int | None) -> str:
    """Returns why an engine ended, in one line: a known cause with the line that shows it, else the last error line.

    Args:
        log_tail: The end of its log, in which the latest start is all.
        exit_code: Of its process; ``None`` if it has none.
    """
    lines = [x.strip() for x in log_tail.splitlines() if x.strip() and not re.search(ASIDE, x)]
    for pattern, meaning in CAUSES:
        for line in reversed(lines):
            if re.search(pattern, line):
                return f"{meaning}: {_plain(line)}"
    errors = [x for x in lines if re.search(r"\b\w*(Error|Exception)\b: |^error: ", x) and not re.search(FOLLOWS, x)]
    last = _plain((errors or lines or ["it printed nothing"])[-1])
    return f"exit code {exit_code}: {last}" if exit_code is not None else last


def lasting(cause: str) -> bool:
    """Returns whether another start would meet the same cause."""
    return any(meaning in cause for meaning in LASTING)


def _plain(line: str) -> str:
    """Returns a log line without its prefix, 300 characters at most."""
    return re.sub(r"^(\([^)]*\)\s*)?((INFO|WARNING|ERROR)\s+[\d-]+ [\d:]+ (\[[^]]*\]\s*)?)?", "", line)[:300]
