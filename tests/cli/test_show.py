"""The verbs ``show`` and ``validate``."""

from __future__ import annotations

import base64
import json
import math
import os
import subprocess
import sys
from array import array
from pathlib import Path

import h5py
import pytest

from megaflow_hpc.cli.runs.show import token_lines
from megaflow_hpc.rundir.record import read_run, write_run
from megaflow_hpc.trajectories import gather, open_trajectories
from megaflow_hpc.trajectory import CALLS_FILE, TokenSequence, Turn, shown_images
from megaflow_hpc.types import Artifact
from tests.support.samples import commit, run_dir, trajectory


@pytest.fixture
def run(tmp_path):
    run = run_dir(tmp_path / "run")
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "repair [bold]it[/bold]"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "\x1b]0;evil\x07 \udcff\n" + "\n".join(f"line {n}" for n in range(200))},
    ]
    commit(
        run,
        "a",
        (0, 0, trajectory(5, messages=talk, cpu_s=12.25, memory_peak_mb=103.4)),
        (0, 0, trajectory(0, status="failed", error="node lost")),
    )
    return run


def test_show_counts_the_tokens_of_calls_without_ids(megaflow, tmp_path):
    run = run_dir(tmp_path / "run")
    turns = [Turn(-1, 0, 0, "stop", policy="default", message=message) for message in (1, -1)]
    calls = Artifact(CALLS_FILE, b'{"tokens": [100, 20]}\n{"tokens": [150, 30]}\n')
    commit(run, "a", (0, 0, trajectory(0, turns=turns, sequences=[], artifacts=[calls])))
    text = megaflow("show", run, "0").stdout
    assert "  tokens    250 of prompts and 50 sampled in 2 calls without token ids\n" in text
    assert "  100 prompt and 20 sampled tokens, no ids  stop" in text
    assert "0 in 0 sequences" not in text


def test_show_names_a_run_that_its_owner_keeps_private(refused, tmp_path):
    run = run_dir(tmp_path / "run")
    run.path.chmod(0)
    try:
        assert f"{run.path}: not readable for this user; its owner can share it" in refused("show", run, "0")
    finally:
        run.path.chmod(0o700)


def test_show_counts_sequences(megaflow, tmp_path):
    run = run_dir(tmp_path / "run")
    commit(run, "a", (0, 0, trajectory(1)))
    assert " in 1 sequence, " in megaflow("show", run, "task/default/1").stdout


@pytest.mark.parametrize("gathered", [False, True])
def test_show_names_images_and_writes_them_to_files(megaflow, refused, tmp_path, gathered):
    run, shown = run_dir(tmp_path / "run"), trajectory(4)
    commit(run, "a", (0, 0, shown))
    if gathered:
        gather(run)
    spans = shown.sequences[0].images
    text = megaflow("show", run, "0", "--tokens").stdout
    (asked,) = shown_images(shown.messages)
    assert f"\nlook\n{shown.images[asked].label}\n" in text
    placeholders = sum(span.length for span in spans)
    assert f"  images    {len(shown.images)}, shown {len(spans)} times with {placeholders} tokens" in text
    assert f"  [{spans[0].start}, {spans[0].end}) {shown.images[spans[0].image].label}\n" in text
    record = json.loads(megaflow("show", run, "0", "--json").stdout)
    assert [one["sha256"] for one in record["images"]] == list(shown.images)
    assert record["sequences"][0]["images"] == [list(span) for span in spans]
    written = megaflow("show", run, "0", "--images", tmp_path / "pictures").stdout.split()
    for path, image in zip(written, shown.images.values(), strict=True):
        assert (Path(path).name, Path(path).read_bytes()) == (f"{image.sha256}.png", image.data)
    assert "--images: not with --artifact" in refused("show", run, "0", "--images", tmp_path, "--artifact", "x")


@pytest.mark.parametrize("gathered", [False, True])
def test_show_prints_a_trajectory_for_a_person(megaflow, run, gathered):
    if gathered:
        gather(run)
    result = megaflow("show", run, "task/default/5")
    assert (result.returncode, result.stderr) == (0, "")
    for words in (
        "status    completed",
        "reward    1  (tests 0.5)",
        "node node-1, job 17_3",
        "2023-11-14 22:13:25 UTC, 0.2 s",
        "used      12.2 s of CPU, at most 103 MB of memory\n",
        "repair [bold]it[/bold]",
        '→ bash({"command": "ls"})',
        "\\x1b]0;evil\\x07 \\udcff",
        "… 171 lines folded (--full)",
        "model calls",
        "server-0",
    ):
        assert words in result.stdout
    assert "\x1b" not in result.stdout
    assert "line 100\n" not in result.stdout
    assert "line 100\n" in megaflow("show", run, "task/default/5", "--full").stdout
    assert "node lost" in megaflow("show", run, "1").stdout


