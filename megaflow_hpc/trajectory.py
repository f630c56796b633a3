"""Records of a rollout: the gateway's recording, and the stored trajectory.

Token columns are :class:`array.array`, so they cross process boundaries as bytes and become numpy arrays without a
copy. Token ids and weight versions are ``'i'`` (int32), log-probabilities ``'f'`` (float32), loss masks ``'B'``
(uint8).
"""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from megaflow_hpc.types import Artifact, Rollout, known_fields

CALLS_FILE = "calls.jsonl"
"""Name of the artifact that stores :attr:`Recording.calls`, one JSON line per turn."""
IMAGE_SCHEME = "sha256:"
"""URL scheme of images in recorded messages. The image's SHA-256 follows."""


@dataclass(frozen=True)
class Image:
    """An image shown to a model. It is stored only once, even if it was sent repeatedly."""

    sha256: str
    """Digest of ``data``, 64 hexadecimal digits."""
    media_type: str
    """``image/png``, ``image/jpeg``, ``image/webp`` or ``image/gif``, derived from its first bytes."""
    width: int
    height: int
    """Width and height in pixels, read from the header without decoding the image."""
    data: bytes = field(repr=False)
    """The image file."""

    @property
    def label(self) -> str:
        """Short text to show in place of the image: ``[image 1280x800 PNG sha256:ab12cd34…]``."""
        kind = self.media_type.removeprefix("image/").upper()
        return f"[image {self.width}x{self.height} {kind} {IMAGE_SCHEME}{self.sha256[:8]}…]"

    @property
    def file_name(self) -> str:
        """Name for a file with this image: ``<sha256>.png``."""
        return f"{self.sha256}.{self.media_type.removeprefix('image/')}"

    @property
    def url(self) -> str:
        """The image as a ``data:`` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


class ImageSpan(NamedTuple):
    """The range ``[start, start + length)`` of placeholder tokens that stand for an image in a sequence."""

    start: int
    length: int
    image: str
    """The image's SHA-256 in hexadecimal."""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass
class TokenSequence:
    """Tokens of consecutive calls in which each prompt extends the previous one. All four columns have one entry per
    token."""

    policy: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Log-probability of each token. NaN for tokens that were not sampled."""
    loss_mask: array[int] = field(default_factory=lambda: array("B"))
    """1 for tokens that the policy sampled freely with its own sampling settings, otherwise 0."""
    weight_versions: array[int] = field(default_factory=lambda: array("i"))
    """Version of the weights that sampled each token. -1 for tokens that were not sampled."""
    experts: array[int] = field(default_factory=lambda: array("B"))
    """Numbers of the experts that the engine chose for each token. Empty if the engine does not report experts.

    The array is flattened from (tokens, layers, experts per token). Each number is a native-endian integer of 1 or 2
    bytes. A token whose bytes are all 255 (:data:`UNROUTED`) has unknown experts.
    """
    expert_layers: int = 0
    experts_per_token: int = 0
    images: list[ImageSpan] = field(default_factory=list)
    """The placeholder tokens of each image, sorted by their start. They do not overlap."""

    @property
    def expert_row(self) -> int:
        """Size in bytes of each token's entry in ``experts``."""
        return len(self.experts) // len(self.tokens) if self.tokens else 0

    def first(self, count: int | None) -> TokenSequence:
        """Returns a sequence of the first ``count`` tokens, or this sequence if it is not longer.

        If an image would be cut in two, the sequence ends before that image.
        """
        if count is None or len(self.tokens) <= count:
            return self
        count = next((span.start for span in self.images if span.start < count < span.end), count)
        cut = {name: getattr(self, name)[:count] for name in _COLUMNS}
        images = [span for span in self.images if span.end <= count]
        return replace(self, **cut, experts=self.experts[: count * self.expert_row], images=images)

    def to_record(self) -> dict[str, Any]:
        """Returns a mapping that msgpack can encode, with the columns as native-endian bytes."""
        record = {"policy": self.policy, **{name: getattr(self, name).tobytes() for name in _COLUMNS}}
        if self.experts:
            shape = {"expert_layers": self.expert_layers, "experts_per_token": self.experts_per_token}
            record |= {"experts": self.experts.tobytes(), **shape}
        if self.images:
            record["images"] = [list(span) for span in self.images]
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TokenSequence:
        """Restores a sequence from :meth:`to_record`."""
        found = cls(policy=record["policy"])
        for name in _COLUMNS:
            getattr(found, name).frombytes(record[name])
        if "experts" in record:
            found.experts.frombytes(record["experts"])
            found.expert_layers, found.experts_per_token = record["expert_layers"], record["experts_per_token"]
        found.images = [ImageSpan(*span) for span in record.get("images", ())]
        return found


