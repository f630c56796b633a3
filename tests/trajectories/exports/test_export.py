"""Exports are read by the programs that they are made for, and JSON lines are imported again."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import zipfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import h5py
import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import exports, gather, open_trajectories, validate
from megaflow_hpc.trajectories.exports import areal, verl
from megaflow_hpc.trajectories.exports.jsonl import import_jsonl
from megaflow_hpc.trajectory import CALLS_FILE, Trajectory, Turn, shown_images
from megaflow_hpc.types import Artifact
from tests.support.places import LAUNCHERS
from tests.support.samples import add_images, commit, image, run_dir, trajectory
from tests.support.viewers_environment import environment

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
TALK = [
    {"role": "system", "content": "help"},
    {"role": "user", "content": [{"type": "text", "text": "mend it"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "let me see"},
    {"role": "tool", "tool_call_id": "c1", "content": "nul \0 half \ud83e emoji 🦔 \udcff"},
    {"role": "assistant", "content": "done"},
]
STRANGE = [
    {"role": "tool", "content": "before anyone spoke"},
    {"role": "assistant", "tool_calls": [{"function": {"name": None, "arguments": "no json \ud800"}}, "x"]},
    {"role": "tool", "tool_call_id": "unknown", "content": None},
    {"role": "developer", "content": 3.5, "nested": [{"x": math.inf}]},
    {
        "role": "assistant",
        "tool_calls": [{"id": 7, "function": {"name": "f", "arguments": '{"a": NaN, "b": "\\ud800"}'}}],
    },
]


SHOWING = 8
"""The rollout that shows images."""


@pytest.fixture(scope="module")
def rollouts():
    found = [
        trajectory(n, messages=TALK, seed=n, setup_s=0.1 * n, cpu_s=n + 0.5, memory_peak_mb=10.0 * n) for n in range(12)
    ]
    found += [trajectory(n, task="nul", messages=STRANGE, error="a \0 b \udcff", agent_s=2.0) for n in range(3)]
    found += [trajectory(n, task="lost", status="failed", messages=[], sequences=[], turns=[]) for n in range(3)]
    add_images(found[SHOWING], random.Random(1), message=1)
    found[1].artifacts = [Artifact("notes.txt", b"x"), Artifact("fix.patch", b"--- a\n+++ b\n\xff")]
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory, rollouts):
    run = run_dir(tmp_path_factory.mktemp("export") / "run")
    commit(run, "a", *((0, 0, t) for t in rollouts))
    gather(run)
    return run


def export(run, out: Path, *formats: str, **options) -> dict[str, list[Path]]:
    with open_trajectories(run.path) as store:
        return exports.export(store, formats, out, **options)


# --- JSON lines and back ---


def columns(path: Path) -> dict[str, bytes]:
    """Values of every dataset, with strings of any width alike."""
    found = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            values = item.asstr()[:] if h5py.check_string_dtype(item.dtype) else item[:]
            found[name] = repr(values.tolist()) if values.dtype == object else values.tobytes()

    with h5py.File(path) as file:
        file.visititems(add)
    return found


@pytest.mark.parametrize(("compress", "suffix"), [("none", ""), ("gz", ".gz"), ("zst", ".zst")])
def test_json_lines_come_back_with_equal_columns(run, tmp_path, compress, suffix):
    (path,) = export(run, tmp_path, "jsonl", compress=compress)["jsonl"]
    assert path.name == f"trajectories.jsonl{suffix}"
    back = tmp_path / "back.h5"
    assert import_jsonl(path, back) == 18
    assert validate(back) == []
    assert columns(back) == columns(run.trajectories)


def test_every_float32_survives_the_way_through_text(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**31, 20000, dtype=np.uint32) | np.uint32(1 << 31)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.float32([-0.0, -1e-45, -3.4028235e38, -0.1])])
    from array import array

    from megaflow_hpc.trajectory import TokenSequence

    one = TokenSequence(
        "p",
        array("i", range(len(values))),
        array("f", values.tobytes()),
        array("B", [1] * len(values)),
        array("i", [0] * len(values)),
    )
    run = run_dir(tmp_path / "run")
    commit(run, "a", (0, 0, trajectory(0, sequences=[one], turns=[])))
    (path,) = export(run, tmp_path, "jsonl")["jsonl"]
    import_jsonl(path, tmp_path / "back.h5")
    with open_trajectories(tmp_path / "back.h5") as store:
        assert store[0].sequences[0].logprobs.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"in\.jsonl:2: not a trajectory of megaflow-hpc"),
        ("[]", r"in\.jsonl:2: not a trajectory"),
        ('{"id": "x"}', r"in\.jsonl:2: not a trajectory .*it lacks .task_id"),
        ("AGAIN", r"in\.jsonl:2: task/default/2 occurs twice"),
        ("LONGER", r"in\.jsonl:2: not a trajectory .*columns of"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(run, tmp_path, line, message):
    (path,) = export(run, tmp_path / "out", "jsonl", where="id == 'task/default/2'")["jsonl"]
    good = path.read_text()
    longer = json.loads(good) | {"id": "other"}
    longer["sequences"][0]["tokens"].append(1)
    source = tmp_path / "in.jsonl"
    source.write_text(good + {"AGAIN": good, "LONGER": json.dumps(longer)}.get(line, line))
    with pytest.raises(ConfigError, match=message):
        import_jsonl(source, tmp_path / "back.h5")
    assert [p.name for p in tmp_path.iterdir() if "back" in p.name] == []


def test_a_torn_compressed_file_is_said_to_be(run, tmp_path):
    (path,) = export(run, tmp_path, "jsonl", compress="gz")["jsonl"]
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="ends early"):
        import_jsonl(path, tmp_path / "back.h5")


# --- Parquet ---


@pytest.fixture(scope="module")
def parquet(run, tmp_path_factory):
    return export(run, tmp_path_factory.mktemp("parquet"), "parquet")["parquet"][0]


def float32(value):
    return None if value is None else float(np.float32(value))


def test_parquet_holds_everything(parquet, rollouts):
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(parquet).to_pylist()
    assert [row["id"] for row in rows] == [t.id for t in rollouts]
    for row, t in zip(rows, rollouts, strict=True):
        assert (row["status"], row["sample_index"], row["started_at"]) == (t.status, t.sample_index, t.started_at)
        assert row["reward"] == pytest.approx(math.nan if t.reward is None else t.reward, nan_ok=True)
        assert row["rewards"]["tests"] == pytest.approx(t.rewards.get("tests", math.nan), nan_ok=True)
        for got, s in zip(row["sequences"], t.sequences, strict=True):
            assert got["tokens"] == list(s.tokens)
            assert np.array(got["logprobs"], np.float32).tobytes() == s.logprobs.tobytes()
            assert bytes(got["loss_mask"]) == s.loss_mask.tobytes()
            assert got["weight_versions"] == list(s.weight_versions)
        assert [turn["token_end"] for turn in row["turn_list"]] == [turn.token_end for turn in t.turns]
        assert [(a["name"], a["data"]) for a in row["artifacts"]] == [(a.name, a.data) for a in t.artifacts]
        if t.task_id == "task":
            assert json.loads(row["messages"]) == t.messages


def test_pandas_polars_and_duckdb_read_the_parquet_file(parquet, rollouts):
    import duckdb
    import pandas
    import polars

    solved = sum(t.reward == 1 for t in rollouts)
    frame = pandas.read_parquet(parquet)
    assert (len(frame), (frame["reward"] == 1).sum()) == (18, solved)
    assert frame["sequences"][2][0]["tokens"].tolist() == list(rollouts[2].sequences[0].tokens)
    table = polars.read_parquet(parquet)
    assert (table.height, table.filter(polars.col("reward") == 1).height) == (18, solved)
    assert table["sequences"][2][0]["tokens"] == list(rollouts[2].sequences[0].tokens)
    query = f"select count(*), sum(len(s.tokens)) from (select unnest(sequences) as s from '{parquet}')"
    count, tokens = duckdb.connect().execute(query).fetchall()[0]
    assert count == sum(len(t.sequences) for t in rollouts)
    assert tokens == sum(len(s.tokens) for t in rollouts for s in t.sequences)


def test_hugging_face_datasets_read_the_parquet_file(parquet, rollouts, tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    import datasets

    found = datasets.Dataset.from_parquet(str(parquet), cache_dir=str(tmp_path / "cache"))
    assert (len(found), found["id"][3]) == (18, rollouts[3].id)
    (sequence, *_) = found[2]["sequences"]
    assert sequence["tokens"] == list(rollouts[2].sequences[0].tokens)
    assert np.array(sequence["logprobs"], np.float32).tobytes() == rollouts[2].sequences[0].logprobs.tobytes()
    assert found.filter(lambda row: row["reward"] == 1).num_rows == sum(t.reward == 1 for t in rollouts)


# --- trainers ---


def trained(rollouts):
    return [(t, s) for t in rollouts for s in t.sequences]


def test_verl_rows_pad_to_its_batch(run, rollouts, tmp_path):
    import pyarrow.parquet

    (path,) = export(run, tmp_path, "verl")["verl"]
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert len(rows) == len(trained(rollouts))
    batch = verl.proto(rows, pad_token_id=99)
    width = batch["prompts"].shape[1]
    for line, (t, s) in enumerate(trained(rollouts)):
        begin = list(s.loss_mask).index(1)
        assert batch["input_ids"][line][batch["attention_mask"][line] == 1].tolist() == list(s.tokens)
        assert batch["prompts"][line, width - begin :].tolist() == list(s.tokens[:begin])
        length = len(s.tokens) - begin
        assert batch["response_mask"][line].sum() == sum(s.loss_mask)
        sampled = np.array(s.loss_mask[begin:]) == 1
        logprobs = batch["rollout_log_probs"][line, :length]
        assert logprobs[sampled].tobytes() == np.array(s.logprobs, np.float32)[begin:][sampled].tobytes()
        assert not logprobs[~sampled].any()
        assert batch["position_ids"][line, width - begin : width + length].tolist() == list(range(len(s.tokens)))
        assert batch["rm_scores"][line].sum() == t.reward == batch["rm_scores"][line, length - 1]
        assert (batch["uid"][line], batch["__num_turns__"][line]) == (t.group_id, len(t.turns))
    assert {name: str(batch[name].dtype) for name in ("input_ids", "position_ids", "rollout_log_probs")} == {
        "input_ids": "int64",
        "position_ids": "int64",
        "rollout_log_probs": "float32",
    }
    assert rows[0]["prompt"] == [{"role": "system", "content": "help"}, {"role": "user", "content": "mend it"}]
    assert (rows[0]["data_source"], rows[0]["reward_model"]["ground_truth"]) == ("sample", "task")
    assert {(row["min_global_steps"], row["max_global_steps"]) for row in rows} == {(3, 3)}


def test_areal_rows_pad_to_its_batch(run, rollouts, tmp_path):
    import pyarrow.parquet

    (path,) = export(run, tmp_path, "areal")["areal"]
    rows = pyarrow.parquet.read_table(path).to_pylist()
    batch = areal.tensors(rows)
    assert set(batch) == {"input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards"}
    assert len({batch[name].shape for name in batch if name != "rewards"}) == 1
    for line, (t, s) in enumerate(trained(rollouts)):
        inside = batch["attention_mask"][line]
        assert inside.sum() == len(s.tokens)
        assert batch["input_ids"][line][inside].tolist() == list(s.tokens)
        assert batch["loss_mask"][line][inside].tolist() == list(s.loss_mask)
        assert batch["versions"][line][inside].tolist() == list(s.weight_versions)
        assert batch["logprobs"][line][inside].tobytes() == np.nan_to_num(np.array(s.logprobs, np.float32)).tobytes()
        assert (batch["rewards"][line], rows[line]["trajectory"], rows[line]["group"]) == (t.reward, t.id, t.group_id)


def test_trainers_read_one_role_of_a_team_with_its_own_reward(tmp_path):
    """Two roles of one policy and one of another, in three sequences."""
    import pyarrow.parquet

    run = run_dir(tmp_path / "run")
    players = [("writer", "a"), ("checker", "b"), ("planner", "a")]
    own = []
    for number in (5, 8):
        one = trajectory(number, rewards={"reward": 1.0, "right": 0.25 * number})
        three = [trajectory(n).sequences[0] for n in (number, number + 6, number + 9)]
        one.sequences = [replace(three[n], policy=policy, images=[]) for n, (_, policy) in enumerate(players)]
        one.turns = [
            Turn(n, len(s.tokens) - 1, len(s.tokens), policy=s.policy, role=players[n][0])
            for n, s in enumerate(one.sequences)
        ]
        own.append(one)
    commit(run, "a", *((0, 0, one) for one in own))
    written = export(run, tmp_path, "verl", "areal")
    for name, reward, pad in (("verl", "reward_score", verl.proto), ("areal", "rewards", areal.tensors)):
        rows = pyarrow.parquet.read_table(written[name][0]).to_pylist()
        assert [(row["role"], row["policy"]) for row in rows] == players * 2
        chosen = [{**row, reward: row["named_rewards"]["right"]} for row in rows if row["role"] == "checker"]
        batch = pad(chosen)
        for line, one in enumerate(own):
            assert batch["input_ids"][line][batch["attention_mask"][line] == 1].tolist() == list(
                one.sequences[1].tokens
            )
        scores = batch["rm_scores"].sum(axis=1) if name == "verl" else batch["rewards"]
        assert scores.tolist() == [one.rewards["right"] for one in own]


# --- images ---


def test_every_format_carries_images_in_its_own_form(run, rollouts, tmp_path):
    import pyarrow.parquet

    made = export(run, tmp_path, "parquet", "verl", "areal", "atif", "harbor", "inspect", "traces")
    shown = rollouts[SHOWING]
    (asked,) = shown_images(shown.messages)
    asked = shown.images[asked]
    spans = [[(span.start, span.length, shown.images[span.image].data) for span in s.images] for s in shown.sequences]
    assert sum(map(len, spans)) > 3

    (row,) = (row for row in pyarrow.parquet.read_table(made["parquet"][0]).to_pylist() if row["id"] == shown.id)
    assert {one["sha256"]: one["data"] for one in row["images"]} == {n: i.data for n, i in shown.images.items()}
    assert [(one["sequence"], one["start"], one["image"]) for one in row["image_spans"]] == [
        (number, span.start, span.image) for number, s in enumerate(shown.sequences) for span in s.images
    ]
    for name, column in (("verl", "sequence_images"), ("areal", "images")):
        rows = pyarrow.parquet.read_table(made[name][0]).to_pylist()
        own = [row for row in rows if shown.id in (row.get("trajectory"), row.get("extra_info", {}).get("trajectory"))]
        assert [[(i["start"], i["length"], i["bytes"]) for i in row[column]] for row in own] == spans
        assert all(not row[column] for row in rows if row not in own)
    row = next(row for row in pyarrow.parquet.read_table(made["verl"][0]).to_pylist() if row["images"])
    assert row["images"] == [{"bytes": asked.data}]
    assert [message["content"].count("<image>") for message in row["prompt"]] == [0, 1]

    folder = made["atif"][0] / "task" / "default"
    steps = json.loads((folder / f"{SHOWING}.json").read_text())["steps"]
    assert steps[1]["message"][0] == {"type": "text", "text": "look"}
    assert (folder / steps[1]["message"][1]["source"]["path"]).read_bytes() == asked.data
    assert next(made["harbor"][0].rglob(f"agent/images/{asked.file_name}")).read_bytes() == asked.data
    with zipfile.ZipFile(made["inspect"][0] / "default.eval") as log:
        sample = json.loads(log.read(f"samples/task_epoch_{SHOWING + 1}.json"))
    assert sample["messages"][1]["content"][1] == {"type": "image", "image": asked.url}
    (trace,) = made["traces"][0].glob(f"task__default__{SHOWING}.jsonl")
    assert json.loads(trace.read_text().splitlines()[2])["message"]["content"] == f"look\n{asked.label}"


# --- ATIF ---


def test_atif_steps_hold_messages_tools_and_calls(run, rollouts, tmp_path):
    (folder,) = export(run, tmp_path, "atif")["atif"]
    assert len(list(folder.rglob("*.json"))) == 18
    document = json.loads((folder / "task/default/5.json").read_text())
    assert (document["schema_version"], document["trajectory_id"]) == ("ATIF-v1.7", "task/default/5")
    assert [step["source"] for step in document["steps"]] == ["system", "user", "agent", "agent"]
    call = document["steps"][2]
    assert call["tool_calls"] == [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}]
    assert call["observation"]["results"][0]["source_call_id"] == "c1"
    assert call["reasoning_content"] == "let me see"
    t = rollouts[5]
    assert call["metrics"]["completion_token_ids"] == list(
        t.sequences[0].tokens[t.turns[0].token_start : t.turns[0].token_end]
    )
    lost = json.loads((folder / "lost/default/0.json").read_text())
    assert lost["steps"][0]["message"] == "no conversation was recorded (failed)"
    assert (lost["extra"]["reward"], lost["extra"]["status"]) == (None, "failed")


@pytest.mark.slow  # if Harbor is not installed yet
def test_harbors_own_models_take_every_atif_document(run, tmp_path):
    """Run in Harbor's virtual environment, which needs a newer Python. The launcher creates it if it is missing."""
    launcher = LAUNCHERS / "harbor-env.sh"
    made = subprocess.run(["bash", launcher], capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    (folder,) = export(run, tmp_path, "atif")["atif"]
    code = (
        "import sys, pathlib\n"
        "from harbor.models.trajectories import Trajectory\n"
        "from harbor.utils.trajectory_validator import TrajectoryValidator\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).rglob('*.json')):\n"
        "    document = Trajectory.model_validate_json(path.read_text())\n"
        "    validator = TrajectoryValidator()\n"
        "    assert validator.validate(path), (path, validator.errors)\n"
        "    print(document.trajectory_id, len(document.steps))\n"
    )
    python = made.stdout.split()[-1]
    result = subprocess.run([python, "-c", code, folder], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found = dict(line.split() for line in result.stdout.splitlines())
    assert len(found) == 18
    assert [found[f"{task}/default/1"] for task in ("task", "nul", "lost")] == ["4", "4", "1"]


# --- viewers: Harbor jobs, Inspect logs, traces ---


@pytest.mark.slow  # if Harbor is not installed yet
def test_harbors_viewer_reads_every_trial(run, tmp_path, harbor_python):
    (folder,) = export(run, tmp_path, "harbor")["harbor"]
    code = (
        "import sys, json, pathlib\n"
        "from harbor.viewer.scanner import JobScanner\n"
        "from harbor.models.trajectories import Trajectory\n"
        "scanner = JobScanner(pathlib.Path(sys.argv[1]))\n"
        "(job,) = scanner.list_jobs()\n"
        "result, config = scanner.get_job_result(job), scanner.get_job_config(job)\n"
        "assert result and config\n"
        "trials = [scanner.get_trial_result(job, name) for name in scanner.list_trials(job)]\n"
        "assert all(scanner.get_trial_config(job, trial.trial_name) for trial in trials)\n"
        "for path in pathlib.Path(sys.argv[1]).rglob('trajectory.json'):\n"
        "    Trajectory.model_validate_json(path.read_text())\n"
        "rewards = {t.trial_name: (t.verifier_result and t.verifier_result.rewards) for t in trials}\n"
        "print(json.dumps([result.n_total_trials, result.stats.n_errored_trials, rewards]))\n"
    )
    done = subprocess.run([harbor_python, "-c", code, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    count, errors, rewards = json.loads(done.stdout.splitlines()[-1])
    with open_trajectories(run.trajectories) as store:
        assert count == len(rewards) == len(store)
        assert errors == sum(bool(row.error_kind) for row in store)
        assert rewards["task__default__1"]["reward"] == store["task/default/1"].reward
    notes = folder / "sample" / "task__default__1" / "artifacts"
    assert sorted(path.name for path in notes.iterdir()) == ["fix.patch", "notes.txt"]


def test_a_trial_of_harbor_has_the_times_of_its_known_phases(run, tmp_path):
    (folder,) = export(run, tmp_path, "harbor")["harbor"]
    without_sandbox = json.loads((folder / "sample" / "nul__default__1" / "result.json").read_text())
    assert "environment_setup" not in without_sandbox
    began, ended = (datetime.fromisoformat(at) for at in without_sandbox["agent_execution"].values())
    assert (began.isoformat(), (ended - began).total_seconds()) == (without_sandbox["started_at"][:-1] + "+00:00", 2.0)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the environment may have to be made
def test_inspect_reads_every_sample_and_its_messages(run, tmp_path, viewers_python):
    (folder,) = export(run, tmp_path, "inspect")["inspect"]
    assert [path.name for path in folder.iterdir()] == ["default.eval"]
    code = (
        "import sys, json\n"
        "from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries\n"
        "log = read_eval_log(sys.argv[1])\n"
        "assert len(read_eval_log_sample_summaries(sys.argv[1])) == len(log.samples)\n"
        "sample = next(s for s in log.samples if (s.id, s.epoch) == ('task', 2))\n"
        "event = sample.events[-1]\n"
        "print(json.dumps([log.status, log.eval.dataset.samples, len(log.samples), log.results.total_samples,\n"
        "  [m.role for m in sample.messages], sample.messages[2].tool_calls[0].arguments,\n"
        "  sample.scores['reward'].value, len(event.input), event.output.completion]))\n"
    )
    command = [viewers_python, "-c", code, folder / "default.eval"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    status, tasks, samples, total, roles, arguments, reward, asked, answer = json.loads(done.stdout.splitlines()[-1])
    assert (status, tasks, samples, total) == ("success", 3, 18, 18)
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert arguments == {"command": "ls"}
    with open_trajectories(run.trajectories) as store:
        assert reward == store["task/default/1"].reward
    assert (asked, answer) in ((2, ""), (4, "done"))


def test_deep_arguments_and_impossible_times_do_not_end_an_export(tmp_path):
    run = run_dir(tmp_path / "run")
    deep = ["[" * 100_000, '{"a":' * 20_000 + "1" + "}" * 20_000, '{"a":' * 200 + "1" + "}" * 200]
    calls = [{"id": "c", "function": {"name": "f", "arguments": text}} for text in deep]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    commit(run, "a", (0, 0, trajectory(1, messages=messages, started_at=-1e18, finished_at=1e18)))
    gather(run)
    made = export(run, tmp_path / "out", "traces", "harbor", "inspect", "atif")
    (path,) = made["traces"][0].glob("*.jsonl")
    answer = json.loads(path.read_text().splitlines()[-1])["message"]
    assert [call["function"]["arguments"] for call in answer["toolCalls"]] == deep


def without_ids(number: int, *lines: str) -> Trajectory:
    """A rollout with two calls of an endpoint that reports no token ids."""
    turns = [Turn(-1, 0, 0, "stop", 0.5, policy="default", message=message) for message in (2, 4)]
    calls = Artifact(CALLS_FILE, "".join(f"{line}\n" for line in lines).encode())
    return trajectory(number, messages=TALK, sequences=[], turns=turns, artifacts=[calls])


def test_exports_count_the_tokens_of_endpoints_that_report_no_ids(tmp_path):
    run = run_dir(tmp_path / "run")
    strange = ["[1]", "{", "[" * 10**5, '{"asked": "a"}', '{"tokens": 3}']
    strange += ['{"tokens": [1, "x"]}', '{"tokens": [1e400, 2]}']
    rented = without_ids(0, '{"tokens": [100, 20]}', '{"tokens": [150, -3]}')
    commit(run, "a", (0, 0, rented), *((0, 0, without_ids(n, *[line] * 2)) for n, line in enumerate(strange, 1)))
    written = export(run, tmp_path / "out", "harbor", "inspect", "atif")
    used = {}
    for file in written["harbor"][0].glob("*/*/result.json"):
        trial = json.loads(file.read_text())
        used[trial["agent_result"]["metadata"]["rollout"]] = trial["agent_result"]
    assert (used[rented.id]["n_input_tokens"], used[rented.id]["n_output_tokens"]) == (250, 20)
    assert [used[f"task/default/{n}"]["n_input_tokens"] for n in range(1, len(strange) + 1)] == [0] * len(strange)
    with zipfile.ZipFile(written["inspect"][0] / "default.eval") as log:
        sample = json.loads(log.read("samples/task_epoch_1.json"))
        header = json.loads(log.read("header.json"))
    usage = {"input_tokens": 250, "output_tokens": 20, "total_tokens": 270}
    assert sample["model_usage"] == header["stats"]["model_usage"] == {"default": usage}
    assert [event["output"]["usage"]["input_tokens"] for event in sample["events"]] == [100, 150]
    document = json.loads((written["atif"][0] / "task" / "default" / "0.json").read_text())
    assert document["final_metrics"] == {"total_prompt_tokens": 250, "total_completion_tokens": 20, "total_steps": 4}
    assert [step["metrics"].get("prompt_tokens") for step in document["steps"] if "metrics" in step] == [100, 150]


def test_traces_have_the_shape_of_the_hubs_session_format(run, tmp_path):
    """Check the fields that the page on the Session Trace Simple Format requires, and that datasets takes the files for
    traces."""
    (folder,) = export(run, tmp_path, "traces")["traces"]
    assert (folder / "README.md").read_text().startswith("---\n")
    paths = sorted(folder.glob("*.jsonl"))
    for path in paths:
        session, *messages = [json.loads(line) for line in path.read_text().splitlines()]
        assert session["type"] == "session"
        assert session["harness"]
        assert session["id"]
        for line in messages:
            assert line["type"] == "message"
            message = line["message"]
            assert message["role"] in ("user", "assistant", "system", "tool")
            assert isinstance(message["content"], str)
            for call in message.get("toolCalls", ()):
                assert isinstance(call["function"]["arguments"], str)
    assert len(paths) >= 18
    import datasets
    from datasets.packaged_modules.json.json import has_agent_traces_markers, parse_traces_info

    path = folder / "task__default__1.jsonl"
    found = datasets.load_dataset("json", data_files=[str(path)], split="train", parse_agent_traces=False)
    assert has_agent_traces_markers(found.features)
    _, session_id, prompt, _, prompts, _ = parse_traces_info(path.read_text().splitlines())
    assert (session_id, prompt, prompts) == ("task/default/1", "mend it", 1)
    calls = [call for line in found for call in (line["message"] or {}).get("toolCalls") or ()]
    assert calls[0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}


# --- SWE-bench ---


def test_predictions_are_one_file_per_policy_and_sample(run, tmp_path):
    said: list[str] = []
    paths = export(run, tmp_path, "preds", where="task == 'task' and sample in [1, 2]", warn=said.append)["preds"]
    assert [path.name for path in paths] == ["preds-default-1.json", "preds-default-2.json"]
    found = {"instance_id": "task", "model_name_or_path": "default", "model_patch": ""}
    assert [line.partition(" which")[0] for line in said] == [
        "task/default/1: fix.patch is not UTF-8 (byte 0xff at 12),",
        "no patch in 1 of 2 trajectories, such as task/default/2: their predictions are empty",
    ]
    assert json.loads(paths[0].read_text()) == {"task": found}
    assert json.loads(paths[1].read_text())["task"]["model_patch"] == ""
    (path,) = export(run, tmp_path, "preds", where="sample == 0")["preds"]
    assert (path.name, sorted(json.loads(path.read_text()))) == ("preds.json", ["lost", "nul", "task"])


def predicted(folder, *artifacts: list[Artifact]) -> tuple[list[str], list[str]]:
    """The patches of the predictions for rollouts with these artifacts, and the warnings."""
    run = run_dir(folder / "run")
    commit(run, "a", *((n, 0, trajectory(n, artifacts=own)) for n, own in enumerate(artifacts)))
    warnings: list[str] = []
    paths = export(run, folder, "preds", warn=warnings.append)["preds"]
    return [json.loads(path.read_text())["task"]["model_patch"] for path in paths], warnings


def test_the_patch_of_the_last_step_is_predicted_and_an_incomplete_one_is_named(tmp_path):
    steps = [Artifact(f"steps/{name}/patch", name.encode()) for name in ("one", "two")]
    lacking = [Artifact("patch", b"x"), Artifact("patch.error", "error: unable to index 'ü'".encode())]
    patches, warnings = predicted(tmp_path, [Artifact("a.diff", b"x"), *steps], lacking, lacking[1:])
    assert patches == ["two", "x", ""]
    assert warnings == [f"task/default/{n}: patch is incomplete: error: unable to index 'ü'" for n in (1, 2)]


def test_rollouts_of_a_task_that_was_asked_again_have_files_of_their_own(tmp_path):
    run = run_dir(tmp_path / "run")
    again = trajectory(1, id="task@2/default/1", group_id="task@2/default", artifacts=[Artifact("patch", b"later")])
    commit(run, "a", (0, 0, trajectory(1, artifacts=[Artifact("patch", b"first")])), (1, 0, again))
    paths = export(run, tmp_path, "preds", "atif")
    patches = {path.name: json.loads(path.read_text())["task"]["model_patch"] for path in paths["preds"]}
    assert patches == {"preds-default-1.json": "first", "preds-default-1@2.json": "later"}
    names = {path.name: json.loads(path.read_text())["trajectory_id"] for path in paths["atif"][0].rglob("*.json")}
    assert names == {"1.json": "task/default/1", "1@2.json": "task@2/default/1"}


# --- all of them ---


def test_small_groups_write_the_same(run, tmp_path, monkeypatch):
    import pyarrow.parquet

    names = ("parquet", "verl", "areal")
    whole = {name: pyarrow.parquet.read_table(export(run, tmp_path / "a", name)[name][0]) for name in names}
    monkeypatch.setattr(exports, "GROUP_TOKENS", 100)
    for name in names:
        file = pyarrow.parquet.ParquetFile(export(run, tmp_path / "b", name)[name][0])
        assert file.num_row_groups > 3
        assert repr(file.read().to_pylist()) == repr(whole[name].to_pylist())


@pytest.mark.parametrize("gathered", [False, True])
def test_a_group_has_few_images(tmp_path, monkeypatch, gathered):
    """30 screenshots of a rollout take a thousand times the bytes of its tokens."""
    import pyarrow.parquet

    own = run_dir(tmp_path / "run")
    rollouts = [trajectory(n, sequences=[], turns=[]) for n in range(8)]
    for one in rollouts[:4]:
        shown = image(200, 150, one.sample_index)  # 30 kB
        one.images = {shown.sha256: shown}
    commit(own, "a", *((0, 0, one) for one in rollouts))
    monkeypatch.setattr(exports, "GROUP_TOKENS", 4500)
    path = gather(own) if gathered else own.path
    with open_trajectories(path) as store:
        (written,) = exports.export(store, ["parquet"], tmp_path / "out")["parquet"]
    file = pyarrow.parquet.ParquetFile(written)
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == [2, 6]


def test_a_failed_export_leaves_the_file_there_was(run, tmp_path, monkeypatch):
    before = {path: path.read_bytes() for path in export(run, tmp_path, "jsonl", "parquet")["jsonl"]}
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    for name in ("jsonl", "parquet"):
        with pytest.raises(OSError, match="no space left"):
            export(run, tmp_path, name)
    assert {path: path.read_bytes() for path in before} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_atif_directory_is_replaced_as_a_whole(run, tmp_path):
    export(run, tmp_path, "atif")
    (folder,) = export(run, tmp_path, "atif", where="sample == 0")["atif"]
    assert len(list(folder.rglob("*.json"))) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["atif"]
