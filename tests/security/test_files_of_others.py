"""A campaign file of another user cannot make a verb read other files, exhaust the machine or crash."""

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
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z

from megaflow_hpc.cli import main
from megaflow_hpc.config import read_yaml
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import gather, open_trajectories, validate
from megaflow_hpc.trajectories.exports import export
from megaflow_hpc.trajectories.exports.jsonl import import_jsonl
from megaflow_hpc.trajectories.journal.frames import frame_head
from megaflow_hpc.trajectories.journal.winners import journals
from megaflow_hpc.trajectories.maintenance.anonymise import anonymise
from megaflow_hpc.trajectories.maintenance.compact import compact, usage_of_file
from megaflow_hpc.trajectories.maintenance.validate import column_digests
from megaflow_hpc.trajectories.reading.durations import durations
from megaflow_hpc.trajectories.reading.follow import follow
from tests.support.samples import commit, run_dir, trajectory
from tests.support.second_user import COMMAND
from tests.support.warm import WarmPython


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    """A run of eight rollouts. Tests that change a run get a copy of it."""
    run = run_dir(tmp_path_factory.mktemp("gathered") / "run")
    commit(run, "a", *((0, 0, trajectory(n)) for n in range(8)))
    gather(run)
    return run


@pytest.fixture
def run(gathered, tmp_path):
    return RunDir(shutil.copytree(gathered.path, tmp_path / "run"))


# --- data that is stored elsewhere ------------------------------------------------------------------------------------


def _replace(file, path, **options):
    """Creates a dataset again with other options, and with the same values unless ``data`` is given."""
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
    """A column whose chunk names an unknown filter, for which libhdf5 would look for a library."""

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
}


def craft(attack, original: Path, folder: Path) -> Path:
    """A copy of a campaign file after an attack, next to another campaign's file with a secret."""
    secret = Path(shutil.copy(original, folder / "secret.h5"))
    path = Path(shutil.copy(original, folder / "crafted.h5"))
    with h5py.File(path, "r+") as file:
        attack(file, secret)
    return path


@pytest.fixture(params=ATTACKS)
def crafted(request, gathered, tmp_path):
    return craft(ATTACKS[request.param], gathered.trajectories, tmp_path)


READERS = {
    "open": lambda path, work: open_trajectories(path),
    "durations": lambda path, work: durations(path),
    "compact": lambda path, work: compact(path, work / "out.h5"),
    "anonymise": lambda path, work: anonymise(path, work / "out.h5"),
    "validate": lambda path, work: validate(path),
    "digests": lambda path, work: column_digests(path),
    "du": lambda path, work: usage_of_file(path),
}


def test_every_reader_refuses_it(crafted, tmp_path):
    for name, reader in READERS.items():
        with pytest.raises(ConfigError, match=r"crafted\.h5") as refused:
            reader(crafted, tmp_path)
        assert len(str(refused.value)) < 2000, name
    out = tmp_path / "out"
    for command in (("show", crafted, "0"), ("export", crafted, "--format", "jsonl", "-o", out), ("validate", crafted)):
        assert main([str(word) for word in command]) == 2
    assert not (tmp_path / "out.h5").exists()


def test_as_the_file_of_a_run_it_is_replaced_from_the_journals_or_refused(crafted, run):
    shutil.copy(crafted, run.trajectories)
    rows = list(follow(run, over=lambda: True))
    assert [row.trajectory().messages for row in rows] == [trajectory(n).messages for n in range(8)]
    gather(run)
    assert validate(run.trajectories) == []
    shutil.copy(crafted, run.trajectories)
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
    assert opened(plain)  # the attack works on plain h5py
    ours = "import sys\nfrom megaflow_hpc.cli import main\n"
    ours += "for verb in ('validate', 'du', 'compact'): main([verb, sys.argv[1]])\n"
    assert not opened(ours + "main(['show', sys.argv[1], '0'])")
    os.close(watch)


# --- files of another user, read in a process with limits -------------------------------------------------------------


def _attribute(name, value, **options):
    def change(file, secret):
        del file.attrs[name]
        file.attrs.create(name, value, **options)

    return change


def _replaced(path, **options):
    return lambda file, secret: _replace(file, path, **options)


