"""Campaign files of somebody else: what they may not be made of, at every door through which one is read."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gzip
import json
import os
import shutil
import subprocess
import sys
import zlib

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z

from megaflow_hpc.cli import main
from megaflow_hpc.config import read_yaml
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import gather, open_trajectories, validate
from megaflow_hpc.trajectories.exports import export
from megaflow_hpc.trajectories.exports.import_jsonl import import_jsonl
from megaflow_hpc.trajectories.journal.frames import frame_head
from megaflow_hpc.trajectories.journal.winners import journals
from megaflow_hpc.trajectories.maintenance.anonymise import anonymise
from megaflow_hpc.trajectories.maintenance.checksums import verify
from megaflow_hpc.trajectories.maintenance.compact import compact
from megaflow_hpc.trajectories.maintenance.disk_usage import of_file
from megaflow_hpc.trajectories.reading.durations import durations
from megaflow_hpc.trajectories.reading.follow import follow
from tests.support.samples import commit, run_dir, trajectory
from tests.support.warm import WarmPython


@pytest.fixture
def run(tmp_path):
    run = run_dir(tmp_path / "run")
    commit(run, "a", *((0, 0, trajectory(n)) for n in range(8)))
    gather(run)
    return run


# --- what a file may not be made of ----------------------------------------------------------------------------------


def _replace(file, path, **options):
    """A dataset made anew with other options, of the same values where ``data`` is not among them."""
    old = file[path]
    if "external" in options:
        options = {"shape": old.shape, "dtype": old.dtype, **options}
    elif "shape" in options:
        options = {"dtype": old.dtype, **options}
    elif "data" not in options:
        options = {"data": old[:], **options}
    del file[path]
    file.create_dataset(path, **options)


def _link(path, link):
    def change(file, secret):
        del file[path]
        file[path] = link(secret) if callable(link) else link

    return change


def _virtual(file, secret):
    size = len(file["messages/json"])
    layout = h5py.VirtualLayout(shape=(size,), dtype="u1")
    layout[:] = h5py.VirtualSource(str(secret), "/messages/json", shape=(size,))
    del file["messages/json"]
    file.create_virtual_dataset("messages/json", layout)


def _filtered(code):
    """A column whose chunk claims to have gone through a filter that is not there: libhdf5 looks for a library."""

    def change(file, secret):
        shape = file["trajectories/rank"].shape
        del file["trajectories/rank"]
        plist = h5p.create(h5p.DATASET_CREATE)
        plist.set_chunk((64,))
        plist.set_filter(code, h5z.FLAG_OPTIONAL, (1,))
        space = h5s.create_simple(shape, (h5s.UNLIMITED,))
        dataset = h5d.create(file["trajectories"].id, b"rank", h5t.STD_I32LE, space, plist)
        dataset.write_direct_chunk((0,), b"\0" * 256)

    return change


def _attribute(name, value, **options):
    def change(file, secret):
        del file.attrs[name]
        file.attrs.create(name, value, **options)

    return change


def _replaced(path, **options):
    return lambda file, secret: _replace(file, path, **options)


ATTACKS = {
    "external storage": lambda file, secret: _replace(
        file, "artifacts/bytes", external=[(str(secret), 0, len(file["artifacts/bytes"]))]
    ),
    "a device as external storage": lambda file, secret: _replace(
        file, "artifacts/bytes", external=[("/dev/zero", 0, len(file["artifacts/bytes"]))]
    ),
    "an external link": _link("messages/json", lambda secret: h5py.ExternalLink(str(secret), "/messages/json")),
    "a group that is an external link": _link("tokens", lambda secret: h5py.ExternalLink(str(secret), "/tokens")),
    "a soft link": _link("messages/json", h5py.SoftLink("/artifacts/bytes")),
    "a virtual data set": _virtual,
    "an external link among the rewards": _link(
        "rewards/tests", lambda secret: h5py.ExternalLink(str(secret), "/rewards/tests")
    ),
    "a filter by its number": _filtered(32042),
    "10^12 rows in a kilobyte": _replaced("trajectories/reward", shape=(10**12,), chunks=(1 << 16,)),
    "one chunk of 2 GB": _replaced("tokens/id", shape=(8,), maxshape=(None,), chunks=(1 << 29,), compression="gzip"),
    "object references": _replaced("trajectories/rank", shape=(8,), dtype=h5py.ref_dtype),
    "a list for an attribute": _attribute("campaign", ["x"] * 100_000, dtype=h5py.string_dtype()),
}


@pytest.fixture(params=ATTACKS)
def crafted(request, run, tmp_path):
    """A crafted file, and beside it another campaign's with a secret."""
    secret = tmp_path / "secret.h5"
    shutil.copy(run.trajectories, secret)
    path = tmp_path / "crafted.h5"
    shutil.copy(run.trajectories, path)
    with h5py.File(path, "r+") as file:
        ATTACKS[request.param](file, secret)
    return path


