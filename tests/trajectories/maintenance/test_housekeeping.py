"""Verify, compact, anonymise and du; and stores on full, read-only and locked file systems."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest

from megaflow_hpc.cli import main
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.rundir.marks import FINISHED
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.trajectories import JournalWriter, gather, open_trajectories, validate
from megaflow_hpc.trajectories.journal.packs import FAN, pack_journals
from megaflow_hpc.trajectories.maintenance.anonymise import anonymise
from megaflow_hpc.trajectories.maintenance.compact import compact, drop_journals
from megaflow_hpc.trajectories.maintenance.validate import column_digests
from megaflow_hpc.trajectory import Attempt
from megaflow_hpc.types import Artifact
from tests.support.journals import digests
from tests.support.samples import commit, run_dir, trajectory


@pytest.fixture
def run(tmp_path):
    run = run_dir(tmp_path / "run")
    lost = [Attempt(0, "failed", "node", "lost", "node-1", "17_3", 1.0, 2.0)]
    items = []
    for n in range(40):
        number = int(n % 4 == 0)
        last = Attempt(number, "completed", "", "", "node-2", "17_3", 3.0, 4.0)
        attempts = [*lost, last] if number else [last]
        artifacts = [Artifact("patch.diff", b"+1\n" * n), Artifact("verifier.log", b"ok\n" * 50)]
        items.append((0, 0, trajectory(n, attempt=number, attempts=attempts, artifacts=artifacts)))
    commit(run, "a", *items)
    return run


def flip(path, name: str) -> None:
    """Changes one bit of a column's first chunk."""
    with h5py.File(path) as file:
        chunk = file[name].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + chunk.size // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_named(run, capsys):
    path = gather(run)
    assert main(["validate", str(path), "--digests", "--json"]) == 0
    assert {column["state"] for column in json.loads(capsys.readouterr().out)["columns"]} == {"ok"}
    flip(path, "tokens/id")
    assert [check.path for check in column_digests(path) if not check.good] == ["tokens/id"]
    assert main(["validate", str(path)]) == 1
    assert f"{path}: /tokens/id: entries 0 to" in capsys.readouterr().out


def test_compact_drops_superseded_attempts_and_named_artifacts_and_nothing_else(run, tmp_path):
    path = gather(run)
    with open_trajectories(path) as store:
        before = [row.trajectory() for row in store]
    result = compact(path, tmp_path / "small.h5", ["*.log"])
    assert result["attempts_dropped"] == 10
    assert result["artifacts_dropped"] == 40
    assert validate(tmp_path / "small.h5") == []
    assert {check.state for check in column_digests(tmp_path / "small.h5")} == {"ok"}
    with open_trajectories(tmp_path / "small.h5") as store:
        after = [row.trajectory() for row in store]
    for one, other in zip(before, after, strict=True):
        assert [a.node for a in other.attempts] == ["node-2"]
        assert [a.name for a in other.artifacts] == ["patch.diff"]
        assert other.artifacts[0] == one.artifacts[0]
        one.attempts, one.artifacts = other.attempts, other.artifacts
        assert repr(one.to_record()) == repr(other.to_record())
    changed = dict(digests(path).items() ^ digests(tmp_path / "small.h5").items())
    assert all(name.startswith(("attempts/", "artifacts/", "trajectories/attempt_offset")) for name in changed)


def test_compact_in_place_keeps_the_run_readable_and_current(run):
    path = gather(run)
    assert main(["compact", str(run.path)]) == 0
    inode = path.stat().st_ino
    assert gather(run).stat().st_ino == inode
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == []
    with open_trajectories(run.path) as store:
        assert store.path == path
        assert len(store) == 40