def _bomb(path, megabytes):
    """The first chunk of a column inflates to much more than a chunk.

    The stream repeats one compressed megabyte of zeros, since compressing gigabytes takes seconds.
    """

    def change(file, secret):
        values = file[path][:]
        del file[path]
        dataset = file.create_dataset(path, data=values, maxshape=(None,), chunks=(1 << 16,), compression=1)
        stream = zlib.compressobj(9)
        head = stream.compress(b"") + stream.flush(zlib.Z_FULL_FLUSH)
        megabyte = stream.compress(bytes(1 << 20)) + stream.flush(zlib.Z_FULL_FLUSH)
        checksum = ((megabytes << 20) % 65521) << 16 | 1
        end = b"\x03\x00" + checksum.to_bytes(4, "big")
        dataset.id.write_direct_chunk((0,), head + megabyte * megabytes + end)

    return change


def _put(path, row, value):
    def change(file, secret):
        file[path][row] = value

    return change


def _messages(text: bytes):
    def change(file, secret):
        offsets = file["messages/offset"][:]
        data = np.frombuffer(text, "u1")
        file["messages/json"].resize((len(data),))
        file["messages/json"][:] = data
        offsets[1:] = len(data)
        file["messages/offset"][:] = offsets

    return change


def _long_columns(file, secret):
    """Every column of the rows claims 10^12 entries, none of which was written."""
    for name, dataset in dict(file["trajectories"]).items():
        if name != "error":
            dataset.resize((10**12 + name.endswith("_offset"),))
    file["rewards/tests"].resize((10**12,))


CRAFTED = ATTACKS | {
    "10^12 rows in a kilobyte": _replaced("trajectories/reward", shape=(10**12,), chunks=(1 << 16,)),
    "10^12 rows in every column": _long_columns,
    "one chunk of 2 GB": _replaced("tokens/id", shape=(8,), maxshape=(None,), chunks=(1 << 29,), compression="gzip"),
    "object references": _replaced("trajectories/rank", shape=(8,), dtype=h5py.ref_dtype),
    "a list for an attribute": _attribute("campaign", ["x"] * 100_000, dtype=h5py.string_dtype()),
    "ids that inflate to a gigabyte": _bomb("tokens/id", 1024),
    "text that inflates to 200 MB": _bomb("messages/json", 200),
    "an offset behind the column": _put("messages/offset", 1, 1 << 62),
    "sequences behind the column": _put("trajectories/sequence_offset", 8, 1 << 40),
    "a text behind the column": _put("trajectories/error_offset", 8, 1 << 40),
    "a call in another's sequence": _put("turns/sequence", 0, 1 << 40),
    "a message that follows itself": _put("messages/parent", 2, 0),
    "an answer of another rollout": _put("turns/message", 0, 2),
    "a call that a later one started": _put("turns/started_by", 0, 1 << 40),
    "deep JSON": _messages(b"[" * 200_000 + b"]" * 200_000),
    "bytes that are no JSON": _messages(b"\xff\xfe"),
}

CONFINED = """
import json, sys
from megaflow_hpc.cli import confined, main
from megaflow_hpc.host.child import ProcessLimits
confined.LIMITS = ProcessLimits(memory_bytes=200 << 20, cpu_s=1, file_bytes=64 << 20)
statuses = [main(words) for words in json.loads(sys.argv[1])]
print("STATUSES", json.dumps(statuses))
"""


@functools.cache
def warm() -> WarmPython:
    """A Python that has imported what the verbs need, which would take each test a tenth of a second."""
    names = ("cli.doctor", "cli.campaigns.start", "cli.making.images", "campaign.plan", "campaign.facade")
    names += ("cli.files.store", "trajectories.exports.jsonl")
    names += tuple(f"trajectories.maintenance.{name}" for name in ("anonymise", "compact", "validate"))
    modules = ["h5py", *(f"megaflow_hpc.{name}" for name in names)]
    return WarmPython(*modules, variables={"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"})


def statuses(program: str, *verbs: list[object]) -> list[int]:
    """The exit statuses of verbs, run one after another in one process. It prints them if none crashes it."""
    done = warm().run(program, json.dumps(verbs, default=str))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    found: list[int] = json.loads(done.stdout.rpartition("STATUSES")[2])
    return found


def given_away(path: Path, place: Path) -> Path:
    """A copy of a file that belongs to another user, and that everybody may read."""
    theirs = place / path.name
    shutil.copy(path, theirs)
    inside = f"chown 1000:1000 {theirs} && chmod a+r {theirs}"
    subprocess.run([*COMMAND[:4], "sh", "-c", inside], check=True)
    assert theirs.stat().st_uid != os.getuid()
    return theirs


