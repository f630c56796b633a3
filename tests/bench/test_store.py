"""The store's benchmark measures what it says, at a size that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import h5py
import numpy as np
import pytest

from megaflow_hpc.trajectories import open_trajectories, validate
from tests.bench import store
from tests.bench.command import main
from tests.bench.store_peers import READ_JSONL, READ_PARQUET, rows_as_jsonl, rows_as_parquet
from tests.bench.store_reads import generate
from tests.bench.transcripts import VOCABULARY, Transcripts


@pytest.mark.slow
def test_every_figure_of_the_store_is_there_with_its_peers(capsys, tmp_path):
    sizes = ["--rollouts", "4", "--tokens", "2000", "--turns", "5", "--repeat", "1", "--keep", str(tmp_path)]
    words = ["--peers", "--json", *sizes, "--generated", "40", "--generated-tokens", "64"]
    assert main(store.__doc__, store.add_arguments, store.run, words) == 0
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert len(figures) == 13
    assert all(figure["value"] > 0 for figure in figures.values())
    ingest = figures["ingest of 4 rollouts of 2000 tokens, journal fsynced + HDF5"]
    bare = "h5py alone, same chunks and filters"
    assert [peer["name"] for peer in ingest["peers"]] == [bare, "Parquet, zstd", "JSONL, zstd"]
    batch = figures["random batch of 40 trajectories of 64 tokens, warm"]
    assert [peer["name"] for peer in batch["peers"]] == ["Parquet, zstd, of 40 rows", "JSONL, orjson, of 40 rows"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["campaign.h5", "generated.h5"]
    for path in tmp_path.iterdir():  # any HDF5 reads what the benchmark measured
        assert "tokens" in subprocess.run(["h5ls", "-r", path], check=True, capture_output=True, text=True).stdout
        shown = subprocess.run(["h5dump", "-H", path], check=True, capture_output=True, text=True).stdout
        assert 'DATASET "logprob"' in shown
        subprocess.run(["h5repack", path, tmp_path / "repacked"], check=True)
        with h5py.File(path) as ours, h5py.File(tmp_path / "repacked") as repacked:
            assert (ours["tokens/id"][:] == repacked["tokens/id"][:]).all()


def test_peers_read_the_same_tokens(tmp_path):
    generate(tmp_path / "generated.h5", Transcripts(), 40, 64)
    with open_trajectories(tmp_path / "generated.h5") as store:
        rows_as_parquet(store, 40, tmp_path / "parquet")
        rows_as_jsonl(store, 40, tmp_path / "jsonl")
        expected = store.batch([33, 2, 17])
    for name, program in (("parquet", READ_PARQUET), ("jsonl", READ_JSONL)):
        check = "batch = read(numpy.array([33, 2, 17]))\nprint(json.dumps([b.tolist() for b in batch.values()]))"
        command = [sys.executable, "-c", program + check, str(tmp_path / name), "8", "1"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        columns = zip(("tokens", "logprobs", "loss_mask", "weight_version"), json.loads(shown), strict=True)
        for column, values in columns:
            np.testing.assert_array_equal(np.array(values, expected[column].dtype), expected[column])


def test_transcripts_are_what_they_are_said_to_be(tmp_path):
    transcripts = Transcripts()
    drawn = [transcripts.draw(n) for n in range(3)]
    assert repr(drawn[0].to_record()) == repr(Transcripts().draw(0).to_record())
    for trajectory in drawn:
        sequence = trajectory.sequences[0]
        assert 20_000 < len(sequence.tokens) < 40_000
        assert 0.15 < sum(sequence.loss_mask) / len(sequence.tokens) < 0.35
        assert max(sequence.tokens) < VOCABULARY
        assert len(trajectory.turns) == 40
        characters = sum(len(message["content"]) for message in trajectory.messages)
        assert 3 < characters / len(sequence.tokens) < 5
    generate(tmp_path / "generated.h5", transcripts, 30, 500)
    assert validate(tmp_path / "generated.h5") == []
    with h5py.File(tmp_path / "generated.h5") as file:
        assert len(set(file["trajectories/id"][:].tolist())) == 30
        assert np.diff(file["sequences/token_offset"][:]).tolist() == [500] * 30
