"""The store's benchmark measures what it says, at a size that takes seconds."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys

import h5py
import numpy as np
import pytest

from megaflow_hpc.trajectories import open_trajectories, validate
from tests.bench import store
from tests.bench.command import main
from tests.bench.store_peers import READ_PARQUET, rows_as_parquet
from tests.bench.transcripts import VOCABULARY, Transcripts

pytestmark = pytest.mark.slow  # all of them wait for one run of the benchmark


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Returns the figures by name, and the folder of the files that were measured."""
    folder, said = tmp_path_factory.mktemp("store"), io.StringIO()
    sizes = ["--rollouts", "4", "--tokens", "2000", "--turns", "5", "--keep", str(folder)]
    words = ["--peers", "--json", *sizes, "--generated", "40", "--generated-tokens", "64"]
    with contextlib.redirect_stdout(said):
        assert main(store.__doc__, store.add_arguments, store.run, words) == 0
    return {figure["name"]: figure for figure in json.loads(said.getvalue())["figures"]}, folder


def test_every_figure_of_the_store_is_there_with_its_peers(measured, tmp_path):
    figures, folder = measured
    assert len(figures) == 8
    assert all(figure["value"] > 0 for figure in figures.values())
    size = figures["whole file, messages included"]
    assert [peer["name"] for peer in size["peers"]] == ["Parquet, zstd", "JSONL, zstd"]
    batch = figures["random batch of 40 trajectories of 64 tokens, warm"]
    assert [peer["name"] for peer in batch["peers"]] == ["Parquet, zstd, of 40 rows"]
    assert sorted(path.name for path in folder.iterdir()) == ["campaign.h5", "generated.h5"]
    for path in folder.iterdir():  # any HDF5 reads what the benchmark measured
        assert "tokens" in subprocess.run(["h5ls", "-r", path], check=True, capture_output=True, text=True).stdout
        shown = subprocess.run(["h5dump", "-H", path], check=True, capture_output=True, text=True).stdout
        assert 'DATASET "logprob"' in shown
        subprocess.run(["h5repack", path, tmp_path / "repacked"], check=True)
        with h5py.File(path) as ours, h5py.File(tmp_path / "repacked") as repacked:
            assert (ours["tokens/id"][:] == repacked["tokens/id"][:]).all()


def test_peers_read_the_same_tokens(measured, tmp_path):
    with open_trajectories(measured[1] / "generated.h5") as store:
        rows_as_parquet(store, 40, tmp_path / "parquet")
        expected = store.batch([33, 2, 17])
    check = "batch = read(numpy.array([33, 2, 17]))\nprint(json.dumps([b.tolist() for b in batch.values()]))"
    command = [sys.executable, "-c", READ_PARQUET + check, str(tmp_path / "parquet"), "8", "1"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    columns = zip(("tokens", "logprobs", "loss_mask", "weight_version"), json.loads(shown), strict=True)
    for column, values in columns:
        np.testing.assert_array_equal(np.array(values, expected[column].dtype), expected[column])


def test_transcripts_are_what_they_are_said_to_be(measured):
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
    generated = measured[1] / "generated.h5"
    assert validate(generated) == []
    with h5py.File(generated) as file:
        assert len(set(file["trajectories/id"][:].tolist())) == 40
        assert np.diff(file["sequences/token_offset"][:]).tolist() == [64] * 40