def test_journals_go_only_when_the_finished_file_holds_them(tmp_path):
    run = run_dir(tmp_path / "run")
    commit(run, "a", *((number // 10, 0, trajectory(number)) for number in range(60)))
    for start in range(FAN):  # these are in a pack as well
        commit(run, "7_1", (9, 0, trajectory(60 + start)), start=str(start))
    pack_journals(run.journal, "7_1", "99")
    with pytest.raises(ConfigError, match="not finished"):
        drop_journals(run)
    run.ledger.mkdir(parents=True, exist_ok=True)
    write_json(run.path / FINISHED, {"by": "a.0"})
    with pytest.raises(ConfigError, match="does not hold all"):
        drop_journals(run)
    path = gather(run)
    flip(path, "tokens/id")
    with pytest.raises(ConfigError, match="/tokens/id cannot be read"):
        drop_journals(run)
    path.unlink()
    gather(run)
    held = drop_journals(run, dry_run=True)
    assert held["journal_bytes"] == sum(file.stat().st_size for file in run.journal.iterdir()) > 0
    assert drop_journals(run) == held
    assert list(run.journal.iterdir()) == []
    assert gather(run) == path
    with open_trajectories(run.path) as store:
        assert len(store) == 60 + FAN


SECRET = (
    "/home/ada.l/project and /scratch/ada.l/x by ada.l@cluster.example.edu on fat-node7.cluster.example.edu (turing)"
)


def test_anonymise_leaves_no_name_anywhere(tmp_path):
    run = run_dir(tmp_path / "run")
    write_run(run, RunRecord(campaign={"name": "sample", "run_dir": "/home/ada.l/runs"}))
    told = trajectory(
        2,
        error=SECRET,
        node="fat-node7.cluster.example.edu",
        job_id="991199_3",
        messages=[{"role": "tool", "content": SECRET, "tool_calls": [{"arguments": json.dumps({"x": SECRET})}]}],
        artifacts=[Artifact("patch.diff", SECRET.encode() + b"\xff")],
        attempts=[Attempt(0, "completed", "", SECRET, "fat-node7.cluster.example.edu", "991199_3", 1.0, 2.0)],
    )
    commit(run, "fat-node7", (0, 0, told), (0, 0, trajectory(5)), (0, 0, trajectory(4)))
    result = anonymise(gather(run), tmp_path / "shared.h5", ["turing"])
    shown = trajectory(4).images
    assert result == {"trajectories": 3, "changed": 1, "without_tokens": 2, "images": len(shown)}
    assert validate(tmp_path / "shared.h5") == []
    plain = tmp_path / "plain.h5"  # without compression, so that every byte can be searched
    subprocess.run(["h5repack", "-f", "NONE", tmp_path / "shared.h5", plain], check=True)
    content = plain.read_bytes()
    for word in (b"ada.l", b"fat-node7", b"turing", b"991199", b"cluster.example"):
        assert word not in content, word
    with open_trajectories(tmp_path / "shared.h5") as store:
        first, second, third = (row.trajectory() for row in store)
    assert first.sequences == []
    assert first.node == "node-0"
    assert first.messages[0]["content"].startswith("/home/user/project and /scratch/user/x by user@example.org on host")
    assert first.artifacts[0].data.endswith(b"\xff")
    assert repr(second.sequences) == repr(trajectory(5).sequences)
    assert (third.sequences, third.images, third.messages) == ([], {}, trajectory(4).messages)
    assert {turn.sequence for turn in third.turns} == {-1}
    assert not any(image.data in content for image in shown.values())
    anonymise(gather(run), tmp_path / "with.h5", keep_tokens=True, keep_images=True)
    with open_trajectories(tmp_path / "with.h5") as store:
        assert repr(store[0].trajectory().sequences) == repr(told.sequences)
        assert repr(store[2].trajectory().sequences) == repr(trajectory(4).sequences)
        assert store[2].images == shown


def test_anonymise_refuses_to_overwrite_the_original(run):
    path = gather(run)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="is the input file"):
        anonymise(path, path)
    assert path.read_bytes() == before


def test_du_accounts_for_every_byte(run, capsys):
    path = gather(run)
    assert main(["du", str(path), "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["shares"]
    assert sum(share["stored"] for share in shares) == path.stat().st_size
    assert main(["du", str(run.path), "--json"]) == 0
    rooms = {share["name"]: share["stored"] for share in json.loads(capsys.readouterr().out)["shares"]}
    assert rooms["trajectories.h5"] == path.stat().st_size
    assert rooms["journal/"] == sum(file.stat().st_size for file in run.journal.iterdir())


def test_hdf5s_own_tools_take_the_file(run, tmp_path):
    path = gather(run)
    assert {check.path: check.sha256 for check in column_digests(path)} == digests(path)
    subprocess.run(["h5repack", path, tmp_path / "repacked.h5"], check=True, capture_output=True)
    assert {check.state for check in column_digests(tmp_path / "repacked.h5")} == {"ok"}
    for tool, word in ((["h5ls", "-r"], "/tokens/logprob"), (["h5dump", "-H"], 'DATASET "weight_version"')):
        assert word in subprocess.run([*tool, path], check=True, capture_output=True, text=True).stdout


# --- full, read-only and locked file systems ---

LIMITED = textwrap.dedent("""
    import resource, sys
    from megaflow_hpc.trajectories import gather
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
        gather(sys.argv[1], rebuild=True)
    except OSError as error:
        print(type(error).__name__, error)
        sys.exit(7)
""")


def test_no_space_for_a_gather_keeps_the_file_there_was_and_leaves_nothing(run):
    before = gather(run).read_bytes()
    assert len(before) > 30_000
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    code = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + LIMITED
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr[-2000:]
    assert f"{run.path}/" in done.stdout, "the error names the file"
    assert run.trajectories.read_bytes() == before
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == []
    assert validate(gather(run, rebuild=True)) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_run_is_read_and_refuses_to_be_written(run, capsys):
    path = gather(run)
    commit(run, "b", (1, 0, trajectory(50)))
    before = path.read_bytes()
    run.path.chmod(0o500)
    run.journal.chmod(0o500)
    try:
        with open_trajectories(run.path) as store:
            assert len(store) == 41
        with pytest.raises(OSError, match="denied"):
            gather(run)
        assert main(["compact", str(path)]) == 2
        assert "denied" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=r"cannot be created .*denied"):
            JournalWriter(run.journal_file("c", "0"))
    finally:
        run.path.chmod(0o700)
        run.journal.chmod(0o700)
    assert path.read_bytes() == before


def test_file_locks_are_neither_needed_nor_taken_unless_the_environment_demands_them(run):
    code = textwrap.dedent("""
        import fcntl, sys
        from megaflow_hpc.cli import main
        held = open(sys.argv[2], "r+b")
        fcntl.flock(held, fcntl.LOCK_EX)  # as on a file system that refuses locks, nobody gets one now
        from megaflow_hpc.trajectories import gather
        gather(sys.argv[1], rebuild=True)
        again = open(sys.argv[2], "r+b")
        fcntl.flock(again, fcntl.LOCK_EX)
        sys.exit(main(["validate", sys.argv[2]]))
    """)
    path = gather(run)
    for setting, status in ((None, 0), ("FALSE", 0), ("TRUE", 2)):
        env = {name: value for name, value in os.environ.items() if name != "HDF5_USE_FILE_LOCKING"}
        env |= {"HDF5_USE_FILE_LOCKING": setting} if setting else {}
        command = [sys.executable, "-c", code, str(run.path), str(path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert status == 0 or "unset the variable" in done.stderr


def test_a_column_whose_strings_grow_keeps_them_all(tmp_path):
    run = run_dir(tmp_path / "run")
    names = [f"{'t' * (n % 300)}{n}" for n in range(600)]
    commit(run, "a", *((0, 0, trajectory(1, id=name, task_id=name, sequences=[], turns=[])) for name in names))
    path = gather(run)
    with h5py.File(path) as file:
        assert file["trajectories/id"].asstr()[:].tolist() == names
        assert file["trajectories/id"].dtype.itemsize == 512
        assert file["trajectories/status"].dtype == np.dtype("S16")
    assert {check.state for check in column_digests(path)} == {"ok"}
