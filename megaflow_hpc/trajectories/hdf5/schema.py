r"""Defines the columns of ``trajectories.h5``, format ``megaflow-hpc/trajectories``, and how their text is encoded.

The writer, the readers, the validator and docs/reference/trajectory-format.md share this table. All datasets are
one-dimensional. Ragged data is stored flat: item i has the entries ``[offset[i], offset[i+1])`` of the flat columns,
and an offset column has one more entry than there are items. The only filters are HDF5's shuffle, deflate and
fletcher32, and nothing has variable length, so every HDF5 library can read the file. Readers ignore unknown datasets.
Changing the meaning of a column requires a new version.

HDF5 strings cannot contain NUL or lone surrogates (undecodable bytes from program output). String columns store the
escapes ``\x00`` and ``\udc80`` instead. Messages are stored losslessly, because JSON has equivalent escapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

FORMAT = "megaflow-hpc/trajectories"
FORMAT_VERSION = 3

STRING = "string"
"""Kind of column for fixed-width UTF-8, padded with NUL. Widths are powers of two."""

TEXT = "text"
"""Kind of column for UTF-8 of any length, used for values that are usually empty but may be long. The column
:func:`text_offset` has the offsets."""

STATUSES = ("completed", "truncated", "failed", "cancelled")


class Column(NamedTuple):
    """One dataset of a campaign file."""

    group: str
    name: str
    dtype: str
    extent: str
    """Name of the count that determines the column's length, with ``+1`` for offset columns."""
    doc: str

    @property
    def path(self) -> str:
        """Dataset path in the file."""
        return f"{self.group}/{self.name}"

    @property
    def is_offset(self) -> bool:
        """True for an offset column, which has one more entry than there are items."""
        return self.extent.endswith("+1")

    @property
    def chunk(self) -> int:
        """Number of entries in a chunk. Chunks have tens of kB, so a rollout's tokens span few chunks."""
        if self.path == "messages/json":
            return _TEXT_CHUNK
        if self.path in ("artifacts/bytes", "experts/bytes", "images/bytes"):
            return BYTE_CHUNK
        if self.group == "tokens":
            return TOKEN_CHUNK
        return 1024 if self.dtype == STRING else ROW_CHUNK

    @property
    def is_shuffled(self) -> bool:
        """True if HDF5's shuffle filter applies.

        The filter does not help with single bytes, log-probabilities (mostly noise) or weight versions (mostly runs).
        """
        return self.dtype != "uint8" and self.path not in ("tokens/logprob", "tokens/weight_version")

    @property
    def is_deflated(self) -> bool:
        """True if HDF5 compresses the column. Image files are already compressed."""
        return self.path != "images/bytes"


class ColumnGroup(NamedTuple):
    """An HDF5 group of columns."""

    name: str
    doc: str
    columns: tuple[tuple[str, str, str, str], ...]
    """Name, dtype, extent and description of each column."""


