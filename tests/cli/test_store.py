"""The verbs ``verify``, ``compact``, ``anonymise`` and ``du``."""

from __future__ import annotations

import json
import os
import shutil

import h5py
import pytest

from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.rundir.marks import FINISHED
from megaflow_hpc.trajectories import exports, gather, open_trajectories
from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OFFSETS
from megaflow_hpc.trajectory import Attempt
from megaflow_hpc.types import Artifact
from tests.support.samples import commit, run_dir, trajectory


@pytest.fixture
def run(tmp_path):
    """Make a gathered run of three rollouts: one with a superseded attempt, one with a log, one that names its user."""
    run = run_dir(tmp_path / "run")
    attempts = [Attempt(0, "failed", "node", "lost"), Attempt(1, "completed")]
    messages = [{"role": "user", "content": "cat /home/jane/notes"}]
    rollouts = [
        trajectory(3, attempt=1, attempts=attempts),
        trajectory(1, artifacts=[Artifact("agent.log", b"x" * 100), Artifact("patch.diff", b"y")]),
        trajectory(2, messages=messages, node="gpu-17.example.org"),
    ]
    commit(run, "a", *((0, 0, t) for t in rollouts))
    gather(run)
    return run


VERBS = [("compact",), ("anonymise",), ("du",), ("validate",)]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("json_", [False, True])
def test_a_file_that_is_none_of_ours_is_refused_by_name(refused, tmp_path, verb, json_):
    foreign = tmp_path / "notes.h5"
    foreign.write_text("no HDF5")
    more = ["-o", tmp_path / "copy.h5"] if verb[0] == "anonymise" else []
    for file, message in (
        (foreign, f"{foreign}: not an HDF5 file; expected a trajectories.h5 (see: megaflow-hpc gather RUN)"),
        (tmp_path / "no.h5", f"{tmp_path / 'no.h5'}: cannot be read (No such file or directory)"),
    ):
        assert message in refused(*verb, file, *more, *(["--json"] if json_ else []))
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["notes.h5"]


def test_another_format_and_a_newer_version_are_refused_with_what_was_expected(megaflow, refused, run, tmp_path):
    file = tmp_path / "other.h5"
    shutil.copy(run.trajectories, file)
    with h5py.File(file, "r+") as content:
        content.attrs["format_version"] = 99
    result = megaflow("validate", file)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{file}: format_version" in result.stderr
    assert "use the megaflow-hpc that wrote it" in result.stderr
    with h5py.File(file, "r+") as content:
        content.attrs["format"] = "another"
    assert f"{file}: format 'another', expected 'megaflow-hpc/trajectories'" in refused("du", file)


