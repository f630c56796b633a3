"""What makes a trajectory one, asked of records before anything is made of them.

A record was written by a pod of ours, or by whoever shares a run directory or a file of JSON lines. msgpack and JSON
hold anything; the columns of a campaign file hold integers of 32 bits, texts of one width for all rows, and token
columns that agree. What passes here can be stored, and what was stored of it is valid.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megaflow_hpc.trajectories.hdf5.encoding import escape
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, STATUSES, STRING, TEXT, UNKNOWN_AS_NAN
from megaflow_hpc.trajectories.journal.frames import Heading, head_of, trajectory_data
from megaflow_hpc.trajectory import TokenSequence, Trajectory, linked
from megaflow_hpc.types import VERIFIED

LONGEST_NAME = 1024
"""Bytes of an id, a policy, a node …: a column of texts is as wide as its longest, in every row."""
MOST_REWARDS = 1000
"""Named rewards of one trajectory: each is a column for all of them."""

_RANGES = {"int32": 2**31, "int64": 2**63, "float32": (2 - 2**-23) * 2.0**127, "float64": sys.float_info.max}
_DTYPES = {
    group: {
        column.name: column.dtype
        for column in COLUMNS.values()
        if column.group == group and not column.is_offset and column.path != "trajectories/turns"
    }
    for group in ("trajectories", "turns", "attempts")
}
_SCALARS = tuple(field.name for field in fields(Trajectory) if field.name in _DTYPES["trajectories"])


def heading_of(record: Mapping[str, Any], data: Mapping[str, Any]) -> Heading:
    """Returns the heading of a trajectory's record.

    Args:
        record: the record.
        data: its trajectory, of which only the deciding fields need be there.

    Raises:
        KeyError, ValueError: a field is missing, or not what it should be.
    """
    block = record.get("block", -1)
    epoch, attempt = record.get("epoch", data.get("epoch", 0)), data.get("attempt", 0)
    for name, value in (("id", data["id"]), ("epoch", epoch), ("attempt", attempt)):
        _value("trajectories", name, value)
    if not isinstance(block, int):
        raise ValueError(f"block {_shown(block)}, expected a number")
    if escape(data["id"]) != data["id"]:  # two of them could be written as one
        raise ValueError(f"id {_shown(data['id'])}, expected a text in UTF-8 without zero bytes")
    _status(data["status"])
    return Heading(data["id"], data["status"], epoch, attempt, block)


def heading_in(payload: bytes) -> Heading | None:
    """Returns the heading of a record; ``None`` for one of another kind.

    Args:
        payload: the record, or so much of its beginning as holds the fields.

    Raises:
        KeyError, TypeError, ValueError: it is of a trajectory, and is none.
    """
    record = head_of(payload)
    if record.get("kind") != "trajectory":
        return None
    return heading_of(record, trajectory_data(record))


def checked(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory itself, its numbers as its columns hold them.

    Raises:
        TypeError, ValueError: a value is not of its kind or out of range, token columns contradict one another, or a
            turn lies outside its sequence.
    """
    for name in _SCALARS:
        value = getattr(trajectory, name)
        if value is not None or name not in UNKNOWN_AS_NAN:
            setattr(trajectory, name, _value("trajectories", name, value))
    _status(trajectory.status)
    if trajectory.reward is not None and trajectory.status not in VERIFIED:
        raise ValueError(f"reward {trajectory.reward} though {trajectory.status}")
    _rewards(trajectory.rewards)
    _messages(trajectory.messages)
    trajectory.parents = linked(_parents(trajectory.parents, len(trajectory.messages)), len(trajectory.messages))
    for number, sequence in enumerate(trajectory.sequences):
        _sequence(number, sequence)
    for number, turn in enumerate(trajectory.turns):
        for name in _DTYPES["turns"]:
            setattr(turn, name, _value("turns", name, getattr(turn, name)))
        if not -1 <= turn.message < len(trajectory.messages):
            raise ValueError(f"turn {number} names message {turn.message} of {len(trajectory.messages)}")
        if not -1 <= turn.started_by < number:
            raise ValueError(f"turn {number} was started by turn {turn.started_by}, which does not precede it")
        if turn.sequence < 0:
            continue
        if turn.sequence >= len(trajectory.sequences):
            raise ValueError(f"turn {number} names sequence {turn.sequence} of {len(trajectory.sequences)}")
        if not 0 <= turn.token_start <= turn.token_end <= len(trajectory.sequences[turn.sequence].tokens):
            raise ValueError(f"turn {number} spans tokens {turn.token_start} to {turn.token_end}, outside its sequence")
    answers = [turn.message for turn in trajectory.turns if turn.message >= 0]
    if len(set(answers)) < len(answers):
        raise ValueError("two turns name the same message as their answer")
    for attempt in trajectory.attempts:
        for name in _DTYPES["attempts"]:
            setattr(attempt, name, _value("attempts", name, getattr(attempt, name)))
    for artifact in trajectory.artifacts:
        _text("an artifact's name", artifact.name)
        if not isinstance(artifact.data, bytes):
            raise TypeError(f"artifact {artifact.name!r} holds {_shown(artifact.data)}, expected bytes")
    return trajectory