READERS = {
    "open": lambda path, work: open_trajectories(path),
    "durations": lambda path, work: durations(path),
    "compact": lambda path, work: compact(path, work / "out.h5"),
    "anonymise": lambda path, work: anonymise(path, work / "out.h5"),
}


def test_every_reader_refuses_it(crafted, tmp_path):
    for name, reader in READERS.items():
        with pytest.raises(ConfigError, match=r"crafted\.h5") as refused:
            reader(crafted, tmp_path)
        assert len(str(refused.value)) < 2000, name
    for command in (("show", crafted, "0"), ("export", crafted, "--format", "jsonl", "-o", tmp_path / "out")):
        assert main([str(word) for word in command]) == 2
    assert not (tmp_path / "out.h5").exists()


def test_no_check_of_it_says_that_it_is_well(crafted):
    for check in (validate, verify, of_file):
        with pytest.raises(ConfigError, match=r"crafted\.h5"):
            check(crafted)
    assert main(["validate", str(crafted)]) == 2


def test_a_run_directory_is_read_without_it(crafted, run):
    """As the run's own file: following and gathering go by the journals, or refuse."""
    shutil.move(crafted, run.trajectories)
    rows = list(follow(run, over=lambda: True))
    assert [row.trajectory().messages for row in rows] == [trajectory(n).messages for n in range(8)]
    gather(run)
    assert validate(run.trajectories) == []


def test_a_result_without_journals_is_refused_by_who_follows(crafted, run):
    shutil.move(crafted, run.trajectories)
    for path in journals(run):
        path.unlink()
    with pytest.raises(ConfigError):
        list(follow(run, over=lambda: True))


def test_no_library_is_looked_for_where_a_file_names_a_filter(run, tmp_path):
    """libhdf5 opens every library of its plugin directories for a filter number that it does not know."""
    path = tmp_path / "plugin.h5"
    shutil.copy(run.trajectories, path)
    with h5py.File(path, "r+") as file:
        _filtered(32042)(file, None)
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "libfilter.so").write_bytes(b"\x7fELF")
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, str(plugins / "libfilter.so").encode(), 0x20) >= 0  # IN_OPEN

    def opened(code: str) -> bool:
        subprocess.run([sys.executable, "-c", code, path], env={**os.environ, "HDF5_PLUGIN_PATH": str(plugins)})
        try:
            return bool(os.read(watch, 4096))
        except BlockingIOError:
            return False

    plain = "import h5py, sys\ntry: h5py.File(sys.argv[1])['trajectories/rank'][:]\nexcept OSError: pass"
    assert opened(plain)  # the attack, on whoever reads it plainly
    ours = "import sys\nfrom megaflow_hpc.cli import main\n"
    assert not opened(ours + "for verb in ('validate', 'verify', 'du', 'compact'): main([verb, sys.argv[1]])")
    assert not opened(ours + "main(['show', sys.argv[1], '0'])")
    os.close(watch)


# --- what may lie in columns of the right form -----------------------------------------------------------------------


def _bomb(path):
    """The first chunk of a column inflates to half a gigabyte."""

    def change(file):
        stream, piece = zlib.compressobj(9), bytes(1 << 20)
        packed = b"".join([*(stream.compress(piece) for _ in range(512)), stream.flush()])
        file[path].id.write_direct_chunk((0,), packed)

    return change


def _put(path, row, value):
    def change(file):
        file[path][row] = value

    return change


def _messages(text: bytes):
    def change(file):
        offsets = file["messages/offset"][:]
        data = np.frombuffer(text, "u1")
        file["messages/json"].resize((len(data),))
        file["messages/json"][:] = data
        offsets[1:] = len(data)
        file["messages/offset"][:] = offsets

    return change


