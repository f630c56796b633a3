"""Exports to verl: Parquet with one row per token sequence and the columns of verl's rollouts and prompt datasets.

verl's agent loop returns a ``DataProto`` of padded tensors. This format leaves padding to the reader, so the columns of
the same names contain lists: ``prompts`` (tokens before the first sampled one), ``responses`` (all later tokens),
``response_mask`` (1 if sampled), ``rollout_log_probs`` (0.0 if not sampled), ``reward_score``, ``uid`` (the group for
computing advantages), ``__num_turns__``, ``min_global_steps`` and ``max_global_steps`` (weight versions). :func:`proto`
pads rows into the tensors that ``DataProto.from_single_dict`` expects.

``images`` lists the images in the prompt's messages, in order, each as ``{"bytes": …}``, the form that verl's
processors expect. The messages contain ``<image>`` in place of each image. ``sequence_images`` lists the images of the
whole sequence in the order of their placeholders, with ``start`` and ``length`` relative to ``prompts + responses``.

In a team, select the sequences of one role by ``role``, and read its reward from ``named_rewards``, which contains all
rewards by name.

The columns ``data_source``, ``prompt``, ``ability``, ``reward_model`` and ``extra_info`` match verl's ``RLHFDataset``,
so the same file also serves as a prompt dataset. (verl 0.9: ``verl/experimental/agent_loop/agent_loop.py``,
``verl/utils/dataset/rl_dataset.py``.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megaflow_hpc.trajectories.exports.parquet import images_in, images_type, pyarrow
from megaflow_hpc.trajectories.hdf5.columns import Array
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.reading.batch import padded_lines
from megaflow_hpc.trajectories.reading.sources import Flat
from megaflow_hpc.trajectory import Image, shown_images

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "Parquet, one row per token sequence, with the columns of verl's rollouts and prompt datasets"


def write(job: ExportJob) -> list[Path]:
    """Writes ``verl.parquet``."""
    pa = pyarrow()
    path = job.directory / "verl.parquet"
    schema = _schema(pa, job.store.reward_names)
    with published(path) as temporary, pa.parquet.ParquetWriter(temporary, schema, compression="zstd") as writer:
        for numbers in job.groups():
            rows = list(_rows(job, job.store.flat(numbers)))
            if rows:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return [path]


def _rows(job: ExportJob, flat: Flat) -> Iterator[dict[str, Any]]:
    sequence_number, row_before = 0, -1
    for i, row_number in enumerate(flat.row.tolist()):
        sequence_number = sequence_number + 1 if row_number == row_before else 0
        if row_number != row_before:
            row_before, row = row_number, job.store[row_number]
            sequences, images = row.sequences, row.images  # read once for all sequences of the row
        tokens = slice(flat.offsets[i], flat.offsets[i + 1])
        mask = flat.loss_mask[tokens]
        if not mask.any():
            continue  # no sampled tokens: nothing to train on
        begin = tokens.start + int(mask.argmax())
        response = slice(begin, tokens.stop)
        versions = flat.weight_versions[tokens][mask == 1]
        prompt, shown = _prompt(_messages_of(row, sequence_number), images)
        yield {
            "data_source": job.store.campaign,
            "prompt": prompt,
            "images": [{"bytes": images[name].data} for name in shown],
            "sequence_images": images_in(sequences[sequence_number], images),
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": row.task_id},
            "extra_info": {
                "index": row_number,
                "sequence": sequence_number,
                "task_id": row.task_id,
                "trajectory": row.id,
            },
            "uid": row.group_id,
            "prompts": flat.tokens[tokens.start : begin],
            "responses": flat.tokens[response],
            "response_mask": flat.loss_mask[response],
            "rollout_log_probs": np.nan_to_num(flat.logprobs[response], nan=0.0),
            "reward_score": row.reward,
            "__num_turns__": len(row.turns),
            "min_global_steps": int(versions.min()),
            "max_global_steps": int(versions.max()),
            "policy": str(flat.policy[i]),
            "role": row.sequence_roles[sequence_number],
            "named_rewards": row.rewards,
            "agent_name": row.agent,
        }


def _messages_of(row: Row, sequence: int) -> list[dict[str, Any]]:
    """Returns the messages of a sequence's first call, or the main conversation if that call is unknown."""
    for number, turn in enumerate(row.turns):
        if turn.sequence == sequence and turn.message >= 0:
            return row.call(number).messages
    return row.messages


def _prompt(
    messages: Sequence[Mapping[str, Any]], images: Mapping[str, Image]
) -> tuple[list[dict[str, str]], list[str]]:
    """Returns the messages before the first assistant message, and the SHA-256 of each image in them.

    The messages are text, with ``<image>`` in place of each image.
    """
    prompt: list[dict[str, str]] = []
    shown: list[str] = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        content = message.get("content")
        if isinstance(content, list):
            texts = []
            for part in (part for part in content if isinstance(part, dict)):
                stored = [name for name in shown_images([{"content": [part]}]) if name and name in images]
                shown += stored
                texts.append("<image>" if stored else str(part.get("text", "")))
            content = "\n".join(texts)
        text = str(content or "").encode("utf-8", "backslashreplace").decode()
        prompt.append({"role": str(message.get("role", "user")), "content": text})
    return prompt, shown


def _schema(pa: Any, rewards: tuple[str, ...]) -> Any:
    text, integer = pa.string(), pa.int64()
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct({"role": text, "content": text}))),
            ("images", pa.list_(pa.struct({"bytes": pa.binary()}))),
            ("sequence_images", images_type(pa)),
            ("ability", text),
            ("reward_model", pa.struct({"style": text, "ground_truth": text})),
            ("extra_info", pa.struct({"index": integer, "sequence": integer, "task_id": text, "trajectory": text})),
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
            ("role", text),
            *([("named_rewards", pa.struct(dict.fromkeys(rewards, pa.float32())))] if rewards else []),
            ("agent_name", text),
        ]
    )


def proto(rows: Sequence[Mapping[str, Any]], pad_token_id: int = 0) -> dict[str, Array]:
    """Pads rows of this format as verl's agent loop does: prompts on the left, responses on the right.

    Args:
        rows: B rows read from the Parquet file.
        pad_token_id: Id of the tokenizer's padding token.

    Returns:
        Arrays by name. The tensors of a ``DataProto`` have shape (B, length): int64 ``prompts``, ``responses``,
        ``response_mask``, ``input_ids``, ``attention_mask`` and ``position_ids``; float32 ``rollout_log_probs`` and
        ``rm_scores`` (the reward on the last token). Its ``non_tensor_batch``, ``uid`` and ``__num_turns__``, has shape
        (B,).
    """

    def lines(name: str, dtype: Any, fill: Any, left: bool = False) -> Array:
        return padded_lines([row[name] for row in rows], dtype, fill, left=left)

    prompts = lines("prompts", np.int64, pad_token_id, left=True)
    responses = lines("responses", np.int64, pad_token_id)
    width = prompts.shape[1]
    attention = np.zeros((len(rows), width + responses.shape[1]), np.int64)
    scores = np.zeros(responses.shape, np.float32)
    for line, row in enumerate(rows):
        end = len(row["responses"])
        attention[line, width - len(row["prompts"]) : width + end] = 1
        scores[line, end - 1] = row["reward_score"]
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
