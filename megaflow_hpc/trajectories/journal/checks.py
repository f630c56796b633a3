"""Checks trajectories before they are stored: the types, ranges and consistency of all fields.

A record comes from a pod, from another user's run directory, or from a JSON lines file. msgpack and JSON can encode any
value. The columns of a campaign file are stricter: 32-bit integers, fixed-width strings, and token columns of equal
length. Any trajectory that passes can be stored, and the stored rows are valid.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, STRING, TEXT, UNKNOWN_AS_NAN, escape
from megaflow_hpc.trajectories.journal.frames import Heading, head_of, trajectory_data
from megaflow_hpc.trajectory import Attempt, Image, TokenSequence, Trajectory, Turn, images_of, linked
from megaflow_hpc.types import MAX_NAME_LENGTH, MAX_REWARD, MAX_REWARDS, VERIFIED, Status, whole_rewards

Name = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Rewards = dict[Name, float]
Parents = list[Annotated[int, Meta(ge=-1)]]
_KINDS: Mapping[str, Any] = {
    "int32": Int32,
    "int64": Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)],
    "float32": float,
    "float64": float,
    STRING: Name,
    TEXT: str,
}
"""Type of the values in a column, by dtype."""


def _row_type(group: str, record: type) -> type[msgspec.Struct]:
    """Defines a struct type with the columns of ``group`` that are fields of ``record``."""
    columns: list[tuple[str, Any]] = []
    for field in fields(record):
        column = COLUMNS.get(f"{group}/{field.name}")
        if column is None or field.name == "turns":  # the column holds the number of turns, not the turns
            continue
        kind = _KINDS[column.dtype]
        may_be_unknown = group == "trajectories" and field.name in UNKNOWN_AS_NAN
        columns.append((field.name, kind | None if may_be_unknown else kind))
    return msgspec.defstruct(group, columns)


_Trajectory = _row_type("trajectories", Trajectory)
_Turn = _row_type("turns", Turn)
_Attempt = _row_type("attempts", Attempt)


class _Image(msgspec.Struct):
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    width: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    height: Annotated[int, Meta(ge=1, le=2**31 - 1)]


class _HeadingFields(msgspec.Struct):
    """Block of a record and the checked fields of its :class:`Heading`."""

    id: Name
    status: Status
    epoch: Int32
    attempt: Int32
    block: int


def heading_of(record: Mapping[str, Any], data: Mapping[str, Any]) -> Heading:
    """Returns the heading of a trajectory record.

    Args:
        record: The record.
        data: The trajectory in the record. Only the heading's fields are required.

    Raises:
        KeyError, ValueError: A field is missing or invalid.
    """
    deciding = {
        "id": data["id"],
        "status": data["status"],
        "epoch": record.get("epoch", data.get("epoch", 0)),
        "attempt": data.get("attempt", 0),
        "block": record.get("block", -1),
    }
    heading = Heading(*msgspec.structs.astuple(msgspec.convert(deciding, _HeadingFields)))
    if escape(heading.id) != heading.id:  # two ids could otherwise have the same escaped form
        raise ValueError(f"id {heading.id[:80]!r}, expected a text in UTF-8 without zero bytes")
    return heading


def heading_in(payload: bytes) -> Heading | None:
    """Returns the heading of a record, or ``None`` if it is not a trajectory record.

    Args:
        payload: The record, or a prefix of it that contains the heading's fields.

    Raises:
        KeyError, TypeError, ValueError: The record's kind is ``trajectory``, but its contents are invalid.
    """
    record = head_of(payload)
    if record.get("kind") != "trajectory":
        return None
    return heading_of(record, trajectory_data(record))


def checked(trajectory: Trajectory) -> Trajectory:
    """Validates a trajectory and returns it, with its numbers converted to the column types.

    Raises:
        TypeError, ValueError: A value has the wrong type or is out of range, token columns contradict each other, or a
            turn is outside its sequence.
    """
    _check_row(trajectory, _Trajectory)
    msgspec.convert(trajectory.status, Status)
    if trajectory.reward is not None and trajectory.status not in VERIFIED:
        raise ValueError(f"reward {trajectory.reward} though {trajectory.status}")
    _check_rewards(trajectory.rewards)
    msgspec.convert(trajectory.messages, list[dict[Any, Any]])
    trajectory.parents = _checked_parents(trajectory.parents, len(trajectory.messages))
    check_images(trajectory.images)
    for number, sequence in enumerate(trajectory.sequences):
        _check_sequence(number, sequence)
        _check_spans(number, sequence, trajectory.images)
    for number, turn in enumerate(trajectory.turns):
        _check_row(turn, _Turn)
        _check_turn(number, turn, trajectory)
    answers = [turn.message for turn in trajectory.turns if turn.message >= 0]
    if len(set(answers)) < len(answers):
        raise ValueError("two turns name the same message as their answer")
    for attempt in trajectory.attempts:
        _check_row(attempt, _Attempt)
    for artifact in trajectory.artifacts:
        msgspec.convert(artifact.name, Name)
        if not isinstance(artifact.data, bytes):
            raise TypeError(f"artifact {artifact.name!r} holds a {type(artifact.data).__name__}, expected bytes")
    return trajectory


def salvaged(data: Mapping[str, Any], heading: Heading) -> Trajectory:
    """Recovers as much as possible from a damaged trajectory: the heading, and valid scalars, rewards and messages."""
    kept: dict[str, Any] = dict.fromkeys(("task_id", "group_id", "policy", "agent"), "")
    for column in msgspec.structs.fields(_Trajectory):
        if column.name in data and _fits(data[column.name], column.type):
            kept[column.name] = data[column.name]
    if heading.status not in VERIFIED:
        kept["reward"] = None
    try:
        _check_rewards(data.get("rewards", {}))
        kept["rewards"] = data.get("rewards", {})
    except ValueError:
        pass
    try:
        messages = msgspec.convert(data.get("messages"), list[dict[Any, Any]])
        kept["parents"] = _checked_parents(data.get("parents", ()), len(messages))
        kept["messages"] = messages
    except ValueError:  # without parents, the order of messages is unknown
        pass
    try:
        images = images_of(data.get("images", ()))
        check_images(images)
        kept["images"] = images
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    return Trajectory(**kept | {name: getattr(heading, name) for name in ("id", "status", "epoch", "attempt")})


def _check_row(record: Any, row_type: type[msgspec.Struct]) -> None:
    """Validates those fields of a record that become columns, and converts its numbers to the column types."""
    row = msgspec.convert(record, row_type, from_attributes=True)
    for name in row_type.__struct_fields__:
        value = getattr(row, name)
        if isinstance(value, float):
            _check_size(name, value)
        setattr(record, name, value)


def _fits(value: Any, kind: Any) -> bool:
    try:
        number = msgspec.convert(value, kind)
        if isinstance(number, float):
            _check_size("", number)
    except ValueError:
        return False
    return True


def _check_size(name: str, value: float) -> None:
    if MAX_REWARD < abs(value) < math.inf:
        raise ValueError(f"{name} {value}, more than 32 bits hold")


def _check_rewards(rewards: Any) -> None:
    named = msgspec.convert(rewards, Rewards)
    for name, value in named.items():
        _check_size(f"reward {name}", value)
    if (count := len(whole_rewards(named))) > MAX_REWARDS:
        raise ValueError(f"{count} named rewards, expected at most {MAX_REWARDS}")


def _checked_parents(parents: Any, count: int) -> list[int]:
    """Returns the parent of each message.

    Raises:
        ValueError: A parent does not precede its child.
    """
    given = msgspec.convert(parents, Parents)
    if len(given) > count:
        raise ValueError(f"parents of {len(given)} messages, expected up to {count}")
    for node, parent in enumerate(given):
        if parent >= node:
            raise ValueError(f"message {node} follows message {parent}, which does not precede it")
    return linked(given, count)


def _check_turn(number: int, turn: Turn, trajectory: Trajectory) -> None:
    if not -1 <= turn.message < len(trajectory.messages):
        raise ValueError(f"turn {number} names message {turn.message} of {len(trajectory.messages)}")
    if not -1 <= turn.started_by < number:
        raise ValueError(f"turn {number} was started by turn {turn.started_by}, which does not precede it")
    if turn.sequence < 0:
        return
    if turn.sequence >= len(trajectory.sequences):
        raise ValueError(f"turn {number} names sequence {turn.sequence} of {len(trajectory.sequences)}")
    if not 0 <= turn.token_start <= turn.token_end <= len(trajectory.sequences[turn.sequence].tokens):
        raise ValueError(f"turn {number} spans tokens {turn.token_start} to {turn.token_end}, outside its sequence")


def _check_sequence(number: int, sequence: TokenSequence) -> None:
    msgspec.convert(sequence.policy, Name)
    columns = (sequence.tokens, sequence.logprobs, sequence.loss_mask, sequence.weight_versions)
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise ValueError(f"sequence {number} has columns of {lengths} tokens")
    _check_experts(number, sequence)
    if not lengths[0]:
        return
    import numpy as np  # lazy import: rank 0 rarely needs it

    tokens = np.asarray(sequence.tokens)
    mask = np.asarray(sequence.loss_mask)
    sampled = ~np.isnan(np.asarray(sequence.logprobs))
    versions = np.asarray(sequence.weight_versions)
    if mask.max() > 1 or tokens.min() < 0:
        raise ValueError(f"sequence {number} has a negative token, or a loss mask that is neither 0 nor 1")
    if (~sampled & (mask == 1)).any():
        raise ValueError(f"sequence {number} has loss mask 1 without a log-probability")
    if not np.array_equal(versions >= 0, sampled) or versions.min() < -1:
        raise ValueError(f"sequence {number} has weight versions of other tokens than log-probabilities")


def check_images(images: Mapping[str, Image], with_data: bool = True) -> None:
    """Checks the fields of images and, unless the bytes are omitted, their SHA-256.

    Raises:
        ValueError: An image is invalid.
    """
    for image in images.values():
        msgspec.convert(image, _Image, from_attributes=True)
        if not with_data:
            continue
        if not isinstance(image.data, bytes) or hashlib.sha256(image.data).hexdigest() != image.sha256:
            raise ValueError(f"image {image.sha256!r:.80} does not match its SHA-256")


def _check_spans(number: int, sequence: TokenSequence, images: Mapping[str, Image]) -> None:
    end = 0
    for span in sequence.images:
        msgspec.convert([span.start, span.length], list[Int32])
        if not end <= span.start < span.end <= len(sequence.tokens):
            raise ValueError(f"sequence {number} has an image at tokens {span.start} to {span.end}, after token {end}")
        if span.image not in images:
            raise ValueError(f"sequence {number} shows image {span.image!r:.80}, which the trajectory lacks")
        if any(sequence.loss_mask[span.start : span.end]):
            raise ValueError(f"sequence {number} has an image at tokens {span.start} to {span.end}, which are sampled")
        end = span.end


def _check_experts(number: int, sequence: TokenSequence) -> None:
    shape = msgspec.convert([sequence.expert_layers, sequence.experts_per_token], list[Int32])
    entries = len(sequence.tokens) * shape[0] * shape[1]
    if len(sequence.experts) not in (entries, 2 * entries) or min(shape) < bool(sequence.experts):
        raise ValueError(
            f"sequence {number} has {len(sequence.experts)} bytes of experts for {len(sequence.tokens)} tokens, "
            f"{shape[0]} layers and {shape[1]} experts per token"
        )
