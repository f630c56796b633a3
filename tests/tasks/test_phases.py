"""What happens after and between agents: steps, users, artifacts and separate verifiers, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megaflow_hpc.agents.without_model import OracleAgent
from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import StepVerdict, VerificationContext
from megaflow_hpc.tasks.harbor.artifacts import MAX_FILE, Collected, to_artifacts
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.format import combine, may_continue, steps_of
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.steps import prepare, verify
from megaflow_hpc.tasks.validation import Validation, validate
from megaflow_hpc.types import Sandbox, Task, Verdict
from tests.support.harbor_tasks import SEPARATE, STEPS, resolve_images, write_files, write_steps


def validated(task: Task, images: dict[str, str], scratch: Path) -> Validation:
    async def main() -> Validation:
        async with ApptainerProvider(scratch) as provider:
            async for found in validate([task], images, OracleAgent(), provider):
                return found
        raise AssertionError

    return asyncio.run(main())


def test_a_step_is_a_task_with_its_own_instruction_times_and_tests(tmp_path: Path) -> None:
    task = read_harbor_task(write_steps(tmp_path))
    first, second = steps_of(Task.from_dict(json.loads(json.dumps(task.to_dict()))))
    assert (first.instruction, second.instruction) == ("Do the first.\n", "Do the second.\n")
    assert (first.agent_timeout_s, second.agent_timeout_s) == (630, 650)
    assert (first.verifier_timeout_s, second.verifier_timeout_s) == (620, 610)
    assert (first.user, second.user) == ("1000", None)
    assert HarborData.of(second).verifier.env == {"WHO": "second"}
    assert steps_of(first) == [first]


def test_steps_share_a_sandbox_and_are_judged_one_by_one(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    task = read_harbor_task(write_steps(tmp_path))
    found = validated(task, {"base": rootfs}, scratch)
    # Without help the first step's reward is below its minimum, so the second step does not start.
    assert (found.before.error, found.before.reward) == ("", 0.0)
    assert "step second" not in found.before.output
    assert (found.after.error, found.after.reward) == ("", 1.5)
    assert "begun\nsolved one by 1" in found.after.output  # an ordinary uid; the sandbox's root is 0
    assert "solved two by 0" in found.after.output


def test_rewards_of_steps_are_combined_as_the_task_says(tmp_path: Path) -> None:
    task = read_harbor_task(write_steps(tmp_path))
    one = StepVerdict("first", Verdict(1.0, {"reward": 1.0}, "a"))
    two = StepVerdict("second", Verdict(0.0, {"reward": 0.0, "extra": 3.0}, "b"))
    assert combine(task, [one, two]).rewards == {"reward": 0.5, "extra": 1.5}
    final = msgspec.structs.replace(HarborData.of(task), reward_strategy="final").put(task)
    assert combine(final, [one, two]).rewards == {"reward": 0.0, "extra": 3.0}
    broken = StepVerdict("second", Verdict(0.0, {"reward": 0.0}, error="no reward"))
    assert combine(task, [one, broken]).error == "step second: no reward"
    assert combine(task, [one, broken]).reward == 0.5
    assert combine(final, [one, broken]).reward == 0.0
    unnamed = StepVerdict("first", broken.verdict)  # it failed before a verifier named the task's rewards
    assert combine(task, [unnamed, StepVerdict("second", Verdict(1.0, {"solved": 1.0}))]).rewards == {"solved": 0.5}
    assert combine(task, [unnamed, broken]).reward == 0.0
    turns = StepVerdict("first", Verdict(1.0, {"reward": 1.0, "turn.0": 1.0}))
    for each, reward in ((task, 0.5), (final, 0.0)):
        assert combine(each, [turns, two]).rewards["turn.0"] == 1.0, "a turn belongs to one step"
        assert combine(each, [turns, broken]).rewards == {"reward": reward, "turn.0": 1.0}
    steps = steps_of(task)
    assert may_continue(steps[0], one.verdict)
    assert not may_continue(steps[0], two.verdict)
    assert not may_continue(steps[1], one.verdict)  # it names no `extra`
    assert not may_continue(steps[0], broken.verdict)
    assert may_continue(steps[1], broken.verdict)  # like a verifier that gave 0 to both


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("steps/second/instruction.md", None), r"walk/steps/second/instruction\.md: missing"),
        (("steps/second/tests/test.sh", None), r"walk/steps/second/tests/test\.sh: missing"),
        (("steps/second/trajectory.json", "{}"), r"second/trajectory\.json: agents here cannot start from an earlier"),
        (("task.toml", STEPS.replace('"second"', '"First"')), r"task\.toml:23: \[steps\] name = 'First': .* no other"),
        (("task.toml", STEPS.replace('"second"', '"third"')), r"walk/steps/third: missing; every step"),
        (("task.toml", STEPS.replace("timeout_sec = 630", "timeout_sec = 0")), r"\.toml:18: \[steps\.agent\] timeou"),
        (("task.toml", STEPS.replace('"mean"', '"best"')), r"\.toml:2: multi_step_reward_strategy = 'best': .*final"),
    ],
)
def test_a_wrong_step_names_file_line_value_and_remedy(
    tmp_path: Path, change: tuple[str, str | None], said: str
) -> None:
    task = write_steps(tmp_path)
    name, text = change
    if text is None:
        (task / name).unlink()
    else:
        (task / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_harbor_task(task)


def test_files_of_a_task_that_lead_out_of_it_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    for name in ("instruction.md", "tests", "solution", "environment"):
        files = {"task.toml": '[environment]\ndocker_image = "base"\n', "instruction.md": "x", "tests/test.sh": "true"}
        task = write_files(tmp_path / name, files)
        if name == "tests":
            (task / "tests" / "test.sh").unlink()
            (task / "tests").rmdir()
        (task / name).unlink(missing_ok=True)
        (task / name).symlink_to(tmp_path if name != "instruction.md" else tmp_path / "secret")
        with pytest.raises(ConfigError, match=rf"{name}(/Dockerfile)?: is a link out of the task"):
            read_harbor_task(task)


# --- artifacts and separate verifiers -------------------------------------------------------------------------------

JUDGE = """\
#!/usr/bin/env python3
import os, pathlib
seen = [str(p) for p in ("/app/answer", "/data/a", "/data/b.tmp", "/app/hidden", "/evil") if os.path.exists(p)]
print(seen)
ok = seen == ["/app/answer", "/data/a"] and pathlib.Path("/app/answer").read_text() == "42"
pathlib.Path("/logs/verifier/reward.txt").write_text(str(int(ok)))
"""


def task_of(root: Path, test: str, verifier: str = "") -> Task:
    """Writes a task with this test script and reads it."""
    toml = f'[environment]\ndocker_image = "base"\nworkdir = "/app"\n{verifier}'
    files = {"task.toml": toml, "instruction.md": "x", "tests/test.sh": test}
    return read_harbor_task(write_files(root / "task", files))


def verdict_of(task: Task, agent: str, images: dict[str, str], scratch: Path, **context: Any) -> Verdict:
    async def main() -> Verdict:
        async with ApptainerProvider(scratch) as provider:

            def spec(task: Task) -> SandboxSpec:
                return SandboxSpec(images[task.image], workdir=task.workdir, env=task.env)

            async with await provider.start(spec(task)) as sandbox:
                await prepare(task, sandbox)
                await sandbox.exec(agent, timeout_s=600)

                async def start(other: Task) -> Sandbox:
                    assert sandbox.pid is None, "of the agent's sandbox only the files are left"
                    return await provider.start(spec(other))

                return await verify(task, sandbox, VerificationContext(start=start, **context))

    return asyncio.run(main())


def test_a_separate_verifier_sees_the_artifacts_and_nothing_else(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    files = {"task.toml": SEPARATE, "instruction.md": "x", "tests/test.sh": JUDGE}
    task = read_harbor_task(write_files(tmp_path / "apart", files))
    agent = "printf 42 > hidden; mkdir /data; echo a > /data/a; echo b > /data/b.tmp; touch /evil; rm -rf /usr/bin/bash"
    verdict = verdict_of(task, agent, {"base": rootfs}, scratch)
    assert (verdict.reward, verdict.error) == (1.0, ""), verdict.output
    kept = {artifact.name: artifact.data for artifact in verdict.artifacts}
    manifest = json.loads(kept.pop("artifacts/manifest.json"))
    assert kept.pop("artifacts/logs/artifacts/first") == b"0\n"  # the agent's user
    assert kept.pop("artifacts/logs/artifacts/second") != b"0\n"  # its own
    assert kept == {"artifacts/app/answer": b"42", "artifacts/kept/a": b"a\n"}
    assert [(entry["source"], entry["kept"], entry["error"]) for entry in manifest] == [
        ("/logs/artifacts", 2, ""),
        ("/app/answer", 1, ""),
        ("/data", 1, ""),
        ("/missing", 0, "not there"),
    ]


def test_a_verifier_of_its_own_image_brings_its_tests(small_rootfs: str, scratch: Path, tmp_path: Path) -> None:
    files = {
        "task.toml": SEPARATE.replace('environment_mode = "separate"', "[verifier.environment]\nmemory_mb = 500\n"),
        "instruction.md": "x",
        "tests/Dockerfile": "FROM base\nWORKDIR /judge\nCOPY . /tests/\n",
        "tests/test.sh": "pwd; cat /tests/known; [ $(cat /app/answer) = $(cat /tests/known) ] && x=1 || x=0\n"
        "echo $x > /logs/verifier/reward.txt",
        "tests/known": "42",
    }
    task = read_harbor_task(write_files(tmp_path / "own", files))
    images = resolve_images([task], {"base": small_rootfs}, tmp_path, store=tmp_path / "store")
    assert len(images) == 2
    verdict = verdict_of(task, "printf 42 > hidden", images, scratch)
    assert (verdict.reward, verdict.error) == (1.0, ""), verdict.output
    assert verdict.output.startswith("/judge\n42")
    assert verdict_of(task, "mkdir /tests; printf 41 | tee hidden /tests/known", images, scratch).reward == 0.0


def test_artifacts_are_bounded_and_never_links(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    task = task_of(tmp_path, "echo 1 > /logs/verifier/reward.txt; echo '{}' > /logs/verifier/ctrf.json\n")
    agent = f"cd /logs/artifacts; head -c {MAX_FILE + 1} /dev/zero > big; echo s > small; ln -s /etc/passwd l; "
    verdict = verdict_of(task, agent + "python3 -c \"import os; os.mkfifo('p')\"", {"base": rootfs}, scratch)
    kept = {artifact.name: artifact.data for artifact in verdict.artifacts}
    manifest = json.loads(kept.pop("artifacts/manifest.json"))
    assert kept == {"artifacts/logs/artifacts/small": b"s\n", "verifier/ctrf.json": b"{}\n"}
    assert manifest[0]["too_large_or_too_many"] == ["artifacts/logs/artifacts/big"]


def test_an_artifact_whose_name_no_trajectory_can_store_is_left_out(tmp_path: Path) -> None:
    deep = Path(*["d" * 200] * 5)
    (tmp_path / deep).mkdir(parents=True)
    for name in ("kept", "left" * 10):
        (tmp_path / deep / name).write_text("x")
    kept = to_artifacts([Collected("/app", "app", tmp_path)])
    assert [artifact.name for artifact in kept] == [f"artifacts/app/{deep}/kept", "artifacts/manifest.json"]
    assert len(json.loads(kept[1].data)[0]["too_large_or_too_many"]) == 1


def test_an_agent_whose_tar_hangs_costs_its_artifacts_only(
    rootfs: str, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaflow_hpc.tasks.harbor.artifacts.DOWNLOAD_TIMEOUT_S", 1.0)
    task = task_of(tmp_path, "echo 0 > /logs/verifier/reward.txt\n")
    agent = "touch /logs/artifacts/a; printf '#!/bin/sh\\nsleep 1000\\n' > /t; chmod 755 /t; mv /t /usr/bin/tar"
    verdict = verdict_of(task, agent, {"base": rootfs}, scratch)
    assert (verdict.reward, verdict.error) == (0.0, "")
    assert b"reading the artifacts took longer than 1 s" in verdict.artifacts[0].data


def test_the_verifier_has_its_own_user_and_network(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    test = "id -u; tail -n +3 /proc/net/dev | cut -d: -f1; echo 1 > /logs/verifier/reward.txt; touch made; exit 0\n"
    task = task_of(tmp_path, test, '[verifier]\nuser = 1000\nnetwork_mode = "no-network"\n')
    verdict = verdict_of(task, "true", {"base": rootfs}, scratch)
    assert (verdict.reward, verdict.error) == (1.0, ""), verdict.output
    uid, *interfaces = verdict.output.split()
    assert uid != "0"
    assert interfaces == ["lo"]


async def test_a_sandbox_that_is_reset_has_nothing_of_its_verification(
    rootfs: str, scratch: Path, tmp_path: Path
) -> None:
    task = task_of(tmp_path, "echo 1 > /logs/verifier/reward.txt\n", '[verifier]\nuser = "1000"\n')

    async with ApptainerProvider(scratch) as provider:
        async with await provider.start(SandboxSpec(rootfs, workdir=task.workdir)) as sandbox:
            await prepare(task, sandbox)
            assert (await verify(task, sandbox)).reward == 1.0
            await sandbox.reset()
            assert (await sandbox.exec("id -u; ls -d /tests /logs")).stdout == "0\n"