DAMAGE = {
    "ids that inflate to half a gigabyte": _bomb("tokens/id"),
    "text that inflates to half a gigabyte": _bomb("messages/json"),
    "an offset behind the column": _put("messages/offset", 1, 1 << 62),
    "sequences behind the column": _put("trajectories/sequence_offset", 8, 1 << 40),
    "a call in another's sequence": _put("turns/sequence", 0, 1 << 40),
    "a message that follows itself": _put("messages/parent", 2, 0),
    "an answer of another rollout": _put("turns/message", 0, 2),
    "a call that a later one started": _put("turns/started_by", 0, 1 << 40),
    "deep JSON": _messages(b"[" * 200_000 + b"]" * 200_000),
    "bytes that are no JSON": _messages(b"\xff\xfe"),
}

LIMITED = """
import json, resource, sys
from megaflow_hpc.cli import main
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (600, 600))
statuses = [main(words) for words in json.loads(sys.argv[1])]
print("STATUSES", json.dumps(statuses))
"""


@functools.cache
def unlimited() -> WarmPython:
    """A Python with what verbs read files by; they take a tenth of a second to import it, and each test has a few."""
    names = ("cli.bench", "cli.doctor", "cli.campaigns.start", "cli.making.images", "campaign.plan", "campaign.facade")
    names += ("cli.files.store", "trajectories.exports.import_jsonl", "trajectories.exports.jsonl")
    names += tuple(f"trajectories.maintenance.{name}" for name in ("anonymise", "checksums", "compact", "validate"))
    modules = ["h5py", *(f"megaflow_hpc.{name}" for name in names)]
    return WarmPython(*modules, variables={"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"})


def limited(*verbs: list[str]) -> list[int]:
    """The exit statuses of verbs in a process with an address space of a gigabyte; a traceback is none."""
    done = unlimited().run(LIMITED, json.dumps(verbs, default=str))
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[int] = json.loads(done.stdout.rpartition("STATUSES")[2])
    return found


@pytest.fixture(params=DAMAGE)
def damaged(request, run, tmp_path):
    path = tmp_path / "damaged.h5"
    shutil.copy(run.trajectories, path)
    with h5py.File(path, "r+") as file:
        DAMAGE[request.param](file)
    assert path.stat().st_size < 4 << 20
    return path


def test_a_hostile_column_is_an_error_in_words_within_a_gigabyte(damaged, tmp_path):
    validated, verified, *shown, compacted, anonymised, exported = limited(
        ["validate", damaged],
        ["verify", damaged],
        *(["show", damaged, row, "--full"] for row in "01"),
        ["compact", damaged, "--output", tmp_path / "small.h5"],
        ["anonymise", damaged, "-o", tmp_path / "anonymous.h5"],
        ["export", damaged, "--format", "jsonl", "-o", tmp_path / "out"],
    )
    assert exported == 2
    assert anonymised == 2
    assert {validated, verified} & {1, 2}, "one of the checks tells"
    assert {*shown, compacted} <= {0, 2}


# --- lines of JSON, YAML and TOML ------------------------------------------------------------------------------------


def exported(run, directory) -> bytes:
    """What ``export`` writes of a run."""
    with open_trajectories(run.path) as store:
        (path,) = export(store, ["jsonl"], directory)["jsonl"]
    return path.read_bytes()


def test_a_small_gzip_of_one_endless_line_is_refused_within_a_gigabyte(tmp_path):
    bomb = tmp_path / "bomb.jsonl.gz"
    with gzip.open(bomb, "wb", 9) as file:
        file.write(b'{"messages": "')
        for _ in range(600):
            file.write(b"x" * (1 << 20))
    assert bomb.stat().st_size < 700_000
    assert limited(["import", bomb, "-o", tmp_path / "x.h5"]) == [2]
    assert not (tmp_path / "x.h5").exists()