def salvaged(data: Mapping[str, Any], heading: Heading) -> Trajectory:
    """Returns what can be kept of a trajectory that is not one: its heading, and scalars, rewards and messages."""
    kept: dict[str, Any] = dict.fromkeys(("task_id", "group_id", "policy", "agent"), "")
    kept |= {name: data[name] for name in _SCALARS if name in data and _passes("trajectories", name, data[name])}
    if heading.status not in VERIFIED:
        kept["reward"] = None
    for name, check in (("rewards", _rewards), ("messages", _messages)):
        try:
            check(data.get(name, ()))
        except (TypeError, ValueError):
            continue
        kept[name] = data[name]
    try:
        kept["parents"] = linked(_parents(data.get("parents", ()), len(kept["messages"])), len(kept["messages"]))
    except (KeyError, TypeError, ValueError):
        kept.pop("messages", None)  # without parents, the order of messages is unknown
    return Trajectory(**kept | {name: getattr(heading, name) for name in ("id", "status", "epoch", "attempt")})


def _passes(group: str, name: str, value: Any) -> bool:
    try:
        return (value is None and name in UNKNOWN_AS_NAN) or _value(group, name, value) is not None
    except ValueError:
        return False


def _value(group: str, name: str, value: Any) -> Any:
    """Returns a value as its column holds it."""
    dtype = _DTYPES[group][name]
    if dtype in (STRING, TEXT):
        return _text(name, value, LONGEST_NAME if dtype == STRING else None)
    real = dtype.startswith("float")
    if not isinstance(value, int | float if real else int):
        raise ValueError(f"{name} {_shown(value)}, expected a number")
    if real:
        if abs(value) > _RANGES[dtype] and not (isinstance(value, float) and math.isinf(value)):
            raise ValueError(f"{name} {_shown(value)}, more than {dtype} holds")
        return float(value)
    if not -_RANGES[dtype] <= value < _RANGES[dtype]:
        raise ValueError(f"{name} {_shown(value)}, more than {dtype} holds")
    return int(value)  # of a truth value


def _text(name: str, value: Any, longest: int | None = LONGEST_NAME) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} {_shown(value)}, expected a text")
    if longest is not None and len(value) * 10 > longest and len(escape(value).encode()) > longest:
        raise ValueError(f"{name} of {len(value)} characters, expected at most {longest} bytes")
    return value


def _status(value: Any) -> None:
    if value not in STATUSES:
        raise ValueError(f"status {_shown(value)}, expected one of {', '.join(STATUSES)}")


def _rewards(rewards: Any) -> None:
    if not isinstance(rewards, dict) or len(rewards) > MOST_REWARDS:
        raise ValueError(f"rewards {_shown(rewards)}, expected at most {MOST_REWARDS} numbers by name")
    for name, value in rewards.items():
        _text("a reward's name", name)
        _value("trajectories", "reward", value)


def _messages(messages: Any) -> None:
    if not isinstance(messages, list):
        raise ValueError(f"messages {_shown(messages)}, expected a list")
    for message in messages:
        _message(message)


def _parents(parents: Any, count: int) -> list[int]:
    """Returns the parents of messages. Raises :class:`ValueError` unless each parent precedes its child."""
    if not isinstance(parents, list | tuple) or len(parents) > count:
        raise ValueError(f"parents {_shown(parents)}, expected a list of up to {count} numbers")
    for node, parent in enumerate(parents):
        if type(parent) is not int or not -1 <= parent < node:
            raise ValueError(f"message {node} follows message {_shown(parent)}, which does not precede it")
    return list(parents)


def _message(message: Any) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"a message {_shown(message)}, expected a map")


def _sequence(number: int, sequence: TokenSequence) -> None:
    _text("a sequence's policy", sequence.policy)
    columns = (sequence.tokens, sequence.logprobs, sequence.loss_mask, sequence.weight_versions)
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise ValueError(f"sequence {number} has columns of {lengths} tokens")
    if not lengths[0]:
        return
    import numpy as np  # rank 0 reads journals of others only where there are any

    tokens, mask = np.frombuffer(sequence.tokens, np.int32), np.frombuffer(sequence.loss_mask, np.uint8)
    known = ~np.isnan(np.frombuffer(sequence.logprobs, np.float32))
    versions = np.frombuffer(sequence.weight_versions, np.int32)
    if mask.max() > 1 or tokens.min() < 0:
        raise ValueError(f"sequence {number} has a negative token, or a loss mask that is neither 0 nor 1")
    if (~known & (mask == 1)).any():
        raise ValueError(f"sequence {number} has loss mask 1 without a log-probability")
    if not np.array_equal(versions >= 0, known) or versions.min() < -1:
        raise ValueError(f"sequence {number} has weight versions of other tokens than log-probabilities")


def _shown(value: Any) -> str:
    """A value for a message: what it is, if it is no number or short text."""
    if isinstance(value, int | float | str):
        text = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a huge number"
        return text if len(text) < 80 else f"{text[:80]}…"
    return f"a {type(value).__name__}"