@pytest.mark.parametrize("attack", CRAFTED)
def test_a_verb_reads_or_refuses_it_within_its_limits(attack, gathered, place, tmp_path):
    path = craft(CRAFTED[attack], gathered.trajectories, tmp_path)
    assert path.stat().st_size < 4 << 20
    theirs = given_away(path, place)
    verbs = [
        ["show", theirs, "0", "--full"],
        ["compact", theirs, "--output", tmp_path / "small.h5"],
        ["validate", theirs],
        ["validate", theirs, "--digests"],
        ["du", theirs],
        ["anonymise", theirs, "-o", tmp_path / "anonymous.h5"],
        ["export", theirs, "--format", "jsonl", "-o", tmp_path / "out"],
    ]
    found = statuses(CONFINED, *verbs)
    assert set(found) <= {0, 1, 2}
    if attack in ATTACKS:
        assert set(found) == {2}


def test_a_run_of_ones_own_with_a_file_of_another_user_is_read_within_limits(run, place):
    theirs = given_away(run.trajectories, place)
    shutil.copytree(run.path, place / "run")
    (place / "run" / "trajectories.h5").unlink()
    (place / "run" / "trajectories.h5").symlink_to(theirs)
    program = CONFINED.replace("memory_bytes=200 << 20", "memory_bytes=1 << 20")
    assert statuses(program, ["validate", place / "run"], ["validate", run.path]) == [2, 0]


LIMITED = """
import json, resource, sys
from megaflow_hpc.cli import main
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (600, 600))
statuses = [main(words) for words in json.loads(sys.argv[1])]
print("STATUSES", json.dumps(statuses))
"""


def limited(*verbs: list[object]) -> list[int]:
    """The exit statuses of verbs in a process with an address space of a gigabyte."""
    return statuses(LIMITED, *verbs)


# --- lines of JSON, YAML and TOML ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(gathered, tmp_path_factory) -> bytes:
    """The JSON lines that ``export`` writes for the run."""
    with open_trajectories(gathered.path) as store:
        (path,) = export(store, ["jsonl"], tmp_path_factory.mktemp("exported"))["jsonl"]
    return path.read_bytes()


def test_a_small_gzip_of_one_endless_line_is_refused_within_the_limits(place, tmp_path):
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b'{"messages": "') + gzip.compress(b"x" * (1 << 20)) * 250)
    assert bomb.stat().st_size < 700_000
    assert statuses(CONFINED, ["import", given_away(bomb, place), "-o", tmp_path / "x.h5"]) == [2]
    assert not (tmp_path / "x.h5").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: b'{"messages": [' + b"[]," * (20 << 20) + b"[]]}",
        lambda: b"[" * 500_000 + b"]" * 500_000,
        lambda: b'{"id": "a", "task_id": 1, "group_id": [], "policy": {}, "agent": 2, "status": "completed"}',
    ],
    ids=["wide", "deep", "kinds"],
)
def test_a_line_of_anything_is_an_error_with_its_number(exported, tmp_path, make):
    text = make()
    lines = tmp_path / "lines.jsonl.gz"
    with gzip.open(lines, "wb", 1) as file:
        file.write(exported.splitlines(True)[0] + text + b"\n")
    assert limited(["import", lines, "-o", tmp_path / "x.h5"]) == [2]
    if len(text) < 1 << 20:
        with pytest.raises(ConfigError, match=r"lines\.jsonl\.gz:2: ") as refused:
            import_jsonl(lines, tmp_path / "x.h5")
        assert len(str(refused.value)) < 1000
    assert not (tmp_path / "x.h5").exists()


def test_a_damaged_gzip_is_an_error_that_names_the_file(exported, tmp_path):
    lines = tmp_path / "lines.jsonl.gz"
    data = bytearray(gzip.compress(exported))
    data[100] ^= 0xFF
    lines.write_bytes(data)
    with contextlib.suppress(ConfigError):
        import_jsonl(lines, tmp_path / "x.h5")
    assert limited(["import", lines, "-o", tmp_path / "y.h5"])[0] in (0, 2)


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: x\ntasks: " + "[" * 5_000 + "]" * 5_000, 2),
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