GROUPS = (
    ColumnGroup(
        "trajectories",
        "One row per rollout, in commit order. `n` rows. Unknown measurements are NaN.",
        (
            ("id", STRING, "n", "`<task_id>/<policy>/<sample_index>`, from round 1 on `<task_id>@<round>/…`; unique"),
            ("task_id", STRING, "n", "the task"),
            ("group_id", STRING, "n", "the id without the sample. Advantages compare the samples of a group"),
            ("policy", STRING, "n", "policy of the rollout"),
            ("agent", STRING, "n", "key of the agent in the campaign"),
            ("status", STRING, "n", "`completed`, `truncated` (both verified), `failed` or `cancelled`"),
            (
                "error_kind",
                STRING,
                "n",
                "empty; agent or verifier if verified; otherwise model, sandbox, node, walltime or user",
            ),
            ("error", TEXT, "n", "error message; empty without an error"),
            ("node", STRING, "n", "host that ran it"),
            ("job_id", STRING, "n", "Slurm job, `<array job>_<element>`"),
            ("rank", "int32", "n", "rank in the pod that ran it; -1 if unknown"),
            (
                "seed",
                "int64",
                "n",
                "sampling seed: model call i, from 0, used `(seed + i) % 2**31`; -1 without a seed",
            ),
            ("sample_index", "int32", "n", "number of the sample within its group, from 0"),
            ("attempt", "int32", "n", "number of the attempt that is stored, from 0"),
            ("epoch", "int32", "n", "epoch of the claim that committed it"),
            ("turns", "int32", "n", "number of model calls"),
            ("inexact", "int32", "n", "number of model calls with some unknown token ids"),
            (
                "constrained",
                "int32",
                "n",
                "number of model calls whose tokens were not sampled freely",
            ),
            ("reward", "float32", "n", "NaN unless verified"),
            ("started_at", "float64", "n", "seconds UTC since 1970"),
            ("finished_at", "float64", "n", "the same"),
            ("setup_s", "float32", "n", "seconds until the agent started: sandbox and files"),
            (
                "agent_s",
                "float32",
                "n",
                "seconds in the agent, including its model calls and commands",
            ),
            ("verify_s", "float32", "n", "seconds in the verifier"),
            ("cpu_s", "float32", "n", "CPU seconds of all processes in its sandboxes"),
            (
                "memory_peak_mb",
                "float32",
                "n",
                "peak memory of any of its sandboxes, in MB (10^6 bytes)",
            ),
            (
                "disk_peak_mb",
                "float32",
                "n",
                "peak disk usage of any of its sandboxes, in MB",
            ),
            ("sequence_offset", "int64", "n+1", "into `/sequences`"),
            ("turn_offset", "int64", "n+1", "into `/turns`"),
            ("message_offset", "int64", "n+1", "into `/messages/offset`"),
            ("attempt_offset", "int64", "n+1", "into `/attempts`"),
            ("image_offset", "int64", "n+1", "into `/image_uses`"),
        ),
    ),
    ColumnGroup(
        "sequences",
        "Token sequences: consecutive calls in which each prompt extends the previous one. A new sequence starts "
        "only if a call's prompt does not. `m` rows, in the order of their trajectories.",
        (
            ("trajectory", "int64", "m", "row of `/trajectories`"),
            ("token_offset", "int64", "m+1", "into `/tokens`"),
            ("policy", STRING, "m", "policy that sampled it"),
            (
                "weight_version_min",
                "int32",
                "m",
                "lowest weight version that sampled one of its tokens; -1 if none",
            ),
            (
                "weight_version_max",
                "int32",
                "m",
                "highest such version",
            ),
            ("expert_layers", "int32", "m", "layers of `/experts`; 0 if the engine reported no experts"),
            ("experts_per_token", "int32", "m", "number of experts that a layer chose for each token"),
            ("expert_offset", "int64", "m+1", "into `/experts/bytes`"),
            ("image_offset", "int64", "m+1", "into `/image_spans`"),
        ),
    ),
    ColumnGroup(
        "turns",
        "Model calls. `t` rows, in the order of their trajectories.",
        (
            ("sequence", "int64", "t", "row of `/sequences`; -1 if the engine reported no token ids"),
            ("token_start", "int64", "t", "first sampled token, a row of `/tokens` (not relative to the sequence)"),
            ("token_end", "int64", "t", "end of the sampled tokens (exclusive)"),
            ("finish_reason", STRING, "t", "as reported by the engine: stop, length, tool_calls, …"),
            ("model_s", "float32", "t", "seconds in the engine"),
            ("sandbox_s", "float32", "t", "seconds in the sandbox after the call"),
            ("agent_s", "float32", "t", "seconds in the agent itself"),
            ("wait_s", "float32", "t", "seconds waiting for an engine"),
            ("server", STRING, "t", "engine server that answered"),
            ("policy", STRING, "t", "policy that answered"),
            ("message", "int64", "t", "index of its answer among the messages of its trajectory; -1 if unknown"),
            (
                "started_by",
                "int64",
                "t",
                "for the first call of a sub-agent: index, among the turns of its trajectory, of the call that started "
                "the sub-agent, whose tool calls had no results yet; otherwise -1",
            ),
            ("role", STRING, "t", "role that the agent called; empty without a team"),
        ),
    ),
    ColumnGroup(
        "tokens",
        "One entry per token, prompts included. `k` rows.",
        (
            ("id", "int32", "k", "token id in the policy's vocabulary"),
            ("logprob", "float32", "k", "log-probability (natural logarithm), as sampled; NaN if not sampled"),
            ("loss_mask", "uint8", "k", "1 if the policy sampled the token freely, otherwise 0"),
            ("weight_version", "int32", "k", "weight version that sampled it; -1 if not sampled"),
        ),
    ),
    ColumnGroup(
        "experts",
        "The experts to which the engine routed each token of a mixture-of-experts model. Sequence i has "
        "`bytes[expert_offset[i]:expert_offset[i+1]]`: an array (tokens, layers, experts per token) of uint8, or of "
        "little-endian uint16 if it is twice as long. Layers without experts have zeros. The experts of "
        "a token are unknown if all its bytes are 255, as for the last token of a sequence. `eb` bytes. Before "
        "compression, Qwen3-30B-A3B takes 384 bytes for each token; the columns of `/tokens` take 13.",
        (("bytes", "uint8", "eb", "the experts"),),
    ),
    ColumnGroup(
        "messages",
        "Every message of every model call. Message i is the UTF-8 JSON text `json[offset[i]:offset[i+1]]`, an object "
        "in OpenAI message form. The messages of a trajectory form a tree, because conversations share their common "
        "beginning. The conversation of a call is its answer, `/turns/message`, and the chain of messages before it by "
        "`parent`. `q` messages.",
        (
            (
                "parent",
                "int64",
                "q",
                "index of the message before it among the messages of its trajectory; -1 for a first message",
            ),
            ("offset", "int64", "q+1", "into `json`"),
            ("json", "uint8", "qb", "UTF-8 bytes"),
        ),
    ),
    ColumnGroup(
        "attempts",
        "All attempts at the rollouts, usually including the stored one. `a` rows.",
        (
            ("attempt", "int32", "a", "number within the rollout, from 0, not counting attempts of killed pods"),
            ("status", STRING, "a", "as for a trajectory"),
            ("error_kind", STRING, "a", "as for a trajectory, or `preemption`"),
            ("error", TEXT, "a", "error message"),
            ("node", STRING, "a", "host"),
            ("job_id", STRING, "a", "Slurm job"),
            ("started_at", "float64", "a", "seconds UTC since 1970"),
            ("finished_at", "float64", "a", "seconds UTC since 1970"),
        ),
    ),
    ColumnGroup(
        "artifacts",
        "Files stored with a rollout. Artifact i is `bytes[offset[i]:offset[i+1]]`. `f` artifacts, in the order of "
        "their trajectories. `calls.jsonl` has a line of JSON per turn with further data for a replay: the request's "
        "`id`, `asked` (a digest of the conversation), `api` (the path that the agent called), `tokens` (numbers of "
        "prompt and sampled tokens, if no ids are known), and the `text` of an answer that is not a message.",
        (
            ("name", STRING, "f", "file name"),
            ("trajectory", "int64", "f", "row of `/trajectories`, not decreasing"),
            ("offset", "int64", "f+1", "into `bytes`"),
            ("bytes", "uint8", "fb", "content"),
        ),
    ),
    ColumnGroup(
        "images",
        "Every image that a model was shown, each once in the file. Image i is the file "
        "`bytes[offset[i]:offset[i+1]]`. An image part of a message names it: "
        '`{"type": "image_url", "image_url": {"url": "sha256:<hex>"}}`. Images at the address of another host are not '
        "stored. `i` images.",
        (
            ("sha256", STRING, "i", "SHA-256 of its bytes in hexadecimal; unique"),
            ("media_type", STRING, "i", "`image/png`, `image/jpeg`, `image/webp` or `image/gif`"),
            ("width", "int32", "i", "pixels, from its header"),
            ("height", "int32", "i", "pixels, from its header"),
            ("offset", "int64", "i+1", "into `bytes`"),
            ("bytes", "uint8", "ib", "the image file, as it was sent"),
        ),
    ),
    ColumnGroup(
        "image_uses",
        "The images of each trajectory, each once. `u` rows, in the order of their trajectories.",
        (("image", "int64", "u", "row of `/images`"),),
    ),
    ColumnGroup(
        "image_spans",
        "The placeholder tokens in whose place a model saw an image. `p` rows, in the order of their sequences and "
        "tokens. They do not overlap.",
        (
            ("start", "int64", "p", "first placeholder token, a row of `/tokens` (not relative to the sequence)"),
            ("length", "int32", "p", "number of placeholder tokens"),
            ("image", "int64", "p", "row of `/images`; one of its trajectory's"),
        ),
    ),
)