UNROUTED = b"\xff"
"""Byte that fills the expert numbers of a token if the engine reported none for it."""
_COLUMNS = ("tokens", "logprobs", "loss_mask", "weight_versions")


@dataclass
class Turn:
    """One model call. Its sampled tokens are ``[token_start, token_end)`` of the rollout's sequence ``sequence``."""

    sequence: int
    token_start: int
    token_end: int
    finish_reason: str = ""
    model_s: float = 0.0
    sandbox_s: float = 0.0
    agent_s: float = 0.0
    wait_s: float = 0.0
    server: str = ""
    policy: str = ""
    """The policy that generated the response. Empty in older recordings."""
    message: int = -1
    """Index of the response in the rollout's messages. -1 if unknown, or if this was not a chat call."""
    started_by: int = -1
    """For the first call of a sub-agent, the number of the call that started the sub-agent. -1 for other calls."""
    role: str = ""
    """Role that the agent called. Empty in a campaign without a team."""


@dataclass
class Attempt:
    """One attempt at a rollout, kept regardless of its outcome. Times are in seconds since the Unix epoch."""

    attempt: int
    status: str
    error_kind: str = ""
    error: str = ""
    node: str = ""
    job_id: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0


@dataclass
class Recording:
    """The gateway's recording of one rollout, returned when the agent has finished."""

    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All messages of all calls, in OpenAI format. They form a tree, because conversations share common prefixes."""
    parents: list[int] = field(default_factory=list)
    """For each message, the index of the previous message in its conversation. -1 for the first message of a
    conversation."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """For each turn, additional data for replay: the request's ``id``, ``asked`` and ``api``.

    ``asked`` is a digest of the conversation, and ``api`` is the API that the agent called. ``text`` is the response if
    it is not a message. ``tokens`` are the numbers of prompt and sampled tokens if no ids are known.
    """
    over_budget: str = ""
    """Reason why a call was refused, if the rollout exhausted its budget. Empty otherwise."""
    constrained: int = 0
    """Number of calls whose tokens have loss mask 0. Their request options differed from the policy's sampling
    settings, or constrained the response."""
    inexact: int = 0
    """Number of calls recorded with less detail than an engine can provide: ``plain`` instead of ``split``, or only
    ``text``."""
    protocols: dict[str, int] = field(default_factory=dict)
    """Number of calls by recording protocol. ``split`` and ``replay``: every token is known. ``plain``: the sampled
    tokens are known, and a history that encodes to different tokens starts a new sequence. ``text``: no tokens are
    known."""
    images: dict[str, Image] = field(default_factory=dict)
    """Maps SHA-256 to image, for every image in an answered call. In messages, the image's URL is ``sha256:<hex>``."""


