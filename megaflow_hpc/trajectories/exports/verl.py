"""verl: one row per token sequence, as Parquet, with the columns of verl's own rollouts and prompt datasets.

verl's agent loop returns a ``DataProto`` of padded tensors. Here the reader pads, so the same names hold lists:
``prompts`` (tokens before the first sampled one), ``responses`` (all later tokens), ``response_mask`` (1 if sampled),
``rollout_log_probs`` (0.0 if not sampled), ``reward_score``, ``uid`` (the group, over which advantages are computed),
``__num_turns__``, ``min_global_steps`` and ``max_global_steps`` (weight versions). :func:`proto` pads rows to the
tensors for ``DataProto.from_single_dict``.

The columns ``data_source``, ``prompt``, ``ability``, ``reward_model`` and ``extra_info`` are those of verl's
``RLHFDataset``, so the same file can be used to sample again. (verl 0.9:
``verl/experimental/agent_loop/agent_loop.py``, ``verl/utils/dataset/rl_dataset.py``.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.trajectories.exports.parquet import pyarrow
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.reading.batch import padded_lines
from megaflow_hpc.trajectories.reading.sources import Flat, offsets_of

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.row import Row

HELP = "Parquet, one row per token sequence, with the columns of verl's rollouts and prompt datasets"


def write(job: ExportJob) -> list[Path]:
    """Writes ``verl.parquet``."""
    pa = pyarrow()
    path = job.directory / "verl.parquet"
    schema = _schema(pa)
    with published(path) as temporary, pa.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for numbers in job.groups():
            rows = list(_rows(job, job.flat(numbers)))
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return [path]


def _rows(job: ExportJob, flat: Flat) -> Iterator[dict[str, Any]]:
    sampled = offsets_of(flat.loss_mask)
    place, before = 0, -1
    for s, number in enumerate(flat.row.tolist()):
        place, before = (place + 1 if number == before else 0), number
        first, last = int(flat.offsets[s]), int(flat.offsets[s + 1])
        if sampled[last] == sampled[first]:
            continue  # no sampled tokens, so nothing to train on
        mask = flat.loss_mask[first:last]
        begin = first + int(mask.argmax())
        versions = flat.weight_versions[first:last][mask == 1]
        row = job.store[number]
        yield {
            "data_source": job.store.campaign,
            "prompt": _prompt(_asked(row, place)),
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": row.task_id},
            "extra_info": {"index": number, "sequence": place, "task_id": row.task_id, "trajectory": row.id},
            "uid": row.group_id,
            "prompts": flat.tokens[first:begin],
            "responses": flat.tokens[begin:last],
            "response_mask": flat.loss_mask[begin:last],
            "rollout_log_probs": np.nan_to_num(flat.logprobs[begin:last], nan=0.0),
            "reward_score": row.reward,
            "__num_turns__": len(row.turns),
            "min_global_steps": int(versions.min()),
            "max_global_steps": int(versions.max()),
            "policy": str(flat.policy[s]),
            "agent_name": row.agent,
        }


def _asked(row: Row, sequence: int) -> list[dict[str, Any]]:
    """Return the messages of a sequence's first call, or the main conversation if that call is unknown."""
    linked = (n for n, turn in enumerate(row.turns) if turn.sequence == sequence and turn.message >= 0)
    number = next(linked, None)
    return row.messages if number is None else row.call(number).messages


def _prompt(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the messages before the first answer, with their content as text."""
    found = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        text = str(content or "").encode("utf-8", "backslashreplace").decode()
        found.append({"role": str(message.get("role", "user")), "content": text})
    return found


def _schema(pa: Any) -> Any:
    text, whole = pa.string(), pa.int64()
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct([("index", whole), ("sequence", whole), ("task_id", text), ("trajectory", text)])),
            ("uid", text),
            ("prompts", pa.list_(pa.int32())),
            ("responses", pa.list_(pa.int32())),
            ("response_mask", pa.list_(pa.uint8())),
            ("rollout_log_probs", pa.list_(pa.float32())),
            ("reward_score", pa.float32()),
            ("__num_turns__", pa.int32()),
            ("min_global_steps", pa.int32()),
            ("max_global_steps", pa.int32()),
            ("policy", text),
            ("agent_name", text),
        ]
    )


def proto(rows: Sequence[Mapping[str, Any]], pad_token_id: int = 0) -> dict[str, NDArray[Any]]:
    """Pads rows of this format in the same way as verl's agent loop: prompts to the left, responses to the right.

    Args:
        rows: B rows as read from the Parquet file.
        pad_token_id: The tokenizer's padding token.

    Returns:
        By name, int64 ``prompts`` ``responses`` ``response_mask`` ``input_ids`` ``attention_mask`` ``position_ids``,
        float32 ``rollout_log_probs`` and ``rm_scores`` (the reward on the last token), all (B, length); ``uid`` and
        ``__num_turns__`` (B). The first eight are tensors of a ``DataProto``, the last two its ``non_tensor_batch``.
    """

    def lines(name: str, dtype: Any, fill: Any, left: bool = False) -> NDArray[Any]:
        return padded_lines([row[name] for row in rows], dtype, fill, left=left)

    prompts, responses = lines("prompts", np.int64, pad_token_id, left=True), lines("responses", np.int64, pad_token_id)
    lengths = [(len(row["prompts"]), len(row["responses"])) for row in rows]
    attention = np.zeros((len(rows), prompts.shape[1] + responses.shape[1]), np.int64)
    scores = np.zeros(responses.shape, np.float32)
    for line, (prompt, response) in enumerate(lengths):
        attention[line, prompts.shape[1] - prompt : prompts.shape[1] + response] = 1
        scores[line, response - 1] = rows[line]["reward_score"]
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": lines("response_mask", np.int64, 0),
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0) * attention,
        "rollout_log_probs": lines("rollout_log_probs", np.float32, 0.0),
        "rm_scores": scores,
        "uid": np.array([row["uid"] for row in rows], object),
        "__num_turns__": np.array([row["__num_turns__"] for row in rows], np.int32),
    }
