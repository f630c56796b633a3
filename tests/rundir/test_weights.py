"""Numbers, ordinals and tokens of weights stay correct although publishers, pruners and readers are killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, ServerRecord, write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Make a campaign of two policies with scripted engines."""
    run = RunDir(tmp_path / "run")
    run.create()
    model = {"engine": "scripted", "script": str(trained(tmp_path, "model") / "script.yaml")}
    write_run(run, RunRecord(policies={name: PolicyRecord(model=model) for name in "ab"}))
    return run


def trained(folder: Path, name: str = "trained") -> Path:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "script.yaml").write_text(name)
    return folder / name


def test_ordinals_count_a_policys_own_versions_and_outlive_their_files(run: RunDir, tmp_path: Path) -> None:
    source = trained(tmp_path)
    made = [weights.publish(run, source, policy, keep=1) for policy in "abbaab"]
    assert [version.version for version in made] == [1, 2, 3, 4, 5, 6]
    assert [version.ordinal for version in made] == [1, 1, 2, 2, 3, 3]
    assert [version.version for version in weights.versions(run)] == [5, 6]
    assert weights.ordinals(run, "a") == {0: 0, 1: 1, 4: 2, 5: 3}
    known = weights.ordinals(run, "b")
    assert known == {0: 0, 2: 1, 3: 2, 6: 3}
    assert weights.current(run, "a").ordinal == 3
    assert [path.name for path in (run.weights / "4").iterdir()] == [weights.ABOUT]
    weights.publish(run, source, "b")
    assert weights.ordinals(run, "b", known) == weights.ordinals(run, "b") == {**known, 7: 4}
    assert weights.ordinals(RunDir(tmp_path / "none"), "a") == {0: 0}


def test_a_token_is_published_once(run: RunDir, tmp_path: Path) -> None:
    source = trained(tmp_path)
    first = weights.publish(run, source, "a", move=True, token="step-1", digest="x")
    assert not source.exists()
    assert weights.publish(run, source, "a", move=True, token="step-1", digest="x") == first, "it needs no source"
    assert weights.publish(run, source, "a", token="step-1") == first
    assert weights.publish(run, trained(tmp_path), "b", token="step-1", digest="y").ordinal == 1
    with pytest.raises(ConfigError, match=r"'step-1' of policy 'a': published as version 1 with digest x, not z"):
        weights.publish(run, source, "a", token="step-1", digest="z")
    weights.publish(run, source, "a", token="step-2", keep=1)
    gone = weights.publish(run, source, "a", token="step-1", digest="x")
    assert (gone.version, gone.path) == (1, "")
    assert weights.current(run, "a").version == 3
    assert weights.publish(run, source, "a").ordinal == 3, "without a token each is new"


def test_a_version_that_is_published_again_has_checksums_of_its_own_files(run: RunDir, tmp_path: Path) -> None:
    servers = [ServerRecord(policy="a", model={})] * 2
    write_run(run, RunRecord(policies={"a": PolicyRecord(model={"engine": "scripted"})}, servers=servers))
    first = weights.publish(run, trained(tmp_path), "a")
    again = Path(weights.publish(run, first.path, "a").path)
    assert weights.read_checksums(again) == {"script.yaml": weights.checksum(again / "script.yaml")}


def test_a_pointer_that_a_dead_publisher_did_not_move_is_moved_when_the_token_comes_again(
    run: RunDir, tmp_path: Path
) -> None:
    for token in ("1", "2"):
        weights.publish(run, trained(tmp_path), "a", token=token)
    pointer = run.weights / "current.a.json"
    pointer.write_text(pointer.read_text().replace('"version": 2', '"version": 1'))
    assert weights.current(run, "a").version == 1
    weights.publish(run, trained(tmp_path), "a", token="2")
    assert weights.current(run, "a").version == 2


def test_a_directory_that_could_not_be_published_goes_back_where_it_was(run: RunDir, tmp_path: Path) -> None:
    base = trained(tmp_path, "base")
    (base / "tokenizer.json").touch(mode=0o000)
    write_run(run, RunRecord(policies={"a": PolicyRecord(model={"engine": "vllm", "path": str(base)})}))
    source = trained(tmp_path)
    (source / "model.bin").touch()
    with pytest.raises(PermissionError):
        weights.publish(run, source, "a", move=True)
    assert {"model.bin", "script.yaml"} <= {path.name for path in source.iterdir()}
    assert not list(run.weights.iterdir())


def test_what_a_dead_publisher_left_is_removed_and_what_a_living_one_writes_is_not(run: RunDir, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    place = weights._place()
    gone = run.weights / f".publishing.{place}.{dead.pid}-1.aa"
    alive = run.weights / f".publishing.{place}.{weights.Identity.of(os.getpid())}.bb"
    elsewhere, forgotten = run.weights / ".publishing.0123456789ab.7-7.cc", run.weights / ".publishing.9.dd"
    for folder in (gone, alive, elsewhere, forgotten):
        folder.mkdir()
        (folder / "tensor").write_text("")
    dead.wait()
    os.utime(forgotten, (1, 1))
    weights.publish(run, trained(tmp_path), "a")
    assert sorted(run.weights.glob(".*")) == sorted([alive, elsewhere])


PUBLISHER = """
import sys
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.layout import RunDir
run, source, policy, last = RunDir(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
print(flush=True)
for step in range(last):
    weights.publish(run, source, policy, token=f"step-{step}", digest=str(step), keep=2)
"""


@pytest.mark.slow
def test_publishers_killed_at_any_instant_leave_each_step_once_and_no_ordinal_changes(
    run: RunDir, tmp_path: Path
) -> None:
    """Two of one policy, one of them a zombie as it were, and one of another; each begins again at its first step."""
    draw, steps = random.Random(11), 40
    source = trained(tmp_path)
    (source / "tensors").write_bytes(b"x" * 2_000_000)

    def start(policy: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", PUBLISHER, str(run), str(source), policy, str(steps)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # it has imported
        return process

    policies, kills = "aab", 0
    running = [start(policy) for policy in policies]
    seen: dict[str, dict[int, int]] = {"a": {}, "b": {}}
    while kills < 20:
        place = draw.randrange(3)
        time.sleep(draw.uniform(0.0, 0.1))
        kills += running[place].poll() is None
        running[place].kill()
        running[place].wait()
        for policy, known in seen.items():
            served, now = weights.current(run, policy), weights.ordinals(run, policy)
            assert known.items() <= now.items(), "an ordinal changed"
            assert now.items() <= weights.ordinals(run, policy, known).items()
            assert now[served.version] == served.ordinal
            seen[policy] = now
        running[place] = start(policies[place])
    assert [process.wait(60) for process in running] == [0, 0, 0]
    for policy in "ab":
        history = [v for v in weights._history(run, weights._numbers(run)) if v.policy == policy]
        assert [v.token for v in history] == [f"step-{step}" for step in range(steps)]
        assert [v.ordinal for v in history] == list(range(1, steps + 1))
        assert weights.current(run, policy).version == history[-1].version
        assert seen[policy].items() <= weights.ordinals(run, policy).items()
        assert [v.version for v in weights.versions(run, policy)] == [v.version for v in history[-2:]]
    for version in weights.versions(run):
        assert Path(version.path, "tensors").stat().st_size == 2_000_000
    assert not list(run.weights.glob(".publishing.*"))