REWARDS_DOC = (
    "One dataset per reward name, float32 `(n)`: the reward, NaN for rollouts without it. Rewards that `reverify` gave "
    "later are not in the file, but in `rewards/NAME` of the run directory, from which this package reads both."
)

ROOT_ATTRIBUTES = (
    ("format", f"`{FORMAT}`"),
    ("format_version", f"{FORMAT_VERSION}; readers refuse any other"),
    ("campaign", "name of the campaign"),
    ("software", "name and version of the software that wrote the file"),
    ("sources", "JSON: sizes of the journals, and checksum of the seals, from which it was gathered"),
    (
        "config",
        "JSON: the campaign as resolved, with keys and passwords replaced by `***`; `{}` if unknown (optional)",
    ),
    (
        "versions",
        "JSON: versions of the software that planned the campaign and wrote the file; for each policy the engine, its "
        "versions and the SHA-256 of the model; image files (optional)",
    ),
)


def _columns() -> Iterator[Column]:
    for group in GROUPS:
        for name, dtype, extent, doc in group.columns:
            yield Column(group.name, name, dtype, extent, doc)


COLUMNS = {column.path: column for column in _columns()}
"""All columns except the rewards, by path."""
ROW_COLUMNS = tuple(column for column in COLUMNS.values() if column.group == "trajectories" and column.extent == "n")
"""Columns with one value per rollout."""


