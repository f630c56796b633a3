"""Verification in real sandboxes: rewards, faulty tests, and cheating agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.harbor.rewards import parse_rewards, read_rewards
from megaflow_hpc.tasks.steps import prepare, verify
from megaflow_hpc.types import Task, Verdict
from tests.support.harbor_tasks import resolve_images, write_task

TOML = (
    '[environment]\ndocker_image = "base"\nworkdir = "/app"\n[verifier]\ntimeout_sec = 600\nenv = { MODE = "strict" }\n'
)
HURRIED = TOML.replace("600", "2")
Judge = Callable[..., Verdict]


@pytest.fixture
def judge(rootfs: str, scratch: Path, tmp_path: Path) -> Judge:
    """Verify a task with the test script ``test`` after the agent ran ``agent``."""

    def run(test: str, agent: str = "true", toml: str = TOML) -> Verdict:
        path = write_task(tmp_path, toml=toml)
        (path / "environment" / "data").write_text("data\n")
        (path / "tests" / "test.sh").write_text(test)
        task = read_harbor_task(path)

        async def main() -> Verdict:
            async with ApptainerProvider(scratch) as provider:
                async with await provider.start(SandboxSpec(rootfs, workdir=task.workdir, env=task.env)) as sandbox:
                    await prepare(task, sandbox)
                    await sandbox.exec(agent)
                    return await verify(task, sandbox)

        return asyncio.run(main())

    return run


def test_tests_run_in_the_work_directory_with_the_environment_uploaded(judge: Judge) -> None:
    verdict = judge(
        "cat data answer; echo $MODE; pwd; echo err >&2; echo 0.25 > /logs/verifier/reward.txt", "echo 42 > answer"
    )
    assert (verdict.reward, verdict.rewards, verdict.error) == (0.25, {"reward": 0.25}, "")
    assert verdict.output == "data\n42\nstrict\n/app\n\n--- stderr ---\nerr\n"


def test_named_rewards_and_a_failing_script(judge: Judge) -> None:
    verdict = judge("""echo '{"style": 0.5, "reward": 1}' > /logs/verifier/reward.json; exit 3""")
    assert (verdict.reward, verdict.rewards) == (1.0, {"style": 0.5, "reward": 1.0})


def test_a_verifier_without_a_reward_is_an_error(judge: Judge) -> None:
    verdict = judge("exit 7")
    assert verdict.reward == 0.0
    assert "no reward" in verdict.error
    assert "ended with 7" in verdict.error


def test_a_test_that_hangs_is_ended_and_reported(judge: Judge) -> None:
    verdict = judge("echo 1 > /logs/verifier/reward.txt; sleep 100000 & sleep 100000", toml=HURRIED)
    assert (verdict.reward, verdict.error) == (0.0, "tests/test.sh ran longer than its 2 s")


def test_an_endless_printer_is_bounded(judge: Judge) -> None:
    verdict = judge("yes; true", toml=HURRIED)
    assert "longer than" in verdict.error
    assert len(verdict.output) < 2_000_000


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("reward.json", "{", "not JSON"),
        ("reward.json", "{}", "names no reward"),
        ("reward.json", '{"reward": 1, "turn.0": NaN}', "turn.0 is nan; expected a finite number"),
    ],
)
def test_garbled_rewards_are_named(name: str, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_rewards(name, text)


def test_two_reward_files_count_if_they_agree(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"style": 0.5, "reward": 1}')
    (tmp_path / "reward.txt").write_text("1.0\n")
    assert read_rewards(tmp_path) == {"style": 0.5, "reward": 1.0}
    (tmp_path / "reward.txt").write_text("0")
    with pytest.raises(ValueError, match=r"reward\.json says 1 and reward\.txt 0"):
        read_rewards(tmp_path)
    (tmp_path / "reward.txt").write_text("")
    with pytest.raises(ValueError, match=r"reward\.txt is empty"):
        read_rewards(tmp_path)


def test_rewards_of_turns_need_one_of_the_rollout_and_do_not_count_as_names(tmp_path: Path) -> None:
    turns = {f"turn.{number}": 0.5 for number in range(200)}
    (tmp_path / "reward.json").write_text(json.dumps({**turns, "reward": 1}))
    assert read_rewards(tmp_path) == {**turns, "reward": 1.0}
    (tmp_path / "reward.json").write_text(json.dumps(turns))
    with pytest.raises(ValueError, match="no reward, only rewards of turns"):
        read_rewards(tmp_path)


def test_rewards_may_be_bare_numbers() -> None:
    assert parse_rewards("reward.txt", " 1\n") == {"reward": 1.0}
    assert parse_rewards("reward.json", "0.5") == {"reward": 0.5}


def test_an_unhealthy_environment_fails_with_its_command(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    toml = TOML + '[environment.healthcheck]\ncommand = "echo sick >&2; exit 1"\nretries = 2\ninterval_sec = 0.1\n'
    task = read_harbor_task(write_task(tmp_path, toml=toml))

    async def main() -> None:
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(SandboxSpec(rootfs)) as sandbox:
                await prepare(task, sandbox)

    with pytest.raises(SandboxError, match=r"not healthy: .*sick"):
        asyncio.run(main())


def test_a_dockerfile_is_built_onto_the_mapped_base_in_its_order(
    small_rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    dockerfile = """\
    FROM org/base:1
    ENV WHO="the builder"
    WORKDIR /srv
    COPY one.txt sub ./
    RUN cat one.txt > seen \\
     && pwd >> seen && echo "$WHO" >> seen
    COPY --chmod=755 two.sh /usr/local/bin/two
    RUN rm one.txt && two >> seen
    WORKDIR inner
    """
    path = write_task(tmp_path, toml="", dockerfile=dockerfile)
    (path / "environment" / "sub").mkdir()
    for name, text in (("one.txt", "1\n"), ("two.sh", "#!/bin/sh\necho two\n"), ("sub/three", "3\n")):
        (path / "environment" / name).write_text(text)
    task = read_harbor_task(path)
    images = resolve_images([task], {"org/base:1": small_rootfs}, tmp_path, store=tmp_path / "store")
    again = resolve_images([task], {"org/base:1": small_rootfs}, tmp_path, store=tmp_path / "store")
    assert images == again

    async def use(sandbox: ApptainerSandbox) -> str:
        return (await sandbox.exec('cat ../seen; ls .. ; pwd; echo "$WHO"; ls -d /.megaflow-context')).stdout

    async def main(task: Task) -> str:
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(
                SandboxSpec(images[task.image], workdir=task.workdir, env=task.env)
            ) as sandbox:
                return await use(sandbox)

    assert asyncio.run(main(task)) == "1\n/srv\nthe builder\ntwo\ninner\nseen\nthree\n/srv/inner\nthe builder\n"
