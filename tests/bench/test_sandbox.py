"""The benchmarks of sandboxes, in small."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.bench import exec as bench_exec
from tests.bench import sandbox as bench_sandbox


@pytest.fixture(autouse=True)
def _scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path_factory.getbasetemp()))


def arguments(module: object, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser.parse_args(words)


@pytest.mark.slow
def test_life_of_a_sandbox_is_measured_and_a_killed_owner_leaves_nothing(base_sif: Path) -> None:
    words = ("--image", str(base_sif), "--starts", "2", "--sandboxes", "2", "--rounds", "1", "--owned", "2")
    figures = {figure.name: figure for figure in bench_sandbox.run(arguments(bench_sandbox, *words), print)}
    assert [figure.value for name, figure in figures.items() if "left by a killed owner" in name] == [0, 0, 0]
    assert all(figure.value > 0 for name, figure in figures.items() if "left by" not in name)
    assert sum(figure.goal is not None for figure in figures.values()) == 7


def test_commands_are_measured(base_sif: Path) -> None:
    words = ("--image", str(base_sif), "--commands", "20", "--sandboxes", "2", "--each", "5", "--rounds", "2")
    figures = bench_exec.run(arguments(bench_exec, *words), print)
    assert [figure.unit for figure in figures] == ["ms", "ms", "ms", "per s", "×", "×"]
    assert all(figure.value > 0 for figure in figures)
    assert [figure.peers[0].name for figure in figures if figure.peers] == ["posix_spawn and wait"] * 2