@dataclass
class Trajectory:
    """All stored data of one rollout: a record of a journal, and a row of ``trajectories.h5``. ``None`` means
    unknown."""

    id: str
    task_id: str
    group_id: str
    policy: str
    agent: str
    status: str
    sample_index: int = 0
    attempt: int = 0
    epoch: int = 0
    error_kind: str = ""
    error: str = ""
    node: str = ""
    job_id: str = ""
    rank: int = -1
    """Rank in the pod that ran the rollout. -1 if unknown."""
    seed: int = -1
    """Sampling seed. Model call n, counted from 0, uses ``(seed + n) % 2**31``. -1 if the rollout has no seed."""
    reward: float | None = None
    """Reward of the rollout, or ``None`` if it was not verified."""
    rewards: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    finished_at: float = 0.0
    setup_s: float | None = None
    """Seconds until the agent started."""
    agent_s: float | None = None
    """Seconds spent in the agent, including its model calls and commands."""
    verify_s: float | None = None
    """Seconds spent in the verifier."""
    cpu_s: float | None = None
    """CPU seconds of all processes in the rollout's sandboxes, including verification."""
    memory_peak_mb: float | None = None
    """Highest memory usage of any of the rollout's sandboxes in MB (10^6 bytes)."""
    disk_peak_mb: float | None = None
    """Highest measured disk usage of any of the rollout's sandboxes in MB."""
    constrained: int = 0
    """Number of model calls whose tokens have loss mask 0; see :attr:`Recording.constrained`."""
    inexact: int = 0
    """Number of model calls recorded with less detail than an engine can provide; see :attr:`Recording.inexact`."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of all conversations in OpenAI format. ``parents`` links them into a tree."""
    parents: list[int] = field(default_factory=list)
    """For each message, the index of the previous message. :func:`linked` fills in missing entries."""
    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    images: dict[str, Image] = field(default_factory=dict)
    """Maps SHA-256 to image, for every image that the messages or sequences refer to; see :attr:`Recording.images`."""

    def __repr__(self) -> str:
        return f"<Trajectory {self.id!r}: {self.status}, reward {self.reward}, {len(self.turns)} turns>"

    def to_record(self) -> dict[str, Any]:
        """Returns the fields as a mapping that msgpack can encode, with token columns as native-endian bytes."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["sequences"] = [sequence.to_record() for sequence in self.sequences]
        for name in ("turns", "attempts", "artifacts"):
            record[name] = [dict(vars(item)) for item in getattr(self, name)]  # shallow: asdict makes slow deep copies
        record["images"] = image_records(self.images)
        return record

    @classmethod
    def begin(cls, rollout: Rollout, attempt: int, status: str, **known: Any) -> Trajectory:
        """Creates the trajectory of an attempt that starts and ends now. ``known`` sets further fields, and may
        override these times."""
        now = time.time()
        names = ("id", "task_id", "group_id", "policy", "agent", "sample_index")
        of_rollout = {name: getattr(rollout, name) for name in names}
        times = {"started_at": now, "finished_at": now}
        return cls(**of_rollout, **{**times, **known}, attempt=attempt, status=status)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """Restores a trajectory from :meth:`to_record`. Ignores unknown keys. Missing keys get the default values of
        their fields."""
        kept = known_fields(cls, record)
        kept["sequences"] = [TokenSequence.from_record(s) for s in record.get("sequences", ())]
        kept["turns"] = [Turn(**known_fields(Turn, t)) for t in record.get("turns", ())]
        kept["attempts"] = [Attempt(**known_fields(Attempt, a)) for a in record.get("attempts", ())]
        kept["artifacts"] = [Artifact(**known_fields(Artifact, a)) for a in record.get("artifacts", ())]
        kept["images"] = images_of(record.get("images", ()))
        return cls(**kept)


def image_records(images: Mapping[str, Image]) -> list[dict[str, Any]]:
    """Returns images as mappings that msgpack can encode."""
    return [dict(vars(image)) for image in images.values()]


def images_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Image]:
    """Restores images from :func:`image_records`, by SHA-256."""
    return {record["sha256"]: Image(**known_fields(Image, record)) for record in records}


def shown_images(messages: Iterable[Mapping[str, Any]]) -> list[str | None]:
    """Returns the SHA-256 of each image in messages, in the order in which they are shown. An image that is not
    recorded, such as one on another host, is ``None``.
    """
    urls = (part["image_url"].get("url", "") for message in messages for part in image_parts(message))
    return [url.removeprefix(IMAGE_SCHEME) if url.startswith(IMAGE_SCHEME) else None for url in urls]


def with_images(messages: Sequence[Mapping[str, Any]], images: Mapping[str, Image]) -> list[dict[str, Any]]:
    """Replaces ``sha256:<hex>`` URLs in messages by ``data:`` URLs. URLs of unknown images are left unchanged."""
    urls = {f"{IMAGE_SCHEME}{name}": images[name].url for name in shown_images(messages) if name and name in images}
    return [replaced_images(message, lambda _, url: urls.get(url, url)) for message in messages]


def replaced_images(message: Mapping[str, Any], replace: Callable[[int, str], str]) -> dict[str, Any]:
    """Returns a message with the URL of each image part replaced by ``replace(index of the part, URL)``."""
    images = image_parts(message)
    if not images:
        return dict(message)
    parts = [
        {**part, "image_url": {**part["image_url"], "url": replace(index, part["image_url"].get("url", ""))}}
        if any(part is image for image in images)
        else part
        for index, part in enumerate(message["content"])
    ]
    return {**message, "content": parts}


def image_label(part: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Returns the text to show in place of an image part.

    Args:
        labels: Maps SHA-256 to :attr:`Image.label`.
    """
    url = str(part["image_url"].get("url", ""))
    if not url.startswith(IMAGE_SCHEME):
        return f"[image {url[:200]}]" if url.startswith("http") else "[image]"
    name = url.removeprefix(IMAGE_SCHEME)
    return labels.get(name, f"[image {IMAGE_SCHEME}{name[:8]}…]")


def image_parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the image parts of a message in OpenAI form."""
    content = message.get("content")
    parts = content if isinstance(content, list) else ()
    return [part for part in parts if isinstance(part, Mapping) and isinstance(part.get("image_url"), Mapping)]


def linked(parents: Sequence[int], count: int) -> list[int]:
    """Returns the parents of ``count`` messages. A message without an entry, as in older recordings, is assumed to
    follow the previous message."""
    return [*parents[:count], *range(len(parents) - 1, count - 1)]


def path_to(parents: Sequence[int], message: int) -> list[int]:
    """Returns the message indices of a conversation, from the first message to ``message``. The list is empty for
    -1."""
    path = []
    while message >= 0:
        path.append(message)
        message = parents[message]
    return path[::-1]