def test_a_run_stands_for_its_file_as_soon_as_it_is_gathered(megaflow, refused, run, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    copies = (str(tmp_path / f"copy-{number}.h5") for number in range(9))
    for verb, *_ in VERBS:
        more = ["-o", next(copies)] if verb == "anonymise" else []
        for words in (run, "latest"):
            result = megaflow(verb, words, *(more and ["-o", next(copies)]))
            assert result.returncode == 0, result.stderr
    assert json.loads(megaflow("validate", run, "--json").stdout)["file"] == str(run.trajectories)
    assert not caplog.messages
    commit(run, "b", (0, 0, trajectory(7)))
    assert megaflow("validate", run).returncode == 0
    assert f"has stored more since; bring it up to date with: megaflow-hpc gather {run}" in caplog.messages[0]
    run.trajectories.unlink()
    for verb in ("validate", "compact", "anonymise"):
        assert f"{run}: was not gathered yet; write its trajectories.h5 with: megaflow-hpc gather {run}" in refused(
            verb, run, *(["-o", next(copies)] if verb == "anonymise" else [])
        )
    assert f"{tmp_path}: not a run directory" in refused("validate", tmp_path)
    assert megaflow("du", run).returncode == 0, "a run's bytes are there before"


def test_validate_lists_every_column_with_its_digest(megaflow, run):
    result = megaflow("validate", run.trajectories, "--digests")
    assert (result.returncode, result.stderr) == (0, "")
    valid, head, _, *rows = result.stdout.splitlines()
    assert valid == f"{run.trajectories}: valid"
    assert head.split() == ["column", "entries", "sha256"]
    stored = {*COLUMNS, *OFFSETS, "rewards/tests"}
    assert {row.split()[0] for row in rows} == stored
    assert all(row.split()[-1] == "ok" for row in rows)
    shown = json.loads(megaflow("validate", run.trajectories, "--digests", "--json").stdout)
    assert shown["file"] == str(run.trajectories)
    assert {column["path"] for column in shown["columns"]} == stored
    assert all(len(column["sha256"]) == 64 for column in shown["columns"])


def test_validate_says_which_column_is_damaged(megaflow, run):
    with h5py.File(run.trajectories) as file:
        chunk = file["tokens/id"].id.get_chunk_info(0)
    data = bytearray(run.trajectories.read_bytes())
    data[chunk.byte_offset] ^= 1
    run.trajectories.write_bytes(data)
    result = megaflow("validate", run.trajectories, "--digests", "--json")
    assert result.returncode == 1
    shown = json.loads(result.stdout)
    assert shown["problems"][0].startswith("/tokens/id: ")
    bad = [column for column in shown["columns"] if column["state"] != "ok"]
    assert [column["path"] for column in bad] == ["tokens/id"]


def test_compact_counts_what_it_drops(megaflow, run, tmp_path):
    output = tmp_path / "small.h5"
    result = megaflow("compact", run.trajectories, "--output", output, "--drop-artifacts", "*.log", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    shown = json.loads(result.stdout)
    assert (shown["attempts_dropped"], shown["artifacts_dropped"]) == (1, 1)
    assert (shown["bytes_before"], shown["bytes_after"]) == (
        run.trajectories.stat().st_size,
        output.stat().st_size,
    )
    with open_trajectories(output) as store:
        assert [a.name for a in store["task/default/1"].artifacts] == ["patch.diff"]
    printed = megaflow("compact", run)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert ["attempts", "dropped", "1"] in [line.split() for line in printed.stdout.splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        ("compact", "{run}", "-o", "{out}"),
        ("anonymise", "{run}", "-o", "{out}"),
        ("show", "{run}", "task/default/1", "--artifact", "agent.log", "-o", "{out}"),
        ("import", "{lines}", "-o", "{out}"),
    ],
    ids=lambda words: words[0],
)
def test_the_directory_of_an_output_file_is_made(megaflow, run, tmp_path, words):
    with open_trajectories(run.path) as store:
        (lines,) = exports.export(store, ("jsonl",), tmp_path / "exported")["jsonl"]
    out = tmp_path / "new" / "deep" / "out"
    result = megaflow(*(word.format(run=run.path, lines=lines, out=out) for word in words))
    assert result.returncode == 0, result.stderr
    assert out.is_file()


def test_journals_are_dropped_of_a_finished_run_only(refused, run):
    assert f"{run.trajectories}: --drop-journals is for a run directory" in refused(
        "compact", run.trajectories, "--drop-journals"
    )
    assert f"{run}: the campaign is not finished; its journals are still needed" in refused(
        "compact", run, "--drop-journals", "--json"
    )
    assert list(run.journal.iterdir())


def test_journals_go_for_good_only_after_a_yes(megaflow, refused, run, monkeypatch):
    write_json(run.path / FINISHED, {"by": "a.0"})
    size = sum(file.stat().st_size for file in run.journal.iterdir())
    compact = ("compact", run, "--drop-journals")
    shown = json.loads(megaflow(*compact, "--dry-run", "--json").stdout)
    assert shown == {"journals": 1, "journal_bytes": size, "dry_run": True}
    said = f"{run}: journal files: 1, {size / 1e6:.1f} MB"
    assert megaflow(*compact, "--dry-run", "--yes").stdout == megaflow(*compact, "--dry-run").stdout
    assert megaflow(*compact, "--dry-run").stdout == f"{said}, would be removed\n"
    ours, theirs = os.openpty()
    with open(os.devnull) as nobody, open(theirs) as terminal:
        monkeypatch.setattr("sys.stdin", nobody)
        assert "Confirm with --yes, since standard input is not a terminal" in refused(*compact)
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(ours, b"\n")
        result = megaflow(*compact)
        assert (result.returncode, result.stdout) == (1, "")
        assert f"{said}, will be lost" in result.stderr
        assert list(run.journal.iterdir())
        os.write(ours, b"y\n")
        assert megaflow(*compact).returncode == 0
    os.close(ours)
    assert list(run.journal.iterdir()) == []


def test_anonymise_writes_a_copy_without_names(megaflow, refused, run, tmp_path):
    copy = tmp_path / "copy.h5"
    result = megaflow("anonymise", run.trajectories, "-o", copy, "--name", "patch", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout) == {"trajectories": 3, "changed": 1, "without_tokens": 1, "images": 0}
    assert "read a few trajectories before sharing" in result.stderr
    with open_trajectories(copy) as store:
        row = store["task/default/2"]
        assert row.messages[0]["content"] == "cat /home/user/notes"
        assert (row.sequences, row.node) == ([], "node-1")
        assert [a.name for a in store["task/default/1"].artifacts] == ["agent.log", "user.diff"]
    kept = megaflow("anonymise", run.trajectories, "-o", copy, "--keep-tokens")
    assert ["without", "tokens", "0"] in [line.split() for line in kept.stdout.splitlines()]
    with open_trajectories(copy) as store:
        assert store["task/default/2"].sequences
    assert f"{copy}: is the input file; name another one" in refused("anonymise", copy, "-o", copy)


def test_du_prints_shares_that_add_up(megaflow, run):
    for path, name in ((run.trajectories, "tokens/id"), (run, "journal/")):
        result = megaflow("du", path)
        assert (result.returncode, result.stderr) == (0, "")
        rows = [line.split() for line in result.stdout.splitlines()]
        assert rows[0] == ["files", "MB", "raw/stored", "%"]
        assert name in [row[0] for row in rows]
        assert rows[-1][0] == "total"
        shown = json.loads(megaflow("du", path, "--json").stdout)
        assert shown["path"] == str(path)
        assert name in [share["name"] for share in shown["shares"]]
    assert sum(
        share["stored"] for share in json.loads(megaflow("du", run.trajectories, "--json").stdout)["shares"]
    ) == (run.trajectories.stat().st_size)