def text_offset(path: str) -> str:
    """Returns the path of a :data:`TEXT` column's offsets."""
    return f"{path}_offset"


OFFSETS = {
    "trajectories/sequence_offset": "sequences/trajectory",
    "trajectories/turn_offset": "turns/sequence",
    "trajectories/message_offset": "messages/offset",
    "trajectories/attempt_offset": "attempts/attempt",
    "sequences/token_offset": "tokens/id",
    "sequences/expert_offset": "experts/bytes",
    "messages/offset": "messages/json",
    "artifacts/offset": "artifacts/bytes",
    "trajectories/image_offset": "image_uses/image",
    "sequences/image_offset": "image_spans/image",
    "images/offset": "images/bytes",
    **{text_offset(column.path): column.path for column in COLUMNS.values() if column.dtype == TEXT},
}
"""Path of the column that each offset column points into, by path."""

MAX_REWARD_COLUMNS = 4096
"""Maximum number of reward columns. Verifiers choose their names, and each column takes space in every row.

Rewards of single turns are added only while at most half of the columns are in use.
"""

MEASURED = ("setup_s", "agent_s", "verify_s", "cpu_s", "memory_peak_mb", "disk_peak_mb")
"""Measurements of a rollout, any of which may be unknown."""

UNKNOWN_AS_NAN = ("reward", *MEASURED)
"""Numeric fields of a rollout that may be unknown: NaN in a column, ``None`` in a trajectory."""

TOKEN_CHUNK = 16384
"""Number of entries in a chunk of the token columns. Smaller chunks make files larger. Larger chunks slow down random
batches."""
ROW_CHUNK = 4096
BYTE_CHUNK = 65536
_TEXT_CHUNK = 1 << 20
"""Number of bytes in a chunk of messages. Deflate looks back only 32 kB, and starts each chunk without history."""


def markdown() -> str:
    """Returns the schema as Markdown lists for docs/reference/trajectory-format.md."""
    lines = ["Root attributes:", ""]
    lines += [f"- `{name}`: {doc}" for name, doc in ROOT_ATTRIBUTES]
    for group in GROUPS:
        lines += ["", f"### `/{group.name}`", "", group.doc, ""]
        lines += [f"- `{name}: {dtype}[{extent}]`: {doc}" for name, dtype, extent, doc in group.columns]
    lines += ["", "### `/rewards/<name>`", "", REWARDS_DOC]
    return "\n".join(lines) + "\n"


# --- encoding ---------------------------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Replaces NUL and lone surrogates with escapes."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def message_json(message: Mapping[str, Any]) -> bytes:
    """Encodes a message as strict UTF-8 JSON. NaN and infinities become null, and unsupported types become strings."""
    try:
        return orjson.dumps(message, default=_text)  # much faster, but rejects lone surrogates and large integers
    except TypeError:
        text = json.dumps(_plain(message), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_text)
        return text.encode("utf-8", "backslashreplace")


def reward_name(name: str) -> str:
    """Converts a verifier's reward name to a valid dataset name. The result is not empty and has no path separators."""
    plain = escape(name).replace("/", "_")
    return plain if plain.strip(".") else f"_{plain}"


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


MAX_DEPTH = 200
"""Maximum nesting depth of a message. Deeper values are dropped, because few JSON parsers accept them."""


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= MAX_DEPTH and isinstance(value, Mapping | list | tuple):
        return None
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _text(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    return value
