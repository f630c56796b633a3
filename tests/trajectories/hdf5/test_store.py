"""Journals are gathered into one HDF5 file and read back: everything is there, bit for bit."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from itertools import pairwise

import h5py
import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import gather, open_trajectories, validate
from megaflow_hpc.trajectories.hdf5 import writer as writer_module
from megaflow_hpc.trajectories.hdf5.columns import ChunkDecoder, read_column, read_slices
from megaflow_hpc.trajectories.hdf5.file import datasets
from megaflow_hpc.trajectories.maintenance.compact import compact
from megaflow_hpc.trajectories.maintenance.validate import column_digests
from tests.support.samples import commit, run_dir, trajectory


def same(left, right) -> bool:
    """Whether two records are equal, including NaN and float32."""
    return repr(left.to_record()) == repr(right.to_record())


def float32(value: float) -> float:
    return float(np.float32(value))


def expected(t):
    for turn in t.turns:
        for name in ("model_s", "sandbox_s", "agent_s", "wait_s"):
            setattr(turn, name, float32(getattr(turn, name)))
    return t


@pytest.fixture
def run(tmp_path):
    run = run_dir(tmp_path / "run")
    commit(run, "a", *((n // 4, 0, trajectory(n)) for n in range(12)))
    failure = trajectory(12, status="failed", error_kind="sandbox", error="no space", sequences=[], turns=[])
    commit(run, "b", (3, 0, failure))
    return run


@pytest.mark.parametrize("flush_rows", [1, 5, 512])
def test_journals_and_file_show_the_same(run, monkeypatch, flush_rows):
    monkeypatch.setattr(writer_module, "_FLUSH_ROWS", flush_rows)
    with open_trajectories(run.path) as store:
        assert store.path == run.path
        live = [row.trajectory() for row in store]
    path = gather(run)
    assert validate(path) == []
    with open_trajectories(run.path) as store:
        assert store.path == path == run.trajectories
        final = [row.trajectory() for row in store]
    assert len(live) == len(final) == 13
    for n, (a, b) in enumerate(zip(live, final, strict=True)):
        assert same(a, b)
        if n < 12:
            assert same(a, expected(trajectory(n)))


def test_plain_h5py_reads_the_tokens_exactly(run):
    code = textwrap.dedent("""
        import sys, h5py
        with h5py.File(sys.argv[1]) as f:
            n = len(f["trajectories/id"])
            for i in range(n):
                s = f["trajectories/sequence_offset"][i : i + 2]
                t = f["sequences/token_offset"][s[0] : s[1] + 1]
                print(f["trajectories/id"].asstr()[i], *(f["tokens/" + c][t[0] : t[-1]].tobytes().hex() or "-"
                      for c in ("id", "logprob", "loss_mask", "weight_version")))
        assert not any(m.startswith("megaflow") for m in sys.modules)
    """)
    out = subprocess.run([sys.executable, "-c", code, str(gather(run))], capture_output=True, text=True, check=True)
    lines = [line.split() for line in out.stdout.splitlines()]
    assert len(lines) == 13
    for n, (rollout, *columns) in enumerate(lines[:12]):
        t = trajectory(n)
        assert rollout == t.id
        names = ("tokens", "logprobs", "loss_mask", "weight_versions")
        assert columns == [b"".join(getattr(s, c).tobytes() for s in t.sequences).hex() or "-" for c in names]


def test_turns_in_the_file_point_at_sampled_tokens(run):
    with h5py.File(gather(run)) as file:
        mask = file["tokens/loss_mask"][:]
        spans = list(zip(file["turns/token_start"][:], file["turns/token_end"][:], strict=True))
        assert spans
        assert all(mask[a:b].all() and b > a for a, b in spans)
        assert mask.sum() == sum(b - a for a, b in spans)
        assert file.attrs["format"] == b"megaflow-hpc/trajectories"
        assert file.attrs["format_version"] == 3
        assert file.attrs["campaign"] == b"sample"
        assert file["rewards/tests"][:].tolist()[:2] == pytest.approx([math.nan, 0.5], nan_ok=True)


def test_rewards_of_turns_leave_columns_to_others(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_REWARD_COLUMNS", 4)
    run = run_dir(tmp_path / "run")
    turns = {f"turn.{number}": 0.5 for number in range(9)}
    commit(run, "a", (0, 0, trajectory(0, rewards={**turns, "right": 1.0})), (1, 0, trajectory(1, rewards={"x": 1.0})))
    with h5py.File(gather(run)) as file:
        assert set(file["rewards"]) == {"turn.0", "turn.1", "right", "x"}


def test_every_chunk_has_a_checksum_and_no_data_has_variable_length(run):
    allowed = {h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32}
    with h5py.File(gather(run)) as file:
        for path, dataset in datasets(file).items():
            stored = dataset.id.get_create_plist()
            filters = {stored.get_filter(n)[0] for n in range(stored.get_nfilters())}
            assert h5py.h5z.FILTER_FLETCHER32 in filters <= allowed, path
            assert dataset.dtype.kind in "iufS", path
        assert all(not isinstance(value, str) for value in file.attrs.values()), "h5py has str for variable length"


def test_a_changed_byte_of_any_chunk_is_found_and_named(run, tmp_path):
    """Rows, batches, validate and verify name the file, the column and the entries."""
    data = gather(run).read_bytes()
    path = tmp_path / "damaged.h5"
    with h5py.File(run.trajectories) as file:
        chunks = {name: dataset.id.get_chunk_info(0) for name, dataset in datasets(file).items() if len(dataset)}
    draw = random.Random(0)

    def damage(*names: str) -> None:
        damaged = bytearray(data)
        for name in names:
            damaged[chunks[name].byte_offset + draw.randrange(chunks[name].size)] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)

    damage(*chunks)
    problems = "\n".join(validate(path))
    bad = {check.path: check.state for check in column_digests(path) if not check.good}
    assert bad.keys() == chunks.keys()
    for name in chunks:
        entries = rf"/{name}: entries 0 to \d+ cannot be read"
        assert re.search(rf"^{entries}", problems, re.MULTILINE), name
        assert re.search(f"{path}: {entries}", bad[name]), name
        if name.startswith(("tokens/", "messages/", "attempts/")):  # each row reads these
            damage(name)
            with open_trajectories(path) as store:
                with pytest.raises(OSError, match=f"{path}: {entries}"):
                    [row.trajectory() for row in store]
                if name.startswith("tokens/"):
                    with pytest.raises(OSError, match=f"{path}: {entries}"):
                        store.batch(range(13))


def test_an_empty_campaign_is_a_valid_file(tmp_path):
    run = run_dir(tmp_path / "run")
    for _ in range(2):
        with open_trajectories(run.path) as store:
            assert (len(store), store.ids, list(store)) == (0, [], [])
            batch = store.batch([], pad=0)
            assert batch["tokens"].shape == (0, 0)
            assert store.batch([])["offsets"].tolist() == [0]
        assert validate(gather(run)) == []


STRANGE = "nul \0 byte \udcff half \ud83e emoji 🦔 end"


def test_strange_text_is_kept_in_messages_and_escaped_in_columns(tmp_path):
    run = run_dir(tmp_path / "run")
    message = {"role": "tool", "content": STRANGE, "nested": [{"x": math.inf}], STRANGE: b"\xff"}
    strange = trajectory(1, error=STRANGE, messages=[message], rewards={"a/b": 1.0, "..": 0.5, STRANGE: 0.25})
    commit(run, "a", (0, 0, strange))
    with open_trajectories(run.path) as live:
        before = live[0].trajectory()
    assert validate(gather(run)) == []
    with open_trajectories(run.path) as store:
        row = store[0]
        assert same(before, row.trajectory())
        assert row.error == "nul \\x00 byte \\udcff half \\ud83e emoji 🦔 end"
        assert row.messages[0]["content"] == STRANGE
        assert row.messages[0]["nested"] == [{"x": None}]
        assert row.messages[0][STRANGE] == "\udcff"
        assert row.rewards["a_b"] == 1.0
        assert row.rewards["_.."] == 0.5


@pytest.mark.parametrize("gathered", [False, True])
def test_rows_are_found_by_number_and_id(run, gathered):
    if gathered:
        gather(run)
    with open_trajectories(run.path) as store:
        assert store[3].id == store.ids[3] == "task/default/3"
        assert store["task/default/3"].index == store[np.int64(3)].index == 3
        assert store[-1].status == "failed"
        assert [key in store for key in ("task/default/3", "nobody", "\udcff", 3)] == [True, False, False, False]
        assert math.isnan(store[-1].reward)
        with pytest.raises(KeyError, match="nobody: no such rollout"):
            store["nobody"]
        with pytest.raises(IndexError):
            store[13]
        with pytest.raises(AttributeError):
            _ = store[0].nothing


def test_a_padded_batch_fills_each_line_with_what_was_not_sampled(run):
    gather(run)
    sequences = trajectory(5).sequences + trajectory(2).sequences
    longest = max(len(s.tokens) for s in sequences)
    with open_trajectories(run.path) as store:
        flat = store.batch(["task/default/5", 2, 0])
        padded = store.batch([5, 2], pad=-7)
    assert (flat["trajectory"].tolist(), flat["reward"].tolist()) == ([5, 5, 2, 2], [1, 1, 0, 0])
    assert flat["offsets"].tolist() == np.cumsum([0, *(len(s.tokens) for s in sequences)]).tolist()
    assert (set(flat["group"]), set(flat["policy"])) == ({"task/default"}, {"default"})
    held = np.concatenate([np.asarray(s.logprobs, np.float32) for s in sequences])
    assert np.isnan(held).any()  # in the store; a sum over a batch is masked by a product
    assert (flat["logprobs"] * flat["loss_mask"]).sum() == np.nansum(held)
    for line, s in enumerate(sequences):
        size = len(s.tokens)
        assert padded["tokens"][line].tolist() == list(s.tokens) + [-7] * (longest - size)
        assert not padded["loss_mask"][line, size:].any()
        assert not padded["logprobs"][line, size:].any()
        assert (padded["weight_version"][line, size:] == -1).all()
    types = {name: str(padded[name].dtype) for name in ("tokens", "loss_mask", "logprobs", "weight_version")}
    assert types == {"tokens": "int32", "loss_mask": "uint8", "logprobs": "float32", "weight_version": "int32"}


def test_new_records_make_the_file_stale(run, monkeypatch):
    gather(run)
    with monkeypatch.context() as patched:
        patched.setattr("megaflow_hpc.trajectories.reading.store.seals_of", lambda _: {(3, 0): ("b.0", 0)})
        with open_trajectories(run.path) as store:
            assert len(store) == 12, "a new seal makes it stale too"
    commit(run, "c", (4, 0, trajectory(20)))
    with open_trajectories(run.path) as store:
        assert store.path == run.path
        assert len(store) == 14
    gather(run)
    with open_trajectories(run.path) as store:
        assert (store.path, len(store)) == (run.trajectories, 14)


def test_a_failed_gather_keeps_the_file_there_was(run, monkeypatch):
    before = gather(run).read_bytes()
    commit(run, "c", (4, 0, trajectory(20)))
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        gather(run)
    assert run.trajectories.read_bytes() == before
    assert len(list(run.path.glob(".trajectories*"))) == 0


def test_journals_that_are_gone_are_not_gathered_away(run):
    gather(run)
    run.journal_file("a", "0").unlink()
    assert gather(run) == run.trajectories
    with pytest.raises(ConfigError, match=r"no longer exist \(a\.0\.journal\)"):
        gather(run, rebuild=True)
    commit(run, "c", (4, 0, trajectory(20)))
    with pytest.raises(ConfigError, match="would lose their rollouts"):
        gather(run)
    with h5py.File(run.trajectories) as file:
        assert len(file["trajectories/id"]) == 13


def test_a_damaged_journal_costs_one_record(run, caplog):
    path = run.journal_file("a", "0")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with open_trajectories(run.path) as store:
        assert len(store) == 12
    assert "damaged at byte" in caplog.text


def test_files_that_cannot_be_read_are_named(run, tmp_path):
    whole = gather(run)
    cases = {"absent.h5": None, "text.h5": b"hello", "cut.h5": whole.read_bytes()[: whole.stat().st_size // 2]}
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["x"] = 1
    shutil.copy(whole, tmp_path / "newer.h5")
    with h5py.File(tmp_path / "newer.h5", "r+") as file:
        file.attrs["format_version"] = 4
    shutil.copy(whole, tmp_path / "lacking.h5")
    with h5py.File(tmp_path / "lacking.h5", "r+") as file:
        del file["tokens/logprob"]
    messages = {
        "absent.h5": "cannot be read",
        "text.h5": "not an HDF5 file",
        "cut.h5": "truncated or damaged",
        "foreign.h5": "this HDF5 file is not ours",
        "newer.h5": "format_version .*4.*, expected 3",
        "lacking.h5": "/tokens/logprob: is missing",
    }
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
            open_trajectories(tmp_path / name)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="not a run directory"):
        open_trajectories(empty)


def test_a_damaged_file_in_a_run_is_passed_over_for_the_journals(run):
    gather(run).write_bytes(b"torn")
    with open_trajectories(run.path) as store:
        assert len(store) == 13
    assert validate(gather(run)) == []


def test_an_unknown_dataset_is_ignored(run):
    with h5py.File(gather(run), "r+") as file:
        file["trajectories/of_a_later_version"] = np.zeros(13)
    with open_trajectories(run.path) as store:
        assert len(store) == 13
    assert validate(run.trajectories) == []


def test_texts_of_any_length_are_bytes_and_offsets(tmp_path):
    run = run_dir(tmp_path / "run")
    errors = ["", "no space", "", "x" * 200_000, "ü🦔", "", STRANGE]
    given = [trajectory(n, status="failed", error=error) for n, error in enumerate(errors)]
    commit(run, "a", *((0, 0, each) for each in given))
    expected = [*errors[:-1], "nul \\x00 byte \\udcff half \\ud83e emoji 🦔 end"]
    with h5py.File(gather(run)) as file:
        bounds, data = file["trajectories/error_offset"][:], file["trajectories/error"]
        assert [data[a:b].tobytes().decode() for a, b in pairwise(bounds)] == expected
        assert read_column(file, "trajectories/error", 2, 5).tolist() == expected[2:5]
        assert read_column(file, "trajectories/error", 5).tolist() == expected[5:]
    with open_trajectories(run.path) as store:
        assert store.column("error").tolist() == expected
        assert [row.error for row in store] == expected
    small = run.path / "small.h5"
    compact(run.trajectories, small)
    with open_trajectories(small) as store:
        assert store.column("error").tolist() == expected


def test_chunks_are_decoded_as_hdf5_decodes_them(tmp_path):
    """The last chunk is partly filled."""
    values = np.random.default_rng(0).integers(0, 1000, 3000).astype(np.int32)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for shuffle in (False, True):
            filters = {"compression": 1, "shuffle": shuffle, "fletcher32": True}
            for dtype in (np.int32, np.float32, np.uint8, ">i2"):
                expected = values.astype(dtype)
                name = f"{np.dtype(dtype).name}-{shuffle}"
                dataset = file.create_dataset(name, data=expected, chunks=(1024,), **filters)
                decoder = ChunkDecoder(dataset)
                decoded = [decoder.decode(chunk) for chunk in range(3)]
                assert all(found is not None for found in decoded), name
                assert np.concatenate(decoded)[:3000].tolist() == expected.tolist(), name


def test_a_chunk_with_any_changed_byte_is_left_to_hdf5(tmp_path):
    values = np.arange(1024, dtype=np.int32)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", data=values, chunks=(1024,), compression=1, fletcher32=True)
        stored = dataset.id.read_direct_chunk((0,))[1]
        for place in range(0, len(stored), 7):
            damaged = bytearray(stored)
            damaged[place] ^= 16
            dataset.id.write_direct_chunk((0,), bytes(damaged))
            assert ChunkDecoder(dataset).decode(0) is None, place
        dataset.id.write_direct_chunk((0,), stored)
        assert ChunkDecoder(dataset).decode(0).tolist() == values.tolist()


def test_chunks_with_other_filters_are_left_to_hdf5(tmp_path):
    values = np.arange(2048, dtype=np.int32)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        datasets_of_others = [
            file.create_dataset("plain", data=values, chunks=(1024,)),
            file.create_dataset("scaled", data=values, chunks=(1024,), scaleoffset=0),
            file.create_dataset(
                "unwritten", (2048,), "i4", chunks=(1024,), compression=1, fletcher32=True, fillvalue=7
            ),
        ]
        for dataset in datasets_of_others:
            assert ChunkDecoder(dataset).decode(1) is None
            found = read_slices(dataset, np.array([1000, 5]), np.array([1100, 9]))
            assert found.tolist() == [*dataset[1000:1100], *dataset[5:9]]


def test_slices_in_any_order_are_exact(tmp_path):
    draw = np.random.default_rng(0)
    values = draw.integers(0, 1000, 100_000, dtype=np.int32)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, options in (
            ("chunked", {"chunks": (512,), "compression": 1, "fletcher32": True}),
            ("contiguous", {}),
        ):
            dataset = file.create_dataset(name, data=values, **options)
            for count in (0, 1, 7, 300):
                starts = draw.integers(0, len(values), count)
                ends = np.minimum(starts + draw.integers(0, 2000, count), len(values))
                expected = [values[a:b] for a, b in zip(starts, ends, strict=True)]
                assert read_slices(dataset, starts, ends).tolist() == np.concatenate([*expected, values[:0]]).tolist()
        sparse = file.create_dataset("sparse", (400,), "i4", chunks=(8,), compression=1, fillvalue=-1)
        sparse[8:16] = np.arange(8)
        found = read_slices(sparse, np.array([14, 300, 4]), np.array([20, 300, 12]))
        assert found.tolist() == [6, 7, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3]
