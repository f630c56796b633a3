"""``show``: prints one trajectory as text, or one of its artifacts."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import print_json, used
from megaflow_hpc.cli.runs import artifacts, tokens
from megaflow_hpc.cli.verb import Subparsers, add_output, add_run, add_verb
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.texts import content_of, printable
from megaflow_hpc.trajectories.reading.conversations import heading, main
from megaflow_hpc.types import without_round

if TYPE_CHECKING:
    from rich.text import Text

    from megaflow_hpc.trajectories.reading.store import Row, TrajectoryStore

HEAD_LINES, TAIL_LINES = 20, 10
"""Number of lines to print from the beginning and end of a long message without ``--full``."""
LINE_CHARACTERS = 2000
"""Maximum number of characters to print per line without ``--full``. A whole prompt on one line is unreadable."""

CANDIDATES = 2000
"""Maximum number of ids to compare with an unknown id when suggesting similar ones."""

_COLOURS = {"system": "magenta", "user": "blue", "assistant": "green", "tool": "yellow"}
_STATUS = {"completed": "green", "truncated": "yellow", "failed": "red", "cancelled": "red"}


def register(subparsers: Subparsers) -> None:
    """Adds show."""
    show = add_verb(
        subparsers,
        "show",
        _show,
        "print one trajectory",
        examples=[
            "show RUN fix-humanize/default/0",
            "show RUN 0 --tokens | less",
            "show RUN 0 --artifact patch -o fix.patch",
            "show RUN/trajectories.h5 fix-humanize/default/0 --json",
        ],
        description="Prints one rollout of a campaign: its outcome, conversation, model calls and attempts. Works "
        "while the campaign runs.",
    )
    add_run(show, file=True)
    show.add_argument("id", metavar="ID", help="rollout id (<task>/<policy>/<sample>), or its row number")
    show.add_argument("--tokens", action="store_true", help="also every token: id, text, log-probability, mask")
    show.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer for the ids: a tokenizer.json, or a model's directory"
    )
    show.add_argument("--artifact", metavar="NAME", help="print this artifact and nothing else")
    add_output(show, "with --artifact: write it to this file")
    show.add_argument("--full", action="store_true", help="print everything")


def _show(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories import open_trajectories

    if arguments.output is not None and arguments.artifact is None:
        raise ConfigError("--output: only with --artifact NAME")
    with open_trajectories(arguments.run_dir) as store:
        row = find(store, arguments.id)
        if arguments.artifact is not None:
            artifacts.hand_out(row, arguments.artifact, arguments.output, arguments.json)
        elif arguments.json:
            print_json(as_json(row, arguments.tokens))
        else:
            shown = list(tokens.view(store, row, arguments.full, arguments.tokenizer)) if arguments.tokens else []
            print_lines([*_lines(row, arguments.full), *shown])
    return 0


def find(store: TrajectoryStore, wanted: str) -> Row:
    """Returns a row, given a rollout id or row number.

    Raises:
        ConfigError: There is no such row. The error names similar ids.
    """
    if wanted in store:
        return store[wanted]
    if wanted.isdigit() and int(wanted) < len(store):
        return store[int(wanted)]
    # Prefer ids of the same task: comparing a million ids would take minutes.
    task = wanted.partition("/")[0]
    alike = [rollout for rollout in store.ids if rollout.startswith(task)] if len(store) > CANDIDATES else store.ids
    candidates = (alike or store.ids)[:CANDIDATES]
    near = difflib.get_close_matches(wanted, candidates, 3, 0.4) or candidates[:3]
    hint = f"; there are: {', '.join(near)}" if near else ""
    raise ConfigError(f"{store.path}: no trajectory {wanted!r} among {len(store)}{hint}")


def task_and_policy(rollout: str) -> tuple[str, str]:
    """Splits a rollout id into its task and policy. Both are empty if the id is invalid."""
    name, policy, _ = f"//{rollout}".rsplit("/", 2)
    return without_round(name.lstrip("/"))[0], policy


# --- JSON ------------------------------------------------------------------------------------------------------------


def as_json(row: Row, with_tokens: bool) -> dict[str, Any]:
    """Returns a trajectory as plain JSON: null for NaN, artifacts by name and size, token columns on request."""
    trajectory = row.trajectory()
    other = ("sequences", "artifacts", "messages", "parents")
    record = {name: value for name, value in vars(trajectory).items() if name not in other}
    record |= row.conversation_record()
    for name in ("turns", "attempts"):
        record[name] = [vars(item) for item in record[name]]
    record["artifacts"] = [{"name": artifact.name, "bytes": len(artifact.data)} for artifact in trajectory.artifacts]
    record["sequences"] = []
    for sequence in trajectory.sequences:
        entry: dict[str, Any] = {"policy": sequence.policy, "length": len(sequence.tokens)}
        if with_tokens:
            entry["tokens"] = sequence.tokens.tolist()
            entry["logprobs"] = [finite(value) for value in sequence.logprobs]
            entry["loss_mask"] = sequence.loss_mask.tolist()
            entry["weight_version"] = sequence.weight_versions.tolist()
        record["sequences"].append(entry)
    return record


def finite(value: Any) -> Any:
    """Replaces NaN and infinity with ``None``, since JSON lacks them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- text ------------------------------------------------------------------------------------------------------------


