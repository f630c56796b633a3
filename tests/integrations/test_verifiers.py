"""A runtime of verifiers in these sandboxes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.viewers_environment import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the environment may have to be made

USE = """
import asyncio, sys
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.base import Runtime
from megaflow_hpc.integrations.verifiers import MegaflowConfig, MegaflowRuntime, runtime

async def main(image, scratch):
    async with runtime(MegaflowConfig(image=image, scratch=scratch)) as box:
        assert isinstance(box, Runtime) and await box.alive()
        await box.write("deep/file.bin", b"\\xc3\\x28\\x00 end")
        assert await box.read("deep/file.bin") == b"\\xc3\\x28\\x00 end"
        assert await box.read("/app/deep/file.bin", max_bytes=7) == b"\\xc3\\x28\\x00 end"
        for path, limit in (("deep/file.bin", 6), ("gone", None)):
            try:
                await box.read(path, max_bytes=limit)
                raise AssertionError(path)
            except SandboxError as error:
                assert path in str(error)
        view = box.with_env({"NAME": "task"})
        done = await view.run(["sh", "-c", "echo $NAME $OWN; pwd; echo bad >&2; exit 3"], {"OWN": "own"})
        assert (done.exit_code, done.stdout, done.stderr) == (3, "task own\\n/app\\n", "bad\\n"), done
        await box.run_background(["sh", "-c", "echo started; sleep 600"], {}, "server.log")
        for _ in range(100):
            if b"started" in await box.read("server.log"):
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("not started")
        assert box.stopped is False
    assert box.stopped
    try:
        await box.run(["true"], {})
        raise AssertionError("runs after its end")
    except SandboxError:
        pass

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_runtime_keeps_the_contract_of_verifiers_and_leaves_nothing(
    tmp_path: Path, viewers_python: Path, base_sif: Path
) -> None:
    """Read and write files, run programs with variables, leave a server behind, and stop."""
    scratch = tmp_path / "scratch"
    command = [viewers_python, "-c", USE, base_sif, scratch]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((scratch / "owners").iterdir()) == []
