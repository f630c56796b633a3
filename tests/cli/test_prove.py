"""``prove`` reports whatever goes wrong in a trial, and a node's tests of its own."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaflow_hpc.cli import prove as verb
from megaflow_hpc.errors import SiteError
from megaflow_hpc.prove import node, trials
from megaflow_hpc.prove.node import Nodes
from megaflow_hpc.prove.report import Finding, ProofReport
from megaflow_hpc.slurm.accounting import JobState


def test_a_trial_that_slurm_breaks_off_is_a_finding_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def campaign_findings(place: Any, run: Any, report: ProofReport) -> Iterator[Finding]:
        if run.path.name == "worker":
            raise OSError("the file cannot be read")
        yield Finding(run.path.name, "ok", "fine")

    def refuse(*_: object) -> Any:
        raise SiteError("sbatch: Requested node configuration is not available")

    runs = {name: SimpleNamespace(path=Path(name)) for name in ("worker", "walltime")}
    monkeypatch.setattr(trials, "STARTS", {name: lambda place, run=run: run for name, run in runs.items()})
    monkeypatch.setattr(trials, "campaign_findings", campaign_findings)
    monkeypatch.setattr(trials, "submit_nodes", refuse)
    monkeypatch.setattr(trials, "start_preempted", refuse)
    place = SimpleNamespace(
        nodes_used={"a"}, folder=Path("/p"), cancel=lambda: "", wait_until_gone=lambda: None, pod_nodes=2
    )
    found = list(verb._trials(place, ProofReport(), {*verb.TRIALS}, []))  # type: ignore[arg-type]
    assert {(one.check, one.level) for one in found} == {
        ("nodes", "FAIL"),
        ("worker", "FAIL"),
        ("walltime", "ok"),
        ("preemption", "FAIL"),
        ("clean", "FAIL"),
    }
    assert all(one.remedy for one in found if one.level == "FAIL")


def test_jobs_are_waited_for_while_slurm_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([SiteError("away"), {"7": JobState("7", "RUNNING")}, SiteError("away"), {}])

    def live_jobs(jobs: list[str]) -> dict[str, JobState]:
        answer = next(answers)
        if isinstance(answer, SiteError):
            raise answer
        return answer

    monkeypatch.setattr(trials.accounting, "live_jobs", live_jobs)
    monkeypatch.setattr(trials.time, "sleep", lambda s: None)
    assert trials.wait_for(["7"], 60.0)


def test_the_refusal_of_a_pod_that_was_replaced_is_read_from_its_log(tmp_path: Path) -> None:
    run = SimpleNamespace(dir=SimpleNamespace(logs=tmp_path))
    (tmp_path / "pod-8_0.log").write_text("2 slots\nall rollouts are stored\n")
    assert trials._refusal(run) == "no reason is in its log"  # type: ignore[arg-type]
    refusal = "scontrol requeue 7_0: Requested operation is presently disabled for job 7"
    (tmp_path / "pod-7_0.log").write_text(f"2 slots\nthe walltime is near\n{refusal}\nended\n")
    assert trials._refusal(run) == refusal  # type: ignore[arg-type]


def test_what_cannot_be_cancelled_stops_no_other_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[object] = []

    def away() -> None:
        raise SiteError("Slurm is away")

    runs: list[Any] = [SimpleNamespace(ledger=SimpleNamespace(finished=False), cancel=away)]
    runs += [SimpleNamespace(ledger=SimpleNamespace(finished=False), cancel=lambda: cancelled.append("run"))]
    monkeypatch.setattr(trials, "scancel", cancelled.append)
    place = trials.ProofSite(SimpleNamespace(), "i", Path("/p"), 1.0, runs, ["9"])  # type: ignore[arg-type]
    assert place.cancel() == "Slurm is away"
    assert cancelled == ["run", ["9"]]


def test_nodes_reach_each_other_by_names_that_have_ipv6_addresses_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    real = socket.getaddrinfo

    def of_ipv6(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        return real("::1" if host == "node6" else host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", of_ipv6)
    monkeypatch.setattr(node, "address", lambda: "node6")
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda task: Nodes(tmp_path, task, 2).network(), range(2)))
    assert results == [[], []]


def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(node, "GPUS_S", 0.1)
    assert node._gpus() is None
    assert subprocess.TimeoutExpired.__mro__.count(OSError) == 0, "so nothing else would catch it"
