"""Inspect's own checks pass in these sandboxes, and an evaluation of inspect-evals runs in them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.viewers_environment import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the environment may have to be made

INI = "[pytest]\nasyncio_mode = auto\nasyncio_default_test_loop_scope = session\n"
EVALUATE = """
import json, sys
from inspect_ai import eval
from inspect_ai.model import ModelOutput, ModelUsage, get_model
def said(output):
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return output
calls = [("bash", {"command": "pwd; ls; echo inside > mark; cat mark"}), ("submit", {"answer": "done"})]
answers = [said(ModelOutput.for_tool_call("mockllm/model", name, arguments)) for name, arguments in calls]
model = get_model("mockllm/model", custom_outputs=answers)
(log,) = eval("inspect_evals/ipi_coding_agent", model=model, sandbox="megaflow_hpc", limit=1, log_dir=sys.argv[1])
sample = log.samples[0]
tools = [message.text for message in sample.messages if message.role == "tool"]
print(json.dumps([log.status, str(log.error), tools, list(sample.scores)]))
"""


def test_inspects_own_checks_of_a_sandbox_provider_pass(tmp_path: Path, viewers_python: Path, base_sif: Path) -> None:
    """Run all of them as an ordinary user, and as root those that need not wait for a timeout."""
    (tmp_path / "pytest.ini").write_text(INI)
    checks = ROOT / "tests" / "support" / "inspect_checks.py"
    command = [viewers_python, "-m", "pytest", "-q", "-c", tmp_path / "pytest.ini", "--noconftest", checks]
    command += ["-p", "no:cacheprovider", "-k", "agent or (root and not timeout and not large)"]
    variables = environment(MEGAFLOW_TEST_BASE_SIF=str(base_sif), MEGAFLOW_SCRATCH=str(tmp_path / "scratch"))
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "76 passed, 7 deselected, 5 xfailed" in done.stdout


def test_an_evaluation_of_inspect_evals_runs_in_these_sandboxes(
    tmp_path: Path, viewers_python: Path, base_sif: Path
) -> None:
    """Let Inspect find the provider by the entry point that the wheel has, and keep the task's compose file."""
    package = tmp_path / "installed" / "megaflow_hpc-0.1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: megaflow-hpc\nVersion: 0.1.0\n")
    lines = (ROOT / "pyproject.toml").read_text().partition("[project.entry-points.inspect_ai]\n")[2].splitlines()
    (package / "entry_points.txt").write_text(f"[inspect_ai]\n{lines[0]}\n".replace('"', ""))
    variables = environment(
        PYTHONPATH=f"{package.parent}:{ROOT}",
        MEGAFLOW_IMAGES=f"*/ipi_coding_agent/docker/Dockerfile={base_sif}",
        MEGAFLOW_SCRATCH=str(tmp_path / "scratch"),
    )
    command = [viewers_python, "-c", EVALUATE, tmp_path / "logs"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    status, error, tools, scores = json.loads(done.stdout.splitlines()[-1])
    assert (status, error) == ("success", "None"), done.stdout
    assert tools[0].startswith("/workspace\n")
    assert tools[0].rstrip().endswith("inside")
    assert scores == ["ipi_scorer"]
    assert list((tmp_path / "scratch").glob("*/owners/*")) == []
