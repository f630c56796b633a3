"""Measures what it costs to take over the blocks of killed pods.

``python -m tests.bench.takeover [--pods 1000] [--rollouts 128] [--tokens 2000]`` lets each pod claim a block, store
half of it and be killed. It marks the pods as gone, as Slurm would, and has one pod take over all blocks. Ledger,
journals and blocks are real. It prints seconds, the bytes read from files (from caches too), and the longest time
between two chances to renew the lease, which is fenced at 90 s.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from megaflow_hpc.ledger import Ledger, PodIdentity, read_block, write_blocks
from megaflow_hpc.pod.master.claimed_blocks import ClaimedBlocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.frames import pack_record
from megaflow_hpc.trajectories.journal.winners import StoredRollouts
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from megaflow_hpc.types import Rollout
from tests.bench.figures import Figure
from tests.bench.transcripts import Transcripts
from tests.support.ledgers import AnyTasks

GROUP = 16
"""Rollouts in one commit."""
GOAL_S = 30.0
"""Longest time between two renewals: a third of the fence."""


def make_run(folder: Path, pods: int, rollouts: int, tokens: int) -> RunDir:
    """Returns a run in which ``pods`` pods have stored half of their block and are gone."""
    run = RunDir(folder / "run")
    run.create()
    Ledger(run).create()
    write_blocks(run, [Rollout(f"t{n}", "default", 0, "nop") for n in range(pods * rollouts)], 1, size=rollouts)
    transcripts = Transcripts()
    drawn = [transcripts.draw(number, tokens, max(2, tokens // 750)) for number in range(12)]
    for number in range(pods):
        ledger = Ledger(run, PodIdentity(f"900_{number}", "0"), pods=pods)
        ledger.register()
        claim = ledger.claim(lambda owner: 0)
        assert claim is not None
        journal = JournalWriter(run.journal_file(f"900_{number}", "0"))
        for n, rollout in enumerate(read_block(run, claim.block).rollouts[: rollouts // 2]):
            trajectory = replace(drawn[n % 12], id=rollout.id, task_id=rollout.task_id, group_id=rollout.group_id)
            record = {"kind": "trajectory", "epoch": 0, "block": claim.block, "trajectory": trajectory.to_record()}
            journal.append(pack_record(record))
            if n % GROUP == GROUP - 1:
                journal.commit()
        journal.commit()  # and it is never closed
        ledger.mark_gone(f"900_{number}.0")
    return run


def bytes_read() -> int:
    """Returns the bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def take_over(run: RunDir, name: str, pods: int) -> tuple[float, int, float, int]:
    """Returns seconds, bytes read, the longest time in seconds without a chance to renew, and rollouts left to run."""
    ledger, longest, last = Ledger(run, PodIdentity(name, "0"), pods=pods), 0.0, time.monotonic()

    def renew() -> None:
        nonlocal longest, last
        ledger.renew()
        longest, last = max(longest, time.monotonic() - last), time.monotonic()

    ledger.register()
    blocks = ClaimedBlocks(run, ledger, StoredRollouts(run, renew), AnyTasks())
    began, read, claimed, left = time.monotonic(), bytes_read(), 0, 0
    last = began
    while block := blocks.claim():
        claimed += 1
        left += len(block.rollouts)
        renew()
    assert claimed == pods, claimed
    ledger.mark_gone(f"{name}.0")
    return time.monotonic() - began, bytes_read() - read, longest, left


def figures(pods: int, rollouts: int, tokens: int, folder: Path) -> list[Figure]:
    """Has one pod take over the blocks of all others."""
    run = make_run(folder, pods, rollouts, tokens)
    size = sum(path.stat().st_size for path in run.journal.glob("*.journal"))
    seconds, read, longest, left = take_over(run, "901_0", pods)
    assert left == pods * (rollouts - rollouts // 2), left
    return [
        Figure(f"journals of {pods} pods, {rollouts // 2} rollouts each", "MB", round(size / 1e6), pods),
        Figure(f"takeover of {pods} blocks", "s", round(seconds, 1), pods),
        Figure("read for it", "MB", round(read / 1e6, 1), pods),
        Figure("longest time without renewing", "s", round(longest, 3), pods, goal=GOAL_S, better="lower"),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=128, help="of a block; half of them are stored")
    parser.add_argument("--tokens", type=int, default=2000, help="of a rollout; 30000 are 0.5 MB")
    parser.add_argument("--directory", type=Path, help="on the file system to be measured")
    given = parser.parse_args(arguments)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # journals of pods that are killed are never closed
    with tempfile.TemporaryDirectory(prefix="megaflow-bench-", dir=given.directory) as folder:
        for figure in figures(given.pods, given.rollouts, given.tokens, Path(folder)):
            goal = f" (goal {figure.goal})" if figure.goal else ""
            print(f"{figure.name}: {figure.value} {figure.unit}{goal}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
