"""Extracts the reason why an engine ended from its log, as one line for ``status``."""

from __future__ import annotations

import re

KEY, REFUSED = "refuses the key", "refuses the request"
"""Causes of failure at an external endpoint."""
CAUSES: tuple[tuple[str, str, bool], ...] = (
    (r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks|Free memory on device",
     "out of GPU memory", False),
    (r"Cannot allocate memory|std::bad_alloc|MemoryError", "out of memory on the node", False),
    (r"No space left on device", "no space left on a disk", False),
    (r"[Aa]ddress already in use", "its port was taken", False),
    (r"No module named '?([\w.]+)'?", "its virtual environment lacks a module", True),
    (r"unrecognized arguments: .*|invalid choice: .*|No such option", "it does not know an option", True),
    (r"local_files_only|LocalEntryNotFoundError|couldn't connect to 'https://huggingface\.co'|OfflineModeIsEnabled",
     "the model is not in the node's cache, and an engine fetches nothing", True),
    (r"(is not a valid model identifier|Repo id must be|Can't load the configuration|does not appear to have a file"
     r"|No such file or directory: '.*(safetensors|config\.json)|Invalid repository ID)",
     "the model cannot be found", True),
    (r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|not initialized from checkpoint",
     "its weights cannot be read", True),
    (r"^error: invalid script: ", "its script cannot be used", True),
    (r"^FATAL:", "its image cannot be started", False),
    (r"max seq len|KV cache is needed|max_model_len", "the context length does not fit", True),
)  # fmt: skip
"""Tuples of (pattern of a log line, cause, True if another start would fail too). The first match applies."""
LASTING = (KEY, REFUSED, *(cause for _, cause, lasting in CAUSES if lasting))
"""Causes that a restart would not fix."""
REJECTED = (
    r"^exit code \d+: \S*\b(ValueError|TypeError|KeyError|AttributeError|NameError|ImportError|NotImplementedError"
    r"|ValidationError|SyntaxError)\b: "
)
"""Matches the last error of an engine that rejects its configuration, so that the node is not blamed."""

MAX_LENGTH = 600
"""Maximum length of a cause, in characters."""

ERROR = r"\b\w*(Error|Exception)\b: |^error: "
NEXT = r"^(Traceback|During handling|The above exception|For further information|File )"
"""Matches lines that follow an error but are not part of it."""
FOLLOWS = r"EngineDeadError|Engine core initialization failed|See (stack trace|root cause)"
"""Matches errors that only point to another error."""

IGNORED = r"^(\([^)]*\)\s*)?(DEBUG|INFO|WARNING)\b|^slurmstepd-\S+: error: \*\*\* STEP|^srun: launch"
"""Matches log lines that never name a cause. They come from a running engine, or from a job step that ended because one
of its tasks exited."""


def cause(log_tail: str, exit_code: int | None) -> str:
    """Returns the reason why an engine ended, in one line: a known cause with its log line, or else the last error
    line.

    Args:
        log_tail: The end of the engine's log, from its latest start on.
        exit_code: Exit code of the engine's process, or ``None`` if it has no process.
    """
    lines = [x.strip() for x in log_tail.splitlines() if x.strip() and not re.search(IGNORED, x)]
    for pattern, meaning, _ in CAUSES:
        for number in reversed(range(len(lines))):
            if re.search(pattern, lines[number]):
                return f"{meaning}: {_complete_message(lines, number)}"
    errors = [n for n, x in enumerate(lines) if re.search(ERROR, x) and not re.search(FOLLOWS, x)]
    last = _complete_message(lines, errors[-1] if errors else len(lines) - 1) if lines else "it printed nothing"
    return f"exit code {exit_code}: {last}" if exit_code is not None else last


def _complete_message(lines: list[str], number: int) -> str:
    """Returns a complete error message. Joins following lines if the first ends with a colon or is a pydantic error."""
    text = _without_prefix(lines[number])
    if not re.search(r":$|\d validation errors? for \w+$", text):
        return text
    for line in lines[number + 1 : number + 4]:
        following = _without_prefix(line).strip()
        if re.search(rf"{ERROR}|{NEXT}", following):
            break
        text = f"{text} {following}"
    return _shortened(text)


def lasting(cause: str) -> bool:
    """Returns whether restarting an engine that never served would fail for the same cause."""
    return any(meaning in cause for meaning in LASTING) or re.match(REJECTED, cause) is not None


def _without_prefix(line: str) -> str:
    """Strips the process name, level and time from a log line."""
    return _shortened(re.sub(r"^(\([^)]*\)\s*)?((INFO|WARNING|ERROR)\s+[\d-]+ [\d:]+ (\[[^]]*\]\s*)?)?", "", line))


def _shortened(text: str) -> str:
    """Shortens a long text to its beginning and end, either of which may name the cause."""
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH // 2]} … {text[-MAX_LENGTH // 2 :]}"
