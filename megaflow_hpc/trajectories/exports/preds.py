"""Exports SWE-bench predictions: ``preds.json``, as read by the evaluation harness and mini-swe-agent.

The file maps instance ids to ``instance_id``, ``model_name_or_path`` and ``model_patch``. Since the harness accepts
only one prediction per instance in a file, campaigns with several policies or samples are split:
``preds-<policy>-<sample>.json``, and ``preds-<policy>-<sample>@<round>.json`` for later rounds.

The patch is the artifact ``model.patch``, ``patch.diff`` or ``patch``. Without such an artifact, it is the patch of the
last step, or else the first artifact whose name ends in ``.patch`` or ``.diff``. If there is no patch, the prediction
is empty, and a warning counts such rollouts.

A patch that is not valid UTF-8 cannot be stored in JSON, and replacing bytes would change it. Its prediction is left
empty, with a warning. Patches created by this package are always valid.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_hpc.trajectories.exports.files import safe_name
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.types import round_of

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "SWE-bench's preds.json, from the patch that each rollout left"

NAMES = ("model.patch", "patch.diff", "patch")


def write(job: ExportJob) -> list[Path]:
    """Writes ``preds.json``, or one file per policy and sample."""
    by_file: dict[tuple[str, int, int], list[int]] = {}
    names = ("task_id", "group_id", "sample_index")
    columns = (job.store.column(name)[job.numbers].tolist() for name in names)
    for row, task, group, sample in zip(job.numbers.tolist(), *columns, strict=True):
        policy = group.rpartition("/")[2]  # followed by the agent if the policy has several
        by_file.setdefault((policy, sample, round_of(task, group)), []).append(row)
    paths = []
    done = lacking = 0
    example = ""
    for (policy, sample, round_number), rows in sorted(by_file.items()):
        suffix = f"@{round_number}" if round_number else ""
        file = f"preds-{safe_name(policy)}-{sample}{suffix}.json" if len(by_file) > 1 else "preds.json"
        paths.append(job.directory / file)
        with published(paths[-1]) as temporary, open(temporary, "x", encoding="utf-8") as out:
            separator = "{"
            for row in job.store.rows(rows):
                patch, warning = patch_of(row)
                if warning:
                    job.warn(f"{row.id}: {warning}")
                elif not patch:
                    example = example if lacking else row.id
                    lacking += 1
                prediction = {
                    "instance_id": row.task_id,
                    "model_name_or_path": policy,
                    "model_patch": patch,
                }
                out.write(f"{separator}\n{json.dumps(row.task_id)}: {json.dumps(prediction)}")
                separator = ","
                done += 1
                job.progress(done, len(job.numbers))
            out.write("\n}\n")
    if lacking:
        job.warn(f"no patch in {lacking} of {done} trajectories, such as {example}: their predictions are empty")
    return paths


def patch_of(row: Row) -> tuple[str, str]:
    """Returns (patch, warning) of a rollout. The warning says that the patch is incomplete or not UTF-8. Either may be
    empty."""
    artifacts = {artifact.name: artifact.data for artifact in row.artifacts}
    candidates = [name for name in NAMES if name in artifacts]
    candidates += [name for name in reversed(artifacts) if name.rpartition("/")[2] in NAMES]
    candidates += [name for name in artifacts if name.endswith((".patch", ".diff"))]
    name = candidates[0] if candidates else NAMES[-1]
    try:
        text = artifacts.get(name, b"").decode()
    except UnicodeDecodeError as error:
        where = f"byte {error.object[error.start]:#04x} at {error.start}"
        return "", f"{name} is not UTF-8 ({where}), which a prediction cannot hold: it is empty"
    incomplete = artifacts.get(f"{name}.error", b"").decode("utf-8", "replace")
    return text, f"{name} is incomplete: {incomplete}" if incomplete else ""
