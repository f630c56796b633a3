"""A user's key for a separate verifier is in no stored file, whatever the tests do with it."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from urllib.parse import quote

import pytest

from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.harbor.verifier import Mask
from megaflow_hpc.tasks.sandboxes import sandbox_spec, verification_context
from megaflow_hpc.tasks.steps import prepare, verify
from megaflow_hpc.types import Verdict
from tests.support.harbor_tasks import write_files

KEY = "sk-judge/+0 äöü=1234567890"
TOML = """\
[environment]
docker_image = "base"
workdir = "/app"
[verifier]
environment_mode = "separate"
[verifier.env]
JUDGE_KEY = "${JUDGE_KEY}"
"""
TEST = """\
python3 - <<'P'
import base64, json, os, sys, urllib.parse
key = os.environ["JUDGE_KEY"]
print(key, "x" + key, urllib.parse.quote(key), file=sys.stderr)
for before in ("", "a", "ab"):
    print(base64.b64encode((before + key + "z").encode()).decode())
print(key.encode().hex(), json.dumps(key), repr(key))
open("/logs/verifier/log.bin", "wb").write(b"\\xff" + key.encode())
json.dump({"reward": 1, f"of {key[:20]}{key[20:]}": 2}, open("/logs/verifier/reward.json", "w"), ensure_ascii=False)
P
cp /logs/verifier/log.bin /logs/artifacts/ 2>/dev/null
"""


def stored(verdict: Verdict) -> bytes:
    names = [*verdict.rewards, *(one.name for one in verdict.artifacts), verdict.output, verdict.error]
    return b"\n".join([*(name.encode() for name in names), *(one.data for one in verdict.artifacts)])


@pytest.mark.parametrize("fails", [False, True])
def test_a_key_of_the_users_is_in_nothing_that_is_stored(
    rootfs: str, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setenv("MEGAFLOW_TASK_ENV", "JUDGE_KEY")
    test = TEST + ('echo "$JUDGE_KEY" > /logs/verifier/reward.json\n' if fails else "")
    files = {"task.toml": TOML, "instruction.md": "x", "tests/test.sh": test}
    task = read_harbor_task(write_files(tmp_path / "judged", files))
    images, environment = {"base": rootfs}, EnvironmentConfig(network="none")

    async def main() -> tuple[Verdict, str]:
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(sandbox_spec(task, images, environment)) as sandbox:
                await prepare(task, sandbox)
                seen = await sandbox.exec("env; cat /proc/*/environ 2>/dev/null")
                await sandbox.end_processes()
                context = verification_context(task, environment, images, provider.start)
                return await verify(task, sandbox, context), seen.stdout

    verdict, agents = asyncio.run(main())
    assert "JUDGE_KEY" not in agents
    assert "[masked]" in verdict.output
    kept = stored(verdict)
    assert fails == bool(verdict.error)
    for form in (KEY.encode(), KEY[:20].encode(), quote(KEY).encode(), KEY.encode().hex().encode(), KEY[-10:].encode()):
        assert form not in kept
    assert base64.b64encode(KEY.encode())[:-4] not in kept


def test_short_values_are_no_secrets() -> None:
    mask = Mask(["1", "", "yes"])
    assert mask.text("1 yes") == "1 yes"
