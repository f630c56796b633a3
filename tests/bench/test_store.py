"""The store's benchmark measures what it says, at a size that takes seconds."""

from __future__ import annotations

import json

import h5py
import numpy as np

from megaflow_hpc.bench.store import generate
from megaflow_hpc.bench.transcripts import VOCABULARY, Transcripts
from megaflow_hpc.cli import main
from megaflow_hpc.trajectories import validate


def test_every_figure_of_the_store_is_there_with_its_peers(capsys):
    sizes = ["--rollouts", "4", "--tokens", "2000", "--turns", "5", "--repeat", "1"]
    assert main(["bench", "store", "--peers", "--json", *sizes, "--generated", "40", "--generated-tokens", "64"]) == 0
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert len(figures) == 11
    assert all(figure["value"] > 0 for figure in figures.values())
    peers = [peer["name"] for peer in figures["ingest, journal fsynced + HDF5"]["peers"]]
    assert peers == ["h5py alone, same chunks and filters", "Parquet, zstd", "JSONL, zstd"]


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
