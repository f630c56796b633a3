"""Task sets by name, imported from a local server and from directories."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megaflow_hpc.cli import main
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.sets import competition, converters, download
from megaflow_hpc.tasks.sets.download import task_sets
from megaflow_hpc.types import Task
from tests.support.places import ROOT
from tests.support.requirements import required
from tests.support.set_mirror import SHA, Mirror, mirror

LINES = [
    {
        "instance_id": f"org__lib-{number}",
        "repo": "org/lib",
        "problem_statement": "It is wrong." if number else "",
        "FAIL_TO_PASS": ["tests/test_a.py::test_new"],
        "PASS_TO_PASS": [],
        "base_commit": "abc",
        "version": "1.0",
        "patch": "p" * 2000,
        "test_patch": "t",
    }
    for number in range(3)
]


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mirror]:
    """A mirror of SWE-Gym with three instances, one of which has no statement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.01)
    files = {"data/train-00000-of-00001.parquet": as_parquet(LINES), "README.md": b"read me"}
    with mirror("SWE-Gym/SWE-Gym", files) as server:
        yield server


def imports(*words: object) -> int:
    return main(["tasks", "import", *map(str, words)])


def test_a_set_is_downloaded_converted_and_recorded(
    gym: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    assert imports("swe-gym", "-o", tmp_path / "out", "--mirror", gym.url) == 0
    out, err = capsys.readouterr()
    assert "2 instances, tested by named: 2; 1 left out" in out
    assert "left out: swe-gym:1: problem_statement ''" in err
    tasks = load_tasks([str(tmp_path / "out" / "swe-gym.jsonl")], "/")
    assert [task.image for task in tasks] == [f"xingyaoww/sweb.eval.x86_64.org_s_lib-{n}:latest" for n in (1, 2)]
    record = json.loads((tmp_path / "out" / "swe-gym.source.json").read_text())
    assert (record["revision"], record["licence"], record["tasks"], len(record["left_out"])) == (SHA, "MIT", 2, 1)
    files = [(file["path"], len(file["sha256"])) for file in record["files"]]
    assert files == [("data/train-00000-of-00001.parquet", 64)]
    assert "secret" not in json.dumps(record) + out + err
    assert {authorization for _, _, authorization in gym.requests} == {None}, "a mirror gets no token"
    assert not any("README" in path for path, _, _ in gym.requests)
    before = len(gym.requests)
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    assert imports("swe-gym@main", "-o", tmp_path / "out", "--mirror", gym.url, "--strict") == 2
    assert "swe-gym:1: problem_statement ''" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir()), "--strict writes nothing"
    assert all(path.startswith("/api/") for path, _, _ in gym.requests[before:]), "the file is not downloaded again"
    monkeypatch.setenv("HF_ENDPOINT", gym.url)
    gym.requests.clear()
    assert imports("swe-gym", "-o", tmp_path / "out", "--mirror", f"{gym.url}/") == 0
    assert {authorization for _, _, authorization in gym.requests} == {"Bearer secret-token"}
    gym.status = 403
    assert imports("swe-gym", "-o", tmp_path / "new", "--mirror", f"{gym.url}/other") == 2