def print_lines(lines: Iterable[tuple[str, str] | Text]) -> None:
    """Prints lines, given as strings or (text, style) pairs. Colours are used only on a terminal."""
    from rich.console import Console
    from rich.text import Text

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # terminals without UTF-8 must not cause an error
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text(printable(line[0]), style=line[1]) if isinstance(line, tuple) else line)


def _lines(row: Row, full: bool) -> Iterator[tuple[str, str]]:
    yield from _head(row)
    conversations = row.conversations
    for number, conversation in enumerate(conversations):
        if len(conversations) > 1:
            yield f"\n{heading(number, conversation)}", "bold reverse"
        for index in range(conversation.shared, len(conversation.messages)):
            message, call = conversation.messages[index], conversation.turns[index]
            role = str(message.get("role", "?"))
            by = "" if call is None else f"  (call {call})"
            yield f"\n[{index}] {role}{by}", f"bold {_COLOURS.get(role, 'cyan')}"
            yield from ((line, "") for line in _fold(content_of(message), full))
    yield from _calls(row)
    verifier = [*artifacts.verifier_lines(row, full)]
    if verifier:
        yield f"\n{artifacts.VERIFIER_LOG}", "bold"
        yield from ((f"  {line}", "") for line in verifier)


def _head(row: Row) -> Iterator[tuple[str, str]]:
    yield row.id, "bold"
    reward = "not verified" if math.isnan(row.reward) else f"{row.reward:g}"
    yield f"  status    {row.status}", _STATUS.get(row.status, "")
    rewards = ", ".join(f"{name} {value:g}" for name, value in row.rewards.items())
    yield f"  reward    {reward}" + (f"  ({rewards})" if rewards else ""), ""
    if row.error_kind or row.error:
        yield f"  error     {row.error_kind}: {row.error}", "red"
    yield f"  agent     {row.agent}, policy {row.policy}", ""
    yield f"  where     node {row.node or '-'}, job {row.job_id or '-'}", ""
    yield f"  when      {_utc(row.started_at)}, {row.finished_at - row.started_at:.1f} s", ""
    if usage := used(row.cpu_s, row.memory_peak_mb, row.disk_peak_mb):
        yield f"  used      {usage}", ""
    yield f"  attempt   {row.attempt}, epoch {row.epoch}", ""
    sampled = sum(int((sequence.weight_versions >= 0).sum()) for sequence in row.sequences)
    counted = sum(int(sequence.loss_mask.sum()) for sequence in row.sequences)
    masked = f", {sampled - counted} of these with loss mask 0" if counted < sampled else ""
    count = sum(len(sequence.tokens) for sequence in row.sequences)
    yield f"  tokens    {count} in {len(row.sequences)} sequences, {sampled} sampled{masked}", ""
    if len(conversations := row.conversations) > 1:
        messages = sum(len(one.messages) - one.shared for one in conversations)
        count, first = len(conversations), main(conversations, row.policy)
        yield f"  messages  {messages} in {count} conversations, the main one is {first}", ""
    for artifact in row.artifacts:
        yield f"  artifact  {artifact.name}, {len(artifact.data)} bytes", ""


def _calls(row: Row) -> Iterator[tuple[str, str]]:
    turns = row.turns
    if turns:
        yield f"\n{len(turns)} model calls (seconds: model, sandbox, agent, waiting)", "bold"
    for number, turn in enumerate(turns):
        times = "  ".join(f"{s:8.3f}" for s in (turn.model_s, turn.sandbox_s, turn.agent_s, turn.wait_s))
        has_tokens = turn.sequence >= 0  # otherwise the engine reported no tokens
        where = f"sequence {turn.sequence} [{turn.token_start}, {turn.token_end})" if has_tokens else "no token ids"
        yield f"  {number:3}  {times}  {where}  {turn.finish_reason}  {turn.server}", ""
    attempts = row.attempts
    if len(attempts) > 1 or any(attempt.error for attempt in attempts):
        yield f"\n{len(attempts)} attempts", "bold"
        for attempt in attempts:
            cause = f"  {attempt.error_kind}: {attempt.error}" if attempt.error else ""
            yield f"  {attempt.attempt}  {attempt.status}  node {attempt.node or '-'}{cause}", ""


def _fold(text: str, full: bool) -> list[str]:
    lines = printable(text).split("\n")
    if full:
        return lines
    if len(lines) > HEAD_LINES + TAIL_LINES + 1:
        folded = len(lines) - HEAD_LINES - TAIL_LINES
        lines = [*lines[:HEAD_LINES], f"… {folded} lines folded (--full)", *lines[-TAIL_LINES:]]
    return [line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} … cut (--full)" for line in lines]


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds else "-"
