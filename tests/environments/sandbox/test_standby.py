"""Mode ``persistent``: sandboxes that stand by, and a reset that leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megaflow_hpc import open_trajectories
from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.sandboxes import sandbox_spec
from megaflow_hpc.types import Network, Task
from tests.support.harbor_tasks import write_task

LOOK = (
    "ls -A /tmp /dev/shm; ls -d /kept /opt 2>&1; cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[s]leep 500'; pwd"
)


async def standing_by(provider: ApptainerProvider) -> ApptainerSandbox:
    """The one sandbox that stands by, once it does."""
    for _ in range(1000):
        ready = [sandbox for sandboxes in provider._standby._ready.values() for sandbox in sandboxes]
        if ready:
            return ready[0]
        await asyncio.sleep(0.02)
    raise AssertionError("nothing stands by after 20 s")


def test_a_reset_leaves_no_process_and_no_file_and_takes_what_stands_by(rootfs: str, scratch: Path) -> None:
    async def main() -> None:
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(SandboxSpec(rootfs, workdir="/w", mode="persistent")) as sandbox:
                clean = (await sandbox.exec(LOOK)).stdout
                for _ in range(3):
                    await sandbox.exec(
                        "touch /kept /tmp/kept /dev/shm/kept; rm -rf /opt; echo bad > /etc/profile; setsid sleep 500 &"
                    )
                    spare, old = await standing_by(provider), sandbox.pid
                    await sandbox.reset()
                    assert sandbox.pid != old
                    assert sandbox.directory == spare.directory
                    assert (await sandbox.exec(LOOK)).stdout == clean
                    assert (
                        await sandbox.exec("cmp /etc/profile /etc/profile; grep -c bad /etc/profile")
                    ).stdout == "0\n"
        assert not list((scratch / "owners").glob(f"{os.getpid()}-*"))

    asyncio.run(main())


def test_a_start_takes_what_stands_by_and_a_stop_keeps_nothing_used(rootfs: str, scratch: Path) -> None:
    async def main() -> None:
        spec = SandboxSpec(rootfs, mode="persistent")
        async with ApptainerProvider(scratch) as provider:
            first = await provider.start(spec)
            await first.exec("touch /kept")
            spare = await standing_by(provider)
            await first.stop()
            second = await provider.start(spec)
            assert second is spare
            assert (await second.exec("ls /kept")).exit_code != 0
            other = await provider.start(SandboxSpec(rootfs, mode="persistent", env={"A": "b"}))
            assert (await other.exec('echo "$A"')).stdout == "b\n"

    asyncio.run(main())


def test_what_cannot_be_proved_clean_is_not_handed_out(rootfs: str, scratch: Path) -> None:
    async def main() -> None:
        spec = SandboxSpec(rootfs, mode="persistent")
        async with ApptainerProvider(scratch) as provider:
            sandbox = await provider.start(spec)
            for tamper in ("command", "file", "death"):
                spare = await standing_by(provider)
                assert spare.used() == ""
                if tamper == "command":
                    await spare.exec("true")
                elif tamper == "file":
                    Path(spare.directory, "layer", "upper", "planted").write_text("x")
                else:
                    assert spare._bundle.container is not None
                    await spare._bundle.container.kill()
                assert spare.used()
                await sandbox.reset()
                assert sandbox.directory != spare.directory
                assert (await sandbox.exec("ls /planted")).exit_code != 0

    asyncio.run(main())


def test_a_task_has_the_mode_of_its_source_else_its_own_else_the_campaigns(
    rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    toml = '[metadata]\nsandbox_mode = "{}"\n[environment]\ndocker_image = "base"\n'
    for name, mode in (("lasting", "persistent"), ("fresh", "ephemeral")):
        write_task(tmp_path / "own", name, toml.format(mode))
    write_task(tmp_path, "silent", '[environment]\ndocker_image = "base"\n')
    for name in ("forced", "other"):
        write_task(tmp_path / "source", name, toml.format("ephemeral"))
    config = CampaignConfig.model_validate(
        {
            "name": "modes",
            "tasks": ["own/*", "silent", {"path": "source/*", "include": ["forced"], "mode": "persistent"}],
            "agent": "nop",
            "environment": {"mode": "ephemeral", "network": "none"},
        }
    )
    tasks = load_tasks([source.model_dump() for source in config.tasks], tmp_path)

    async def main() -> dict[str, bool]:
        found = {}
        async with ApptainerProvider(scratch) as provider:
            for task in tasks:
                spec = replace(
                    sandbox_spec(task, {"base": rootfs}, config.environment), env={"TASK": task.id}
                )  # nobody else's stands by
                async with await provider.start(spec):
                    found[task.id] = await provider.standing_by(spec)
        return found

    assert asyncio.run(main()) == {"fresh": False, "lasting": True, "silent": False, "forced": True}


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


def test_a_campaign_of_mode_persistent_runs_and_every_rollout_starts_clean(make_campaign: Callable[..., Path]) -> None:
    campaign = make_campaign(3, solution="test ! -e /stain && touch /stain && echo 42 > answer")
    campaign.write_text(campaign.read_text().replace("{network: none,", "{mode: persistent, network: none,"))
    command = [sys.executable, "-m", "megaflow_hpc", "run", campaign, "--launcher", "local", "--json", "--ranks", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "mode: persistent" in Path(result["run"], "campaign.yaml").read_text()
    with open_trajectories(result["run"]) as store:
        assert sorted(trajectory.reward for trajectory in store) == [0, 0, 0, 1, 1, 1]
