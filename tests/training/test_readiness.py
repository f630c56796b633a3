"""Which engines a trainer waits for: the live ones that lag, and not the dead or refusing ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.rundir.endpoints import STALE_S
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import publish
from megaflow_hpc.training.readiness import Readiness
from tests.support.tensors import safetensors
from tests.support.training import Engines, training_run


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return training_run(tmp_path / "run", {})


@pytest.fixture
def clock() -> Clock:
    return Clock()


def new_weights(run: RunDir) -> None:
    folder = run.path / "made"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors(b"weights"))
    publish(run, folder, "default")


def missing(readiness: Readiness, clock: Clock, after_s: float = 1.0) -> str:
    clock.now += after_s
    return readiness.engines("default").missing


def test_a_live_engine_that_lags_is_waited_for_by_name(run: RunDir, clock: Clock) -> None:
    engines, readiness = Engines(run, ["default.0", "default.1"]), Readiness(run, clock)
    engines.beat()
    assert missing(readiness, clock) == ""
    engines.lagging = {"default.1"}
    new_weights(run)
    engines.beat()
    for _ in range(10):
        engines.beat()
        assert missing(readiness, clock, STALE_S / 2) == "default.1 (serves 0) to load weights 1"
    assert readiness.engines("default").serve_newest
    engines.lagging = set()
    engines.beat()
    assert missing(readiness, clock) == ""


def test_a_dead_engine_is_waited_for_until_its_heartbeat_is_too_old_by_our_own_clock(run: RunDir, clock: Clock) -> None:
    engines, readiness = Engines(run, ["default.0", "default.1"]), Readiness(run, clock)
    for endpoint in engines.endpoints.values():
        endpoint.started_at = 4e9  # the clocks of its node are wrong
    engines.dead = {"default.1"}
    engines.beat()
    new_weights(run)
    engines.beat()
    assert "default.1" in missing(readiness, clock)
    engines.beat()
    assert "default.1" in missing(readiness, clock, STALE_S - 1)
    engines.beat()
    assert missing(readiness, clock) == ""


def test_a_dead_engine_that_comes_back_is_waited_for_again(run: RunDir, clock: Clock) -> None:
    engines, readiness = Engines(run, ["default.0", "default.1"]), Readiness(run, clock)
    engines.dead = {"default.1"}
    engines.beat()
    assert missing(readiness, clock) == ""
    new_weights(run)
    engines.beat()
    assert missing(readiness, clock, STALE_S) == ""
    engines.dead, engines.lagging = set(), {"default.1"}
    engines.beat()
    assert missing(readiness, clock) == "default.1 (serves 0) to load weights 1"


def test_an_engine_that_refuses_the_version_is_not_waited_for(run: RunDir, clock: Clock) -> None:
    engines, readiness = Engines(run, ["default.0", "default.1"]), Readiness(run, clock)
    engines.refusing = {"default.1"}
    new_weights(run)
    engines.beat()
    assert missing(readiness, clock) == ""
    new_weights(run)  # it may load the next version, so it is waited for
    assert missing(readiness, clock) == "default.0 (serves 1), default.1 (serves 0) to load weights 2"


def test_engines_are_waited_for_if_none_is_left_that_serves_the_version(run: RunDir, clock: Clock) -> None:
    engines, readiness = Engines(run, ["default.0", "default.1"]), Readiness(run, clock)
    engines.endpoints["default.1"].job_id = "77_1"
    engines.dead, engines.refusing = {"default.0"}, {"default.1"}
    engines.beat()
    new_weights(run)
    assert missing(readiness, clock)
    engines.beat()
    said = missing(readiness, clock, STALE_S)
    assert said == (
        "an engine of policy 'default' to serve weights 1: default.0 has not renewed its heartbeat for 100 s; if it "
        "does not return: start it again; default.1 refuses them (CUDA out of memory); to try again: scontrol requeue "
        "77_1"
    )
    assert not readiness.engines("default").serve_newest
    engines.restart("default.1")
    engines.beat()
    assert missing(readiness, clock) == ""


def test_an_engine_that_starts_again_counts_once(run: RunDir, clock: Clock) -> None:
    engines, readiness = Engines(run, ["default.0"]), Readiness(run, clock)
    for _ in range(5):
        engines.beat()
        assert missing(readiness, clock) == ""
    engines.restart("default.0")
    engines.lagging = {"default.0"}
    engines.beat()
    new_weights(run)
    assert missing(readiness, clock, STALE_S) == "default.0 (serves 0) to load weights 1"
    engines.lagging = set()
    engines.beat()
    assert missing(readiness, clock) == ""


def test_engines_that_are_not_registered_start_with_the_newest_weights(run: RunDir, clock: Clock) -> None:
    new_weights(run)
    readiness = Readiness(run, clock)
    assert missing(readiness, clock) == ""
    assert not readiness.engines("default").serve_newest
