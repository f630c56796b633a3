"""``diff``: compares the outcomes and conversations of two trajectories, and finds the first token that differs."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import print_json
from megaflow_hpc.cli.runs.show import LINE_CHARACTERS, find, finite, print_lines
from megaflow_hpc.cli.verb import Subparsers, add_run, add_verb
from megaflow_hpc.texts import content_of, printable
from megaflow_hpc.trajectories.reading.conversations import main
from megaflow_hpc.trajectory import IMAGE_SCHEME

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.reading.sources import SequenceView
    from megaflow_hpc.trajectories.reading.store import Row

FIELDS = (
    "task_id",
    "policy",
    "agent",
    "status",
    "error_kind",
    "error",
    "reward",
    "rewards",
    "sample_index",
    "seed",
    "attempt",
    "node",
    "job_id",
)
"""Attributes of a trajectory to compare."""
HUNK_LINES = 60
"""Maximum number of diff lines to print per message without ``--full``."""

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def register(subparsers: Subparsers) -> None:
    """Registers the verb ``diff``."""
    diff = add_verb(
        subparsers,
        "diff",
        _diff,
        "compare two trajectories",
        examples=[
            "diff RUN fix-humanize/default/0 fix-humanize/default/1",
            "diff RUN 0 1 --full | less -R",
        ],
        description="Compares two rollouts: their outcomes, the first token or image that differs, and "
        "their conversations, message by message. Exit status 0 whether they differ or not.",
    )
    add_run(diff, file=True)
    diff.add_argument("ids", metavar="ID", nargs=2, help="rollout id (<task>/<policy>/<sample>), or its row number")
    diff.add_argument("--full", action="store_true", help="print everything")


def _diff(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.trajectories import open_trajectories

    with open_trajectories(arguments.run_dir) as store:
        rows = (find(store, arguments.ids[0]), find(store, arguments.ids[1]))
        differences = compare(*rows)
        if arguments.json:
            print_json(differences)
        else:
            print_lines(_lines(differences, arguments.full))
    return 0


def compare(left: Row, right: Row) -> dict[str, Any]:
    """Returns the differences between two trajectories as plain JSON.

    Compares the messages of the main conversations first, then the messages that appear only in other conversations.

    Returns:
        ``ids``; ``fields``, pairs of differing values by name; ``tokens``, the first position at which token sequences
        differ or show different ``images`` (SHA-256), or null; ``messages``, the number of ``common`` leading messages
        and a unified diff of the ``different`` ones.
    """
    fields: dict[str, list[Any]] = {name: [finite(getattr(row, name)) for row in (left, right)] for name in FIELDS}
    fields |= {
        "duration_s": [round(row.finished_at - row.started_at, 3) for row in (left, right)],
        "turns": [len(row.turns) for row in (left, right)],
        "conversations": [len(row.conversations) for row in (left, right)],
        "messages": [len(_conversation_records(row)) for row in (left, right)],
        "tokens": [sum(len(view.tokens) for view in row.sequences) for row in (left, right)],
        "images": [len(row.image_labels) for row in (left, right)],
        "artifacts": [{a.name: len(a.data) for a in row.artifacts} for row in (left, right)],
    }
    labels = {**left.image_labels, **right.image_labels}
    messages = list(zip_longest(_conversation_records(left), _conversation_records(right)))
    common = next((number for number, (a, b) in enumerate(messages) if a != b), len(messages))
    return {
        "ids": [left.id, right.id],
        "fields": {name: pair for name, pair in fields.items() if pair[0] != pair[1]},
        "tokens": _tokens(left, right),
        "messages": {
            "common": common,
            "different": [
                {
                    "message": common + number,
                    "roles": [a and a.get("role"), b and b.get("role")],
                    "diff": _unified(a, b, labels),
                }
                for number, (a, b) in enumerate(messages[common:])
                if a != b
            ],
        },
    }


def _conversation_records(row: Row) -> list[dict[str, Any]]:
    """Returns the messages of the main conversation, followed by the additional messages of each other conversation."""
    conversations = row.conversations
    first = main(conversations, row.policy) if conversations else 0
    messages = []
    for conversation in conversations[first : first + 1]:
        messages += conversation.messages
    for number, conversation in enumerate(conversations):
        if number != first:
            messages += conversation.messages[conversation.shared :]
    return messages


def _tokens(left: Row, right: Row) -> dict[str, Any] | None:
    """Returns the first position at which the token sequences differ or show different images. ``None`` if they are
    equal. Images of the same size have equal placeholder tokens."""
    import numpy as np

    for number, (a, b) in enumerate(zip_longest(left.sequences, right.sequences)):
        if a is None or b is None:
            unknown = {name: [None, None] for name in ("ids", "sampled", "images")}
            return {"sequence": number, "token": 0, **unknown}
        size = min(len(a.tokens), len(b.tokens))
        apart = np.flatnonzero(a.tokens[:size] != b.tokens[:size])
        others = [span.start for pair in zip_longest(a.images, b.images) if pair[0] != pair[1] for span in pair if span]
        if len(apart) or others or len(a.tokens) != len(b.tokens):
            position = min([*apart[:1].tolist(), *others, size])
            here = [view if position < len(view.tokens) else None for view in (a, b)]
            return {
                "sequence": number,
                "token": position,
                "ids": [None if view is None else int(view.tokens[position]) for view in here],
                "sampled": [None if view is None else int(view.weight_versions[position]) >= 0 for view in here],
                "images": [None if view is None else _image_at(view, position) for view in here],
                "logprobs": [None if view is None else finite(float(view.logprobs[position])) for view in here],
            }
    return None


def _image_at(view: SequenceView, position: int) -> str | None:
    """Returns the SHA-256 of the image whose placeholder is at a position, or ``None``."""
    return next((span.image for span in view.images if span.start <= position < span.end), None)


def _unified(a: dict[str, Any] | None, b: dict[str, Any] | None, labels: Mapping[str, str]) -> list[str]:
    before, after = (content_of(message, labels).split("\n") if message else [] for message in (a, b))
    return list(difflib.unified_diff(before, after, lineterm="", n=2))[2:]


def _lines(differences: dict[str, Any], full: bool) -> Iterator[tuple[str, str]]:
    for sign, rollout in zip("-+", differences["ids"], strict=True):
        yield f"{sign} {rollout}", f"bold {_STYLES[sign]}"
    for name, (a, b) in differences["fields"].items():
        yield f"  {name:13} {_shown(a)}  →  {_shown(b)}", ""
    tokens = differences["tokens"]
    if tokens is None:
        yield "  tokens        the same", "dim"
    else:
        pair = "  →  ".join(map(_token, tokens["ids"], tokens["sampled"], tokens["images"]))
        yield f"  tokens        differ from sequence {tokens['sequence']}, token {tokens['token']}: {pair}", ""
    messages = differences["messages"]
    if not messages["different"]:
        yield "\nthe same conversation", "dim"
        return
    yield f"\nthe first {messages['common']} messages are the same", "dim"
    for entry in messages["different"]:
        roles = " → ".join(dict.fromkeys(printable(str(role or "-")) for role in entry["roles"]))
        yield f"\n[{entry['message']}] {roles}", "bold"
        lines = entry["diff"] or ["(only content other than text differs)"]
        shown = lines if full else lines[:HUNK_LINES]
        for line in shown:
            text = printable(line)
            cut = text if full or len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]} … cut (--full)"
            yield f"  {cut}", _STYLES.get(line[:1], "")
        if len(shown) < len(lines):
            yield f"  … {len(lines) - len(shown)} lines more (--full)", "dim"


def _token(token: int | None, sampled: bool | None, image: str | None) -> str:
    if image:
        return f"image {IMAGE_SCHEME}{image[:8]}…"
    if token is None:
        return "ended"
    return f"{token} (sampled)" if sampled else f"{token} (not sampled)"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item:g}" for name, item in value.items()) or "-"
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value in (None, "") else str(value)