@pytest.mark.parametrize(
    "text",
    [
        b'{"messages": [' + b"[]," * (20 << 20) + b"[]]}",
        b"[" * 500_000 + b"]" * 500_000,
        b'{"id": "a", "task_id": 1, "group_id": [], "policy": {}, "agent": 2, "status": "completed"}',
    ],
    ids=["wide", "deep", "kinds"],
)
def test_a_line_of_anything_is_an_error_with_its_number(run, tmp_path, text):
    lines = tmp_path / "lines.jsonl.gz"
    with gzip.open(lines, "wb", 1) as file:
        file.write(exported(run, tmp_path / "out").splitlines(True)[0] + text + b"\n")
    assert limited(["import", lines, "-o", tmp_path / "x.h5"]) == [2]
    if len(text) < 1 << 20:
        with pytest.raises(ConfigError, match=r"lines\.jsonl\.gz:2: ") as refused:
            import_jsonl(lines, tmp_path / "x.h5")
        assert len(str(refused.value)) < 1000
    assert not (tmp_path / "x.h5").exists()


def test_a_damaged_gzip_is_an_error_that_names_the_file(run, tmp_path):
    lines = tmp_path / "lines.jsonl.gz"
    data = bytearray(gzip.compress(exported(run, tmp_path / "out")))
    data[100] ^= 0xFF
    lines.write_bytes(data)
    with contextlib.suppress(ConfigError):
        import_jsonl(lines, tmp_path / "x.h5")
    assert limited(["import", lines, "-o", tmp_path / "y.h5"])[0] in (0, 2)


def test_a_longer_line_is_taken_where_the_user_says_so(run, tmp_path):
    first, *rest = exported(run, tmp_path / "out").splitlines()
    record = json.loads(first)
    record["messages"] = [{"role": "user", "content": "HERE"}]
    before, after = json.dumps(record).encode().split(b"HERE")
    lines = tmp_path / "lines.jsonl"
    with open(lines, "wb") as file:
        file.write(before)
        for _ in range(65):
            file.write(b"x" * (1 << 20))
        file.write(b"\n".join([after, *rest]))
    words = ["import", lines, "-o", tmp_path / "x.h5"]
    assert limited(words) == [2]
    verbs = ([*words, "--longest-line", "80"], ["validate", tmp_path / "x.h5"])
    done = [subprocess.run([sys.executable, "-m", "megaflow_hpc", *verb], capture_output=True) for verb in verbs]
    assert [each.returncode for each in done] == [0, 0], done


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: x\ntasks: " + "[" * 20_000 + "]" * 20_000, 2),
        ("name: x\n" + LAUGHS, None),
        ("name: x\ntasks: &a [*a]\n", 2),
        ("name: !!python/object/apply:os.system [true]\n", 1),
    ],
    ids=["lists", "laughs", "itself", "objects"],
)
def test_a_campaign_file_of_anything_is_an_error_in_words_within_a_gigabyte(tmp_path, text, line):
    path = tmp_path / "campaign.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"campaign\.yaml:{line}" if line else r"campaign\.yaml"):
        read_yaml(path)
    bugs = ["tasks", "build", path, "--output", tmp_path / "tasks"]
    assert limited(["submit", path, "--dry-run"], bugs) == [2, 2]


def test_an_alias_that_repeats_little_is_taken(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: &a {x: [1, 2]}\nb: {<<: *a, y: *a}\nc: [*a, *a]\n")
    assert read_yaml(path)[0]["c"] == [{"x": [1, 2]}] * 2


# --- journals --------------------------------------------------------------------------------------------------------


PAYLOADS = {
    "a list that claims four billion": b"\xdd\xff\xff\xff\xff",
    "lists in lists": b"\x91" * 100_000 + b"\xc0",
    "text that is no UTF-8": b"\x81\xa4kind\xa2\xff\xfe",
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_frame_of_anything_is_passed_over_within_a_gigabyte(tmp_path, payload):
    run = run_dir(tmp_path / "run")
    path = run.journal_file("a", "0")
    commit(run, "a", (0, 0, trajectory(1)), (0, 0, trajectory(2)))
    salt = path.read_bytes()[12:20]
    with open(path, "ab") as file:
        file.write(frame_head(payload, salt, path.stat().st_size, 1) + payload)
    assert limited(["show", run.path, "task/default/1"], ["export", run.path, "--format", "jsonl"]) == [0, 0]
    gather(run)
    with open_trajectories(run.trajectories) as store:
        assert store.ids == ["task/default/1", "task/default/2"]
