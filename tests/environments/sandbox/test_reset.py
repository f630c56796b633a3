"""A reset removes everything that ran before, and each rollout of a campaign starts clean."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.types import Network, Task
from tests.support.harbor_tasks import write_solved_task
from tests.support.rollouts import attempts
from tests.support.sandboxes import Start

LOOK = (
    "ls -A /tmp /dev/shm; ls -d /kept /opt 2>&1; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 500'; pwd"
)


async def test_a_reset_leaves_no_process_and_no_file(start: Start, scratch: Path) -> None:
    sandbox = await start(workdir="/w")
    clean = (await sandbox.exec(LOOK)).stdout
    for _ in range(3):
        await sandbox.exec(
            "touch /kept /tmp/kept /dev/shm/kept; rm -rf /opt; echo bad > /etc/profile; setsid sleep 500 &"
        )
        old = sandbox.pid
        await sandbox.reset()
        assert sandbox.pid != old
        assert (await sandbox.exec(LOOK)).stdout == clean
        assert (await sandbox.exec("grep -c bad /etc/profile")).stdout == "0\n"
    await start.close()
    assert not list((scratch / "owners").glob(f"{os.getpid()}-*"))


@pytest.mark.parametrize(
    ("campaign", "task", "given"),
    [
        *(("none", "gateway", "none"), ("gateway", "gateway", "gateway"), ("host", "gateway", "gateway")),
        *(("none", None, "none"), ("host", None, "host"), ("host", "none", "none"), ("gateway", "host", "gateway")),
    ],
)
def test_the_network_is_the_narrower_of_what_the_campaign_gives_and_the_task_allows(
    campaign: Network, task: Network | None, given: Network
) -> None:
    environment = EnvironmentConfig(network=campaign)
    assert environment.network_of(Task("t", "", "base", "/t", network=task)) == given


def test_every_rollout_starts_clean(rootfs: str, tmp_path: Path) -> None:
    solution = "test ! -e /stain && touch /stain && echo 42 > answer"
    tasks = {str(n): read_harbor_task(write_solved_task(tmp_path / "tasks", f"task{n}", solution)) for n in range(3)}
    found = attempts(tasks, {"base": rootfs}, {}, tmp_path, at_once=1)
    assert [ended.reward for ended in found.values()] == [1, 1, 1]