def test_show_prints_an_artifact_and_by_itself_why_there_is_no_reward(megaflow, refused, tmp_path, monkeypatch):
    run = run_dir(tmp_path / "run")
    log = "".join(f"line {n}\n" for n in range(100)).encode() + b"\x1b[31mAssertionError\xff\n"
    failed = {"reward": 0.0, "artifacts": [Artifact("patch", b"\x1b\x00\xff"), Artifact("verifier.log", log)]}
    broken = {"reward": None, "status": "failed", "error_kind": "verifier", "artifacts": failed["artifacts"]}
    for number, changes in enumerate((failed, broken, {**failed, "reward": 1.0}, {"artifacts": []})):
        commit(run, f"p{number}", (0, 0, trajectory(number, **changes)))
    for rollout in ("task/default/0", "task/default/1"):
        shown = megaflow("show", run, rollout).stdout
        assert "artifact  verifier.log, " in shown
        assert "… 81 lines before (--artifact verifier.log)\n  line 81\n" in shown
        assert shown.endswith("  \\x1b[31mAssertionError\\udcff\n")
        assert "  line 0\n" in megaflow("show", run, rollout, "--full").stdout
    assert "line 99" not in megaflow("show", run, "task/default/2", "--full").stdout
    words = ("show", run, "task/default/2", "--artifact")
    copy = tmp_path / "copy"
    assert megaflow(*words, "patch", "-o", copy).stdout == f"{copy}\n"
    assert copy.read_bytes() == b"\x1b\x00\xff"
    piped = [sys.executable, "-m", "megaflow_hpc", *map(str, words), "patch"]
    assert subprocess.check_output(piped) == b"\x1b\x00\xff"
    found = json.loads(megaflow(*words, "patch", "--json").stdout)
    assert (found["bytes"], base64.b64decode(found["base64"])) == (3, b"\x1b\x00\xff")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert megaflow(*words, "patch").stdout == "\\x1b\\x00\\udcff\n"
    assert "task/default/2: no artifact 'nowhere'; there are: patch, verifier.log" in refused(*words, "nowhere")
    assert "there are: none" in megaflow("show", run, "task/default/3", "--artifact", "patch").stderr
    assert "--output: only with --artifact NAME" in megaflow("show", run, "0", "-o", copy).stderr


def test_show_tokens_prints_every_id_with_its_logprob(megaflow, run):
    result = megaflow("show", run, "task/default/5", "--tokens")
    for sequence in trajectory(5).sequences:
        for token, logprob, mask in zip(sequence.tokens, sequence.logprobs, sequence.loss_mask, strict=True):
            assert f" {token}:{logprob:.4f}" in result.stdout if mask else f" {token}" in result.stdout


def tokenizer(path, byte_level=True):
    """Make a tokenizer.json in which the ids of ``sampled_and_prompt`` have a meaning."""
    pieces = ["Ġthe", "Ċ", "Ã", "¼"] if byte_level else ["▁the", "<0x0A>", "<0xC3>", "<0xBC>"]
    path.parent.mkdir(parents=True, exist_ok=True)
    decoder = {"type": "ByteLevel"} if byte_level else {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}
    added = [{"id": 9, "content": "<|im_end|>", "special": True}]
    model = {"type": "BPE", "vocab": {piece: number for number, piece in enumerate(pieces)}}
    path.write_text(json.dumps({"model": model, "decoder": decoder, "added_tokens": added}))
    return path


