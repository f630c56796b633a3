"""The run directory goes away, or is full. The pod waits and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import megaflow_hpc
from megaflow_hpc.ledger import Claim, Ledger, PodIdentity, files, write_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout
from tests.support.ledgers import prepared


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = prepared(tmp_path / "run")
    write_blocks(run, [Rollout(f"t{n}", "oracle", 0, "oracle") for n in range(2)], size=1)
    return run


def test_a_call_waits_while_the_file_system_is_away(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is away answers EIO, here to ten tries."""
    monkeypatch.setattr(files, "RETRY_S", 0.001)
    away = 0

    class Away(files.Files):
        def _names(self, call):  # type: ignore[no-untyped-def]
            nonlocal away
            if away:
                away -= 1
                raise OSError(errno.EIO, "Input/output error")
            return super()._names(call)

    ledger = Ledger(run, PodIdentity("a", "0"), files=Away(run))
    ledger.register()
    away = 10
    assert ledger.claim(lambda owner: 0) == Claim(0, 0)
    assert away == 0


FULL = """
    import errno, json, os, sys, time
    from megaflow_hpc.pod.master.run_io import Durable
    from megaflow_hpc.pod.outcome import Outcome
    from megaflow_hpc.rundir.layout import RunDir
    from megaflow_hpc.trajectory import Trajectory
    from megaflow_hpc.types import Rollout
    from tests.support.pods import IoPod

    run = RunDir(sys.argv[1])
    pod = IoPod(run)
    io, ledger = pod.io, pod.ledger
    durable = []

    def collect():
        for report in io.collect():
            if isinstance(report, Durable):
                durable.extend(report.results)
        time.sleep(0.01)

    io.start()
    io.claim()
    io.push()
    while io.claiming:
        collect()
    lease = run.ledger / "leases" / "a.0"
    filler = run.path / "filler"
    try:
        with open(filler, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
    messages = [{"role": "user", "content": "x" * 100_000}]
    trajectory = Trajectory.begin(Rollout("t0", "oracle", 0, "oracle"), 0, "completed", messages=messages)
    io.store(Outcome.of(trajectory), 0, 0)
    io.push()
    while not io.stuck:
        collect()
    early, error, warning = len(durable), io.state.error, run.full()
    ledger.renew(force=True)
    renewed = json.loads(lease.read_text())["counter"]
    os.unlink(filler)
    while not durable:
        collect()
    io.finish(10)
    collect()
    pod.journal.close()
    print(json.dumps({"early": early, "renewed": renewed, "late": len(durable), "stuck": io.stuck}))
    print(error, warning, run.full(), sep="|")
"""


def test_a_full_file_system_keeps_results_waiting_and_the_lease_alive(tmp_path: Path) -> None:
    """Fills a file system of two megabytes, in a mount namespace of its own, and frees it again."""
    place = tmp_path / "small"
    place.mkdir()
    prepare = """
        import sys
        from megaflow_hpc.ledger import Ledger, write_blocks
        from megaflow_hpc.rundir.layout import RunDir
        from megaflow_hpc.types import Rollout
        run = RunDir(sys.argv[1]); run.create(); Ledger(run).create()
        write_blocks(run, [Rollout("t0", "oracle", 0, "oracle")], size=1)
    """
    (tmp_path / "prepare.py").write_text(textwrap.dedent(prepare))
    (tmp_path / "full.py").write_text(textwrap.dedent(FULL))
    script = (
        f"mount -t tmpfs -o size=2m small {place} && {sys.executable} {tmp_path}/prepare.py {place}/run && "
        f"{sys.executable} {tmp_path}/full.py {place}/run && cat {place}/run/events/a.0.jsonl && "
        f"ls {place}/run/ledger"
    )
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(megaflow_hpc.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    said, problem, *rest = done.stdout.splitlines()
    error, warning, later = problem.split("|")
    assert error == "No space left on device"
    assert "no space left on its file system" in warning
    assert later == ""
    assert json.loads(said) == {"early": 0, "renewed": 2, "late": 1, "stuck": False}
    assert any("No space left on device" in line for line in rest)
    assert "finished" in rest