def test_a_download_that_breaks_off_continues_where_it_was(
    gym: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What arrived before a mirror stopped is kept for the next call, too."""
    words = ("swe-gym", "-o", tmp_path / "out", "--mirror", gym.url)
    gym.break_after = [700] + [0] * download.MAX_TRIES
    assert imports(*words) == 3
    assert "the connection ended early; repeat the command, or carry the files and use --from DIR" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    assert [asked for path, asked, _ in gym.requests if "resolve" in path][:2] == [None, "bytes=700-"]
    gym.requests.clear()
    gym.break_after = [300]
    assert imports(*words) == 0
    assert [asked for path, asked, _ in gym.requests if "resolve" in path] == ["bytes=700-", "bytes=1000-"]
    capsys.readouterr()


@pytest.mark.parametrize(
    "case",
    [
        ("swe-gym@v9", 0, False, 2, "swe-gym@v9: .* 404; there is no such version; name another one"),
        ("swe-gym", 404, False, 2, "swe-gym@main: .* 404; there is no such version"),
        ("swe-gym", 403, False, 2, "403; a server of --mirror does not get your HF_TOKEN: if it is .* HF_ENDPOINT"),
        ("swe-gym", 503, False, 3, "503; repeat the command"),
        ("swe-gym", 0, True, 3, "its SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}; nothing was kept"),
        ("swe-bench-lite", 0, False, 2, "swe-bench-lite@main: .* 404"),
        ("swe-gum", 0, False, 2, "swe-gum: no task set of this name; did you mean swe-gym"),
        ("multi-swe-bench", 0, False, 2, r"its licence \(other\) must be accepted.*--accept-licence"),
        ("livecodebench@release_v7", 0, False, 2, "no such release of LiveCodeBench, .*; the newest is release_v6"),
        ("livecodebench@v3_v2", 0, False, 2, "v3_v2: no such release"),
        ("nemotron-swe-v3", 0, False, 2, "nemotron-swe-v3: not read: conversations"),
    ],
)
def test_a_set_that_cannot_be_had_is_explained(
    gym: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: tuple[str, int, bool, int, str]
) -> None:
    words, gym.status, gym.wrong_digest, status, said = case
    assert imports(words, "-o", tmp_path / "out", "--mirror", gym.url) == status
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "downloading" not in line]
    assert re.search(said, line), line
    assert not (tmp_path / "out").exists()


def test_files_of_another_format_version_are_refused(
    gym: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, said in (
        (
            "data/train-0.parquet",
            as_parquet([{"question": "?", "answer": "!"}]),
            "instance_id None: expected a text",
        ),
        ("other/train.parquet", b"", "SWE-Gym/SWE-Gym has no file data/train-*.parquet at this version"),
        ("data/train-0.parquet", b"not parquet", "train-0.parquet: not a readable Parquet file"),
    ):
        gym.files = {name: content}
        assert imports("swe-gym", "-o", tmp_path / "out", "--mirror", gym.url) == 2
        assert said in capsys.readouterr().err


def test_a_file_that_arrived_whole_before_its_rename_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server answers 416 to a request that begins at the end of the file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    archive = as_archive({f"tasks/one/{name}": text for name, text in TASK.items()})
    commit = "a" * 40
    with mirror(archives={f"/harbor-framework/terminal-bench-2/archive/{commit}.tar.gz": archive}) as server:
        part = tmp_path / f"cache/megaflow-hpc/sets/terminal-bench-2/{commit}/.terminal-bench-2.tar.gz.part"
        for left in (archive, archive + b"of a longer version"):
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(left)
            words = (f"terminal-bench-2@{commit}", "-o", tmp_path / "out", "--mirror", server.url)
            assert imports(*words) == 0, capsys.readouterr().err
            shutil.rmtree(tmp_path / "cache")
    capsys.readouterr()


def test_a_file_that_is_shorter_or_longer_than_listed_ends_with_an_error(
    gym: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in (10, 10**7):
        entry = {"type": "file", "path": "data/train-0.parquet", "size": size}
        gym.files, gym.listing = {"data/train-0.parquet": b"x" * 1000}, json.dumps([entry]).encode()
        assert imports("swe-gym", "-o", tmp_path / "out", "--mirror", gym.url) == 3
        expected = "expected a file of 10 bytes, but the server sends more" if size == 10 else "repeat the command"
        assert expected in capsys.readouterr().err
        assert not list(tmp_path.glob("cache/**/*.parquet"))
        assert sum((path.stat().st_size for path in tmp_path.glob("cache/**/.*.part")), 0) <= 1000


def test_two_imports_at_once_download_a_file_once(
    gym: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gym.break_after = [700] * 4
    source = download.SetSource("swe-gym", task_sets()["swe-gym"], "main", gym.url)
    _, (remote,) = source.files()
    with ThreadPoolExecutor(4) as pool:
        fetched = list(pool.map(lambda _: download.fetch(source, remote, tmp_path / "one", lambda _: None), range(4)))
    assert {digest for _, digest in fetched} == {remote.sha256}
    asked = [asked for path, asked, _ in gym.requests if "resolve" in path]
    assert asked == [None, *(f"bytes={n * 700}-" for n in range(1, 5))]
    assert download.digest_of(fetched[0][0]) == remote.sha256


def test_the_archive_of_a_branch_is_downloaded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for task in ("one", "two"):
        archive = as_archive({f"tasks/{task}/{name}": text for name, text in TASK.items()})
        with mirror(archives={"/harbor-framework/terminal-bench-2/archive/main.tar.gz": archive}) as server:
            assert imports("terminal-bench-2", "-o", tmp_path / "out", "--mirror", server.url) == 0
        assert [path.name for path in (tmp_path / "out" / "terminal-bench-2").iterdir()] == [task]
    capsys.readouterr()


def test_all_pages_of_a_listing_are_read(gym: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gym.files = {f"data/train-{n}.parquet": as_parquet([line]) for n, line in enumerate(LINES)}
    gym.per_page = 1
    assert imports("swe-gym", "-o", tmp_path / "out", "--mirror", gym.url) == 0
    assert "2 instances" in capsys.readouterr().out


def test_the_token_goes_to_a_hub_below_a_path(gym: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    monkeypatch.setenv("HF_ENDPOINT", f"{gym.url}/artifacts/hub")
    with pytest.raises(ConfigError):
        download.SetSource("swe-gym", task_sets()["swe-gym"], "main").files()
    assert [authorization for _, _, authorization in gym.requests] == ["Bearer secret-token"]
    monkeypatch.setenv("HF_ENDPOINT", gym.url)
    gym.status = 403
    source = download.SetSource("swe-gym", task_sets()["swe-gym"], "main")
    (remote,) = source.files()[1]
    said = "403; accept its licence at https://huggingface.co/datasets/SWE-Gym.* HF_TOKEN"
    with pytest.raises(ConfigError, match=said):
        download.fetch(source, remote, tmp_path, lambda _: None)


@pytest.mark.parametrize(
    "listing",
    [
        b"[" * 100_000,
        b"{}",
        json.dumps([{"type": "file", "path": "data/train-0.parquet", "size": "1", "lfs": "x"}]).encode(),
        json.dumps([{"type": "file", "path": "data/train-\0.parquet", "size": 1}]).encode(),
        json.dumps([{"type": "file", "path": "data/train-/../../../../x.parquet", "size": 1}]).encode(),
    ],
    ids=["deep", "object", "types", "zero", "outside"],
)
def test_a_hostile_listing_is_refused(
    gym: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str], listing: bytes
) -> None:
    gym.listing = listing
    assert imports("swe-gym", "-o", tmp_path / "out", "--mirror", gym.url) == 3
    assert "swe-gym" in capsys.readouterr().err


def test_text_that_is_not_utf8_in_parquet_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = pyarrow.array([b"\xff\xfe"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"instance_id": text}), tmp_path / "x.parquet")
    assert imports("swe-gym", "-o", tmp_path / "out", "--from", tmp_path) == 2
    assert "x.parquet: not a readable Parquet file" in capsys.readouterr().err


def test_an_import_replaces_only_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exercise = tmp_path / "aider-polyglot" / "python" / "exercises" / "practice" / "add"
    for name, text in POLYGLOT.items():
        (exercise / name).parent.mkdir(parents=True, exist_ok=True)
        (exercise / name).write_text(text)
    assert imports("aider-polyglot", "-o", tmp_path, "--from", tmp_path / "aider-polyglot") == 2
    assert "aider-polyglot: exists, and tasks import did not write it" in capsys.readouterr().err
    assert exercise.is_dir()
    lines = "".join(json.dumps(line) + "\n" for line in LINES)
    (tmp_path / "swe-gym.jsonl").write_text(lines)
    assert imports("swe-gym", "-o", tmp_path, "--from", tmp_path) == 2
    assert imports(tmp_path / "swe-gym.jsonl", "-o", tmp_path) == 2
    assert "swe-gym.jsonl: is the file to read; name another directory" in capsys.readouterr().err
    assert (tmp_path / "swe-gym.jsonl").read_text() == lines
    assert not list(tmp_path.glob("*.source.json"))


def test_a_task_with_a_task_among_its_files_stays_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in TASK.items():
        for directory in ("outer", "outer/environment/inner"):
            path = tmp_path / "set" / "tasks" / directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert imports("terminal-bench-2", "-o", tmp_path / "a [1] out", "--from", tmp_path / "set") == 0
    out, err = capsys.readouterr()
    assert "1 instances" in out
    assert (tmp_path / "a [1] out" / "terminal-bench-2" / "outer" / "environment" / "inner" / "task.toml").exists()
    pattern = re.search(r"path: (.*)}]", err)
    assert pattern
    assert [task.id for task in load_tasks([pattern[1]], "/")] == ["outer"]
    assert imports("terminal-bench-2", "-o", tmp_path / "two", "--from", tmp_path / "set" / "tasks" / "outer") == 2
    assert "is a task itself" in capsys.readouterr().err
    assert imports("terminal-bench-2", "-o", tmp_path / "set" / "out", "--from", tmp_path / "set") == 2
    assert "is in " in capsys.readouterr().err


def test_a_set_without_a_valid_task_names_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "humanevalpack.jsonl").write_text('{"task_id": "Python/1"}\n')
    assert imports("humanevalfix", "-o", tmp_path / "out", "--from", tmp_path) == 2
    err = capsys.readouterr().err
    assert "humanevalpack.jsonl:1: Object missing required field `declaration`" in err
    (tmp_path / "empty").mkdir()
    assert imports("aider-polyglot", "-o", tmp_path / "out", "--from", tmp_path / "empty") == 2
    err = capsys.readouterr().err
    assert f"{tmp_path}/empty: has no aider-polyglot task" in err
    assert ".import-" not in err
    (tmp_path / "kept").mkdir()
    for output in (tmp_path / "out" / "below", tmp_path / "kept"):
        assert imports(tmp_path / "missing.jsonl", "-o", output) == 2
        assert "missing.jsonl: cannot be read" in capsys.readouterr().err
    assert (not (tmp_path / "out").exists(), (tmp_path / "kept").exists()) == (True, True)


def test_a_carried_directory_replaces_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    carried = tmp_path / "carried"
    carried.mkdir()
    (carried / "any.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    assert imports("swe-gym", "-o", tmp_path / "out", "--from", carried, "--image", "me/{id_1776}:1") == 0
    capsys.readouterr()
    (first, _) = load_tasks([str(tmp_path / "out" / "swe-gym.jsonl")], "/")
    assert first.image == "me/org_1776_lib-1:1"
    (file,) = json.loads((tmp_path / "out" / "swe-gym.source.json").read_text())["files"]
    assert (file["path"], len(file["sha256"])) == ("any.jsonl", 64)
    assert imports("swe-gym", "-o", tmp_path / "out", "--from", tmp_path / "none") == 2
    assert "none: no such directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("terminal-bench-2 --image x:1", "--image: has no effect on terminal-bench-2: its tasks are Harbor dir"),
        ("aider-polyglot@main --test-cmd pytest", "--test-cmd: has no effect on aider-polyglot@main"),
        ("swe-gym terminal-bench-2 --workdir /code", "--workdir: has no effect on terminal-bench-2"),
        ("swe-gym --seeds 2", "--seeds: has no effect on swe-gym: only pages have seeds"),
        ("miniwob --image x.sif --runner named", "--runner: has no effect on miniwob: its tasks bring their tests"),
        ("mine.jsonl --from /data", "--from: has no effect on mine.jsonl: a file is read as it is; leave it out"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, why: str
) -> None:
    assert imports(*words.split(), "-o", tmp_path / "out") == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def as_archive(files: Mapping[str, str], links: Mapping[str, str] = MappingProxyType({})) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"repo-main/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        for name, to in links.items():
            member = tarfile.TarInfo(f"repo-main/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, to
            tar.addfile(member)
    return buffer.getvalue()


TASK = {"task.toml": '[environment]\ndocker_image = "x"\n', "instruction.md": "Do.", "tests/test.sh": "true\n"}


def test_task_directories_of_an_archive_are_read_as_far_as_they_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {f"tasks/{task}/{name}": text for task in ("one", "two", "bad") for name, text in TASK.items()}
    files["tasks/bad/task.toml"] = "schema_version = 7\n"
    archives = {"/harbor-framework/terminal-bench-2/archive/main.tar.gz": as_archive(files)}
    with mirror(archives=archives) as server:
        for _ in range(2):
            assert imports("terminal-bench-2", "-o", tmp_path / "out", "--mirror", server.url) == 0
            out, err = capsys.readouterr()
            assert "2 instances, tested by test.sh: 2; 1 left out" in out
            assert f"left out: {tmp_path}/out/terminal-bench-2/bad/task.toml:1: schema_version = 7" in err
        archives.update({path: as_archive({"../../x": "x"}) for path in archives})
        server.archives = archives
        shutil.rmtree(tmp_path / "cache")
        assert imports("terminal-bench-2", "-o", tmp_path / "out", "--mirror", server.url) == 2
        assert "terminal-bench-2.tar.gz: not a git host's archive" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"terminal-bench-2", "terminal-bench-2.source.json"}


def test_links_inside_a_task_are_kept_and_tasks_with_other_links_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tasks = ("inside", "absolute", "above", "shared")
    files = {f"tasks/{task}/{name}": text for task in tasks for name, text in TASK.items()}
    files |= {f"tasks/shared/environment/inner/{name}": text for name, text in TASK.items()}
    files["tasks/common.py"] = "shared = 1\n"
    links = {
        "tasks/inside/tests/data": "../instruction.md",
        "tasks/absolute/tests/data": "/etc",
        "tasks/above/environment/data": "../../../../../x",
        "tasks/shared/tests/common.py": "../../common.py",
    }
    archive = as_archive(files, links)
    with mirror(archives={"/harbor-framework/terminal-bench-2/archive/main.tar.gz": archive}) as server:
        assert imports("terminal-bench-2", "-o", tmp_path / "out", "--mirror", server.url) == 0
    carried = tmp_path / "carried"
    carried.mkdir()
    subprocess.run(["tar", "-xz", "-C", carried], input=archive, check=True)
    assert imports("terminal-bench-2", "-o", tmp_path / "again", "--from", carried) == 0
    err = capsys.readouterr().err
    for out in ("out", "again"):
        (task,) = (tmp_path / out / "terminal-bench-2").iterdir()
        assert (task.name, (task / "tests" / "data").read_text()) == ("inside", "Do.")
        left_out = json.loads((tmp_path / out / "terminal-bench-2.source.json").read_text())["left_out"]
        assert sorted(line.partition("tasks/")[2] for line in left_out) == [
            f"{name.removeprefix('tasks/')}: is a link out of the task; copy the file into the task"
            for name in sorted(links)
            if "inside" not in name
        ]
    assert err.count("is a link out of the task; copy the file into the task (and 2 more)") == 2


POLYGLOT = {
    ".meta/config.json": '{"files": {"solution": ["add.py"], "test": ["add_test.py"], "example": [".meta/e.py"]}}',
    ".meta/e.py": "def add(a, b):\n    return a + b\n",
    ".docs/instructions.md": "# Instructions\n\nAdd.\n",
    "add.py": "def add(a, b):\n    pass\n",
    "add_test.py": "import unittest\nfrom add import add\n\n\nclass AddTest(unittest.TestCase):\n"
    "    def test_add(self):\n        self.assertEqual(add(1, 2), 3)\n",
}
FIX = {
    "task_id": "Python/0",
    "import": "",
    "declaration": "def add(a, b):\n",
    "buggy_solution": "    return a - b\n",
    "canonical_solution": "    return a + b\n",
    "test": "assert add(1, 2) == 3\n",
}


def test_exercises_and_bugs_become_tasks_whose_tests_tell_right_from_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exercises(tmp_path, {"python": POLYGLOT})
    (tmp_path / "fix").mkdir()
    (tmp_path / "fix" / "humanevalpack.jsonl").write_text(json.dumps(FIX) + '\n{"task_id": "Python/1"}\n')
    out = tmp_path / "out"
    assert imports("aider-polyglot", "-o", out, "--from", tmp_path / "polyglot") == 0
    assert imports("humanevalfix", "-o", out, "--from", tmp_path / "fix") == 0
    assert "Object missing required field `declaration`" in capsys.readouterr().err
    tasks = load_tasks([f"{out}/aider-polyglot/*", f"{out}/humanevalfix/*"], "/")
    assert [(task.id, task.image, task.workdir) for task in tasks] == [
        ("python-add", "python", "/work/add"),
        ("Python-0", "python", "/work"),
    ]
    assert "Add." in tasks[0].instruction
    assert "return a - b" in tasks[1].instruction
    for task in tasks:
        assert [reward_of(task, tmp_path / f"{task.id}-{solved}", solved) for solved in (False, True)] == [0, 1]


def reward_of(task: Task, box: Path, solved: bool | str) -> float:
    """Returns the reward of a task in a box: untouched, solved, or with this ``solution.py``."""
    for part in ("environment", "tests", "solution"):
        for file in (path for path in Path(task.path, part).rglob("*") if path.is_file()):
            data = file.read_bytes()
            if file.parent.name == part and part != "environment":
                data = re.sub(rb"(?<![\w./])/(?=(tests|solution|logs)/)", f"{box}/".encode(), data)
                data = data.replace((task.workdir or "").encode(), f"{box}/environment".encode())
            copy = box / part / file.relative_to(Path(task.path, part))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
    if isinstance(solved, str):
        (box / "environment" / "solution.py").write_text(solved)
    elif solved:
        subprocess.run(["bash", box / "solution" / "solve.sh"], check=True)
    subprocess.run(["bash", box / "tests" / "test.sh"], check=True, capture_output=True)
    return float((box / "logs" / "verifier" / "reward.txt").read_text())


JAVASCRIPT = {
    ".meta/config.json": '{"files": {"solution": ["add.js"], "test": ["add.spec.js"], "example": [".meta/proof.js"]}}',
    ".meta/proof.js": "module.exports = (a, b) => a + b\n",
    ".docs/instructions.md": "Add.\n",
    "add.js": "module.exports = () => 0\n",
    "add.spec.js": "const test = check => check()\nconst xtest = () => 0\n"
    "xtest(() => { if (require('./add')(1, 2) != 3) throw 'wrong' })\n",
    "package.json": '{"scripts": {"test": "node add.spec.js"}}',
}


def test_exercises_in_javascript_run_all_their_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Path(required("MEGAFLOW_AGENTS"), "node")
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text(f'#!/bin/sh\nexec node {node}/lib/node_modules/npm/bin/npm-cli.js "$@"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:{node}/bin:{os.environ['PATH']}")
    exercises(tmp_path, {"javascript": JAVASCRIPT})
    assert imports("aider-polyglot", "-o", tmp_path / "out", "--from", tmp_path / "polyglot") == 0
    (task,) = load_tasks([f"{tmp_path}/out/aider-polyglot/*"], "/")
    assert (task.id, task.image, task.workdir) == ("javascript-add", "aider-polyglot", "/work/add")
    assert [reward_of(task, tmp_path / f"box-{solved}", solved) for solved in (False, True)] == [0, 1]


def exercises(directory: Path, by_language: Mapping[str, Mapping[str, str]]) -> None:
    """Writes an exercise ``add`` of each language, as in Aider's repository."""
    for language, files in by_language.items():
        for name, text in files.items():
            path = directory / "polyglot" / language / "exercises" / "practice" / "add" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def test_exercises_of_every_language_hide_tests_and_solution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def exercise(solution: list[str], test: str, example: list[str], *others: str) -> dict[str, str]:
        config = json.dumps({"files": {"solution": solution, "test": [test], "example": example}})
        names = [*solution, test, *example, *others, ".docs/instructions.md"]
        return {".meta/config.json": config, **{name: f"in {name}\n" for name in names}}

    main, reference = "src/main/java", ".meta/src/reference/java"
    examples = [f"{reference}/Ape.java", f"{reference}/Zoo.java"]
    java = exercise([f"{main}/Zoo.java"], "src/test/java/ZooTest.java", examples, "gradlew")
    java["src/test/java/ZooTest.java"] = '@Disabled("Remove to run test")\n@Test\n'
    cpp = exercise(["add.cpp", "add.h"], "add_test.cpp", [".meta/example.h", ".meta/example.cpp"], "test/catch.hpp")
    rust = exercise(["src/lib.rs", "Cargo.toml"], "tests/add.rs", [".meta/example.rs"], ".meta/Cargo-example.toml")
    go = exercise(["add.go"], "add_test.go", [".meta/example.go"], "cases_test.go", "go.mod")
    exercises(tmp_path, {"java": java, "cpp": cpp, "rust": rust, "go": go, "haskell": go})
    lost = exercise(["lost.go"], "lost_test.go", [".meta/example.go"])
    del lost["lost_test.go"]
    exercises(tmp_path, {"python": lost})
    assert imports("aider-polyglot", "-o", tmp_path / "out", "--from", tmp_path / "polyglot") == 0
    left_out = json.loads((tmp_path / "out" / "aider-polyglot.source.json").read_text())["left_out"]
    assert [line.partition("/practice/add: ")[2] for line in left_out] == [
        "expected an exercise in cpp, go, java, javascript, python, rust",
        "lost_test.go: missing",
    ]
    out = tmp_path / "out" / "aider-polyglot"
    written = {
        task.name: {str(path.relative_to(task)): path.read_text() for path in task.rglob("*") if path.is_file()}
        for task in out.iterdir()
    }
    kept = {name: {path for path in files if path.startswith("environment/")} for name, files in written.items()}
    assert kept == {
        "java-add": {f"environment/{main}/Zoo.java", "environment/gradlew"},
        "cpp-add": {"environment/add.cpp", "environment/add.h", "environment/test/catch.hpp"},
        "rust-add": {"environment/src/lib.rs", "environment/Cargo.toml"},
        "go-add": {"environment/add.go", "environment/cases_test.go", "environment/go.mod"},
    }
    solutions = {
        f"{name}/{path.removeprefix('solution/files/')}": text.removeprefix("in .meta/").strip()
        for name, files in written.items()
        for path, text in files.items()
        if path.startswith("solution/files/")
    }
    assert solutions == {
        f"java-add/{main}/Zoo.java": "src/reference/java/Zoo.java",
        f"java-add/{main}/Ape.java": "src/reference/java/Ape.java",
        "cpp-add/add.cpp": "example.cpp",
        "cpp-add/add.h": "example.h",
        "rust-add/src/lib.rs": "example.rs",
        "rust-add/Cargo.toml": "Cargo-example.toml",
        "go-add/add.go": "example.go",
    }
    assert written["java-add"]["tests/files/src/test/java/ZooTest.java"] == "@Test\n"
    assert "tests/files/add.go" not in written["go-add"]
    assert "cd /work/add\n" in written["go-add"]["tests/test.sh"]


def test_rows_of_nemo_gym_contain_lines_of_other_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(inner: Any) -> dict[str, Any]:
        return {"responses_create_params": {"input": [], "metadata": {"instance_id": "x", "instance_dict": inner}}}

    good = json.dumps(LINES[1] | {"version": "1"}), LINES[2]
    bad: list[dict[str, Any]] = [row("{"), row(row(LINES[1])), row(["x"]), row(None), row({"repo_name": "aiohttp"})]
    bad += [{"responses_create_params": {"input": []}}, {"responses_create_params": None}]
    (tmp_path / "blend.jsonl").write_bytes(as_lines(*map(row, good), *bad))
    assert imports(tmp_path / "blend.jsonl", "-o", tmp_path / "out", "--runner", "named", "--json") == 0
    out, err = capsys.readouterr()
    assert [each["id"] for each in json.loads(out)] == ["org__lib-1", "org__lib-2"]
    assert "blend.jsonl:3: " in err
    left_out: list[str] = []
    tasks = load_tasks([{"path": str(tmp_path / "blend.jsonl"), "include": ["org*"]}], "/", left_out=left_out)
    assert (len(tasks), left_out) == (2, [])


def test_rows_of_r2e_gym_become_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe r2e-gym runs such tasks."""
    rows = [json.loads(line) for line in (ROOT / "share/recipes/r2e-gym/slice/rows.jsonl").read_text().splitlines()]
    damaged: list[dict[str, Any]] = [
        {"parsed_commit_content": "{}"},
        {"parsed_commit_content": '{"file_diffs": [{"header": null}]}'},
        {"execution_result_content": '{"test_file_names": ["a.py"], "test_file_codes": []}'},
        {"execution_result_content": '{"test_file_names": [".."], "test_file_codes": [""]}'},
        {"expected_output_json": "{}"},
        {"docker_image": None},
    ]
    rows += [rows[0] | {"commit_hash": f"{n}"} | change for n, change in enumerate(damaged)]
    (tmp_path / "train-0.parquet").write_bytes(as_parquet(rows))
    assert imports("r2e-gym", "-o", tmp_path / "out", "--from", tmp_path) == 0
    left_out = json.loads((tmp_path / "out" / "r2e-gym.source.json").read_text())["left_out"]
    assert [int(line.partition("parquet:")[2].partition(":")[0]) for line in left_out] == [*range(3, 9)]
    tasks = load_tasks([f"{tmp_path}/out/r2e-gym/*"], "/")
    assert [(task.id, task.image[:15], task.workdir) for task in tasks] == [
        ("tornado-111111111111", "namanjain12/tin", "/testbed"),
        ("tornado-222222222222", "namanjain12/tin", "/testbed"),
    ]


def packed(tests: Any, protocol: int = 4) -> str:
    """Encodes hidden tests as LiveCodeBench does."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests), protocol))).decode()


def contest(name: str, function: str = "", **changes: Any) -> dict[str, Any]:
    """Returns a made-up line in the schema of LiveCodeBench: to add numbers."""
    given, result = ("[1, 2]\n3", "6") if function else ("2\n1 2\n", "3\n")
    test = {"input": given, "output": result, "testtype": "functional" if function else "stdin"}
    return {
        "question_title": "Add",
        "question_content": "Add the numbers.",
        "platform": "leetcode" if function else "atcoder",
        "question_id": name,
        "contest_id": "abc999",
        "contest_date": "2024-01-01T00:00:00",
        "starter_code": f"class Solution:\n    def {function}(self, a: List[int], b: int) -> int:\n        "
        if function
        else "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([test]),
        "private_test_cases": packed([test, test]),
        "metadata": json.dumps({"func_name": function} if function else {}),
    } | changes


def as_lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Mirror]:
    """A mirror of LiveCodeBench with its first two releases."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "FIRST_PAUSE_S", 0.01)
    files = {"test.jsonl": as_lines(contest("abc999_a")), "test2.jsonl": as_lines(contest("9999", "add"))}
    with mirror("livecodebench/code_generation_lite", files | {"README.md": b""}) as server:
        yield server


def test_a_release_of_livecodebench_has_the_files_up_to_it(
    problems: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for version, names in {"": {"abc999_a", "9999"}, "@release_v2": {"abc999_a", "9999"}, "@v2": {"9999"}}.items():
        problems.break_after = [500]
        assert imports(f"livecodebench{version}", "-o", out, "--mirror", problems.url) == 0
        assert {path.name for path in (out / "livecodebench").iterdir()} == names
        record = json.loads((out / "livecodebench.source.json").read_text())
        assert (len(record["files"]), record["revision"]) == (len(names), SHA)
    capsys.readouterr()
    assert imports("livecodebench@v1_v3", "-o", tmp_path / "new", "--mirror", problems.url) == 2
    assert "has no file test3.jsonl at this version" in capsys.readouterr().err
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "test.jsonl").write_bytes(problems.files["test.jsonl"])
    assert imports("livecodebench@release_v1", "-o", out, "--from", tmp_path / "carried") == 0
    assert imports("livecodebench@release_v2", "-o", tmp_path / "new", "--from", tmp_path / "carried") == 2
    assert "this release of livecodebench also needs test2.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    problems.break_after = [500] + [0] * download.MAX_TRIES
    shutil.rmtree(tmp_path / "cache")
    assert imports("livecodebench@release_v2", "-o", tmp_path / "new", "--mirror", problems.url) == 3
    assert not (tmp_path / "new").exists()


PROGRAM = "import sys\n\ndef solve():\n    input()\n    print(sum(map(int, input().split())))\n\n"


@pytest.mark.parametrize(
    ("function", "solution", "reward"),
    [
        ("", False, 0),
        ("", PROGRAM + "if __name__ == '__main__':\n    solve()\n    sys.exit()\n", 1),
        ("", "print(sum(map(Fraction, sys.stdin.read().split()[1:])))\n", 0),
        ("", "a, b = list(map(int, sys.stdin.read().split()))[1:]\nprint(f'{a + b}.0 ')\n", 1),
        ("", "print(4)\n", 0),
        ("", "print(3)\nraise ValueError\n", 0),
        ("", "print(3, open('/tests/tests.json.gz').read())\n", 0),
        ("add", False, 0),
        ("add", "class Solution:\n    def add(self, a: List[int], b: int) -> int:\n        return sum(a) + b\n", 1),
        ("add", "def add(a, b):\n    print('6')\n    return reduce(operator.add, a, b)\n", 1),
        ("add", "def add(a, b):\n    return str(sum(a) + b)\n", 0),
        ("add", "def sub(a, b):\n    return 6\n", 0),
        ("add", "def add(a, b):\n    sys.exit()\n", 0),
    ],
)
def test_problems_are_graded_by_their_tests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, solution: bool | str, reward: float
) -> None:
    (tmp_path / "test.jsonl").write_bytes(as_lines(contest("a", function)))
    assert imports("livecodebench", "-o", tmp_path / "out", "--from", tmp_path) == 0
    (task,) = load_tasks([f"{tmp_path}/out/livecodebench/*"], "/")
    assert (task.image, task.workdir) == ("python", "/work")
    assert ("class Solution" in task.instruction) == bool(function)
    assert reward_of(task, tmp_path / "box", solution) == reward


def test_answers_are_compared_as_livecodebench_does(tmp_path: Path) -> None:
    lines = [("a \n b", "a\nb\n", 1), ("1.0 2", "1 2.00", 1), ("a 1.0", "a 1", 0), ("1\n\n2", "1\n2", 0), ("", "", 1)]
    for found, expected, same in lines:
        assert competition.same_lines(found, expected) == bool(same), (found, expected)
    values = [("(1, 2)", "[1, 2]", 1), ("[(1, 2)]", "[[1, 2]]", 0), ("1.0", "1", 1), ("None", "null", 1), ("x", "1", 0)]
    for found, expected, same in values:
        assert competition.same_value(found, expected) == bool(same), (found, expected)
    (tmp_path / "slow.py").write_text("while True: pass\n")
    slow = competition.first_failure(str(tmp_path / "slow.py"), "", 0.1, [["", ""]])
    assert slow == "test 1: takes longer than 0.1 s"


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("harmed"),)


def test_hidden_tests_are_read_from_pickles_of_one_text_and_from_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(converters, "MAX_TESTS_BYTES", 100_000)
    test = {"input": "1", "output": "1", "testtype": "stdin"}
    good = [packed([test], protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    good += [packed([test | {"input": "é" * 5000}]), json.dumps([test])]
    raw = [pickle.dumps(each) for each in (Harmful(), [json.dumps([test])], b"[]", (Harmful(), "[]"))]
    raw += [pickle.dumps("[]") + b"more", pickle.dumps("[]")[:-1], b"", b"\x80\x04" + b"\x94" * 50_000]
    bad = [base64.b64encode(zlib.compress(data)).decode() for data in raw]
    bad += [packed([test | {"input": "1" * 200_000}]), packed([test])[:-8], packed(test), packed([{"input": "1"}])]
    bad += ["no base64", base64.b64encode(b"no zlib").decode(), ""]
    rows = [contest(f"good-{n}", private_test_cases=text) for n, text in enumerate(good)]
    rows += [contest(f"bad-{n}", private_test_cases=text) for n, text in enumerate(bad)]
    rows += [contest("good-0"), contest(".."), contest("n" * 300), contest("none", question_content=" "), {"id": 1}]
    rows += [contest("empty", public_test_cases="[]", private_test_cases="[]"), contest("meta", metadata="")]
    (tmp_path / "test.jsonl").write_bytes(as_lines(*rows) + b'{"cut": \n[1]\n\n')
    assert imports("livecodebench", "-o", tmp_path / "out", "--from", tmp_path) == 0
    capsys.readouterr()
    written = {path.name for path in (tmp_path / "out" / "livecodebench").iterdir()}
    assert written == {f"good-{n}" for n in range(len(good))}
    left_out = json.loads((tmp_path / "out" / "livecodebench.source.json").read_text())["left_out"]
    places = [int(line.removeprefix(f"{tmp_path}/test.jsonl:").partition(":")[0]) for line in left_out]
    assert places == [*range(len(good) + 1, len(rows) + 3)]
    assert "expected a pickle of one text, not of PROTO FRAME SHORT_BINUNICODE MEMOIZE SHORT_BIN" in left_out[0]
    assert not (tmp_path / "harmed").exists()


def test_problems_of_nemo_gym_become_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(name: str, **tests: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Add the numbers."}]
        return {
            "responses_create_params": {"input": messages},
            "verifier_metadata": {"unit_tests": {"inputs": ["1 2"], "outputs": ["3"]} | tests},
            "hash_id": name,
            "dataset": "taco",
            "source": "codeforces",
        }

    (tmp_path / "train-0.parquet").write_bytes(as_parquet([row("one"), row("two", outputs=[]), row("one")]))
    assert imports("nemotron-competitive-coding", "-o", tmp_path / "out", "--from", tmp_path) == 0
    left_out = json.loads((tmp_path / "out" / "nemotron-competitive-coding.source.json").read_text())["left_out"]
    assert [re.sub(".*parquet:", "", line)[:9] for line in left_out] == ["2: zip() ", "3: the ta"]
    (task,) = load_tasks([f"{tmp_path}/out/nemotron-competitive-coding/*"], "/")
    answer = "print(sum(map(int, input().split())))"
    assert [reward_of(task, tmp_path / f"{n}", code) for n, code in enumerate(("print(4)", answer))] == [0, 1]


def test_every_registered_set_has_facts_and_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    for name, each in task_sets().items():
        assert [bool(each.hub), bool(each.archive), bool(each.home)].count(True) == 1, name
        assert bool(each.format) != bool(each.unread), name
        assert all(url.startswith("https://") for url in each.sources), name
        unknown = (each.tasks, each.bytes, each.image_bytes) == ("unknown",) * 3 and each.licence == "unknown"
        assert each.sources or unknown, f"{name}: facts without a source"
    assert imports("--list", "--json") == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(task_sets())


def test_the_ten_sets_of_the_megaflow_paper_are_read_or_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """Table 1 of arXiv 2601.07526v2."""
    read = ["swe-bench", "swe-gym", "swe-rebench", "swe-smith", "swe-bench-multilingual", "multi-swe-bench"]
    read += ["multi-swe-rl", "swe-bench-live"]
    unread = {"swe-flow": "name no file to download", "terminal-bench": "convert a copy with: harbor task migrate"}
    assert all(task_sets()[name].format == "swebench" for name in read)
    for name, reason in unread.items():
        assert imports(name, "-o", "none") == 2
        assert f"{name}: not read: " in (err := capsys.readouterr().err)
        assert reason in err