@pytest.mark.parametrize("byte_level", [True, False])
def test_show_tokens_says_what_ids_mean_where_a_tokenizer_is_at_hand(megaflow, refused, tmp_path, byte_level):
    run = run_dir(tmp_path / "run")
    ids = [0, 1, *[0] * 200, 2, 3, 9, 77]
    mask = [0] * 202 + [1] * 4
    logprobs = [math.nan] * 202 + [-0.01, -1.5, -3.0, -9.0]
    columns = array("i", ids), array("f", logprobs), array("B", mask), array("i", [4 if m else -1 for m in mask])
    commit(run, "a", (0, 0, trajectory(5, sequences=[TokenSequence("default", *columns)], turns=[])))
    gather(run)
    alone = megaflow("show", run, "0", "--tokens")
    assert "ids only: no tokenizer of its model was found; name one with --tokenizer PATH" in alone.stdout
    assert " 3:-1.5000 9:-3.0000 77:-9.0000\n" in alone.stdout
    assert "‹" not in alone.stdout
    given = megaflow("show", run, "0", "--tokens", "--tokenizer", tokenizer(tmp_path / "tokenizer.json", byte_level))
    model = tokenizer(tmp_path / "model" / "tokenizer.json", byte_level).parent
    planned = read_run(run)
    planned.versions = {"models": {"default": {"engine": "vllm", "path": str(model)}}}
    write_run(run, planned)
    gather(run, rebuild=True)
    for shown in (given, megaflow("show", run, "0", "--tokens"), megaflow("show", run.trajectories, "0", "--tokens")):
        assert "[202, 206) sampled, loss mask 1, weights 4\n" in shown.stdout
        assert " 2:-0.0100 ‹\\udcc3›  3:-1.5000 ‹\\udcbc›  9:-3.0000 ‹<|im_end|>›  77:-9.0000 ‹?›" in shown.stdout
        assert " 0 ‹ the›  1 ‹\\n›  0 ‹ the›" in shown.stdout
        assert "… 74 tokens folded (--full)" in shown.stdout
    assert megaflow("show", run, "0", "--tokens", "--full").stdout.count("0 ‹ the›") == 201
    assert "nowhere: no tokenizer.json to read token ids with" in refused(
        "show", run, "0", "--tokens", "--tokenizer", tmp_path / "nowhere"
    )


def test_sampled_tokens_are_coloured_by_their_probability(tmp_path):
    run = run_dir(tmp_path / "run")
    logprobs = [math.nan, math.log(0.6), math.log(0.2), math.log(0.02), math.log(0.002)]
    columns = array("i", range(5)), array("f", logprobs), array("B", [0, 1, 1, 1, 1]), array("i", [-1, 3, 3, 3, 3])
    commit(run, "a", (0, 0, trajectory(5, sequences=[TokenSequence("default", *columns)], turns=[])))
    with open_trajectories(run.path) as store:
        lines = [line for line in token_lines(store, store[0], False, None) if line.plain.startswith("    ")]
    styles = [(line.plain[s.start : s.end].strip(), str(s.style)) for line in lines for s in line.spans]
    assert [(cell.partition(":")[0], style) for cell, style in styles] == [
        ("0", "dim"),
        ("1", "green"),
        ("2", "yellow"),
        ("3", "dark_orange"),
        ("4", "red"),
    ]


def test_show_json_is_strict_and_whole(megaflow, run):
    def refuse(constant):
        raise AssertionError(constant)

    result = megaflow("show", run, "task/default/5", "--tokens", "--json")
    shown = json.loads(result.stdout, parse_constant=refuse)
    expected = trajectory(5)
    assert shown["id"] == "task/default/5"
    assert shown["messages"][2]["content"].startswith("\x1b]0;evil\x07 \udcff")
    assert [s["tokens"] for s in shown["sequences"]] == [list(s.tokens) for s in expected.sequences]
    assert shown["artifacts"] == [{"name": "patch.diff", "bytes": 5}]
    assert len(shown["turns"]) == len(expected.turns)
    failed = json.loads(megaflow("show", run, "1", "--json").stdout, parse_constant=refuse)
    assert (failed["status"], failed["reward"], "tokens" in failed) == ("failed", None, False)


def test_show_works_on_a_terminal_without_utf8(run):
    command = [sys.executable, "-m", "megaflow_hpc", "show", str(run), "task/default/5"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60, env=environment)
    assert result.returncode == 0
    assert "\\u2192 bash" in result.stdout


def test_an_unknown_id_is_answered_with_those_there_are(megaflow, run, tmp_path):
    result = megaflow("show", run, "task/default/55")
    assert result.returncode == 2
    assert "no trajectory 'task/default/55' among 2; there are: task/default/5" in result.stderr
    result = megaflow("show", tmp_path / "nowhere", "x")
    assert result.returncode == 2
    assert "cannot be read" in result.stderr


def test_validate_says_what_is_wrong(megaflow, refused, run):
    path = gather(run)
    good = megaflow("validate", path)
    assert (good.returncode, good.stdout) == (0, f"{path}: valid\n")
    with h5py.File(path, "r+") as file:
        file["tokens/loss_mask"][0] = 2
    bad = megaflow("validate", path)
    assert bad.returncode == 1
    assert f"{path}: /tokens/loss_mask: row 0: neither 0 nor 1" in bad.stdout
    shown = json.loads(megaflow("validate", path, "--json").stdout)
    assert (shown["valid"], len(shown["problems"])) == (False, 1)
    path.write_text("no HDF5")
    assert "not an HDF5 file" in refused("validate", path)
