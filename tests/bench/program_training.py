"""Unmodified programs feed one training step through a real vLLM on CPUs, and each recorded id is the engine's.

    python -m tests.bench.program_training [--programs mini-swe-agent codex] [--directory DIR]

The model has random weights, tokens of one byte and a long context, because the first prompt of such a program is tens
of thousands of bytes. It writes random bytes, which no program takes for a tool call, so each rollout ends after a call
or a few. The task's test gives random rewards, so every group trains. The trainer recomputes each sampled token's
log-probability from the recorded ids: ids of another token or place would differ from the engine's by whole units.
It needs ``MEGAFLOW_ENGINE_VENV``, ``MEGAFLOW_AGENTS`` and ``MEGAFLOW_TEST_BASE_SIF``, and takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training.plan import TrainingFiles
from tests.bench.arguments import add_image, image_of
from tests.support.harbor_tasks import write_files
from tests.support.places import TINY_MODEL

CONTEXT = 131_072
MAX_MISMATCH = 1e-4
"""Largest mean difference between the engine's and the trainer's log-probabilities, both float32."""
TASK = {
    "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 3000\n'
    '[environment]\ndocker_image = "base"\nworkdir = "/app"\n',
    "instruction.md": "Write a poem into the file poem.\n",
    "tests/test.sh": "echo 0.$(od -An -N2 -tu2 /dev/urandom | tr -d ' ') > /logs/verifier/reward.txt\n",
}


def main() -> int:
    """Runs the campaign, checks it, and prints a line for each rollout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=["mini-swe-agent", "codex"], metavar="AGENT")
    parser.add_argument("--directory", metavar="DIR", help="work there and keep the run; default: a temporary one")
    add_image(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megaflow-programs-") as temporary:
        return run(Path(given.directory or temporary).absolute(), given.programs, image_of(given))


def run(folder: Path, programs: list[str], image: str) -> int:
    """Runs the campaign below ``folder``."""
    python = Path(os.environ["MEGAFLOW_ENGINE_VENV"]) / "bin" / "python"
    subprocess.run([python, TINY_MODEL, folder / "model", "--context", str(CONTEXT)], check=True, stdout=sys.stderr)
    write_files(folder / "tasks" / "poem", TASK)
    arguments = {"max-model-len": CONTEXT, "dtype": "float32", "distributed-executor-backend": "uni"}
    arguments |= {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
    campaign = {
        "name": "programs",
        "tasks": "tasks/*",
        "agent": [{"name": name, "max_tokens": 1500, "max_turns": 3} for name in programs],
        "samples": 2,
        "model": {"engine": "vllm", "path": "model", "gpus": 0, "args": arguments},
        "environment": {"network": "gateway", "images": {"base": image}},
        "training": {
            "policies": {"default": {"dtype": "float32", "microbatch": CONTEXT}},
            "batch": len(programs),
            "staleness": 0,
            "steps": 1,
        },
    }
    (folder / "campaign.yaml").write_text(yaml.safe_dump(campaign))
    command = [sys.executable, "-m", "megaflow_hpc", "run", str(folder / "campaign.yaml"), "--launcher", "local"]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, env=environment, check=False)
    if not done.stdout:
        return 1
    return report(RunDir(json.loads(done.stdout)["run"]), programs, time.monotonic() - began)


def report(run: RunDir, programs: list[str], seconds: float) -> int:
    """Prints what became of the rollouts and of the step. Returns 1 if something is not as it should be."""
    wrong = []
    with open_trajectories(run.path) as store:
        for row in store:
            found = row.trajectory()
            sampled = sum(sum(sequence.loss_mask) for sequence in found.sequences)
            prompt = found.turns[0].token_start if found.turns else 0
            print(
                f"{found.id}: {found.status}, {len(found.turns)} calls, first prompt {prompt} tokens, "
                f"{sampled} sampled, {len(found.sequences)} sequences, {found.inexact} inexact"
            )
            if found.inexact or not sampled:
                wrong.append(f"{found.id}: {found.inexact} inexact turns, {sampled} sampled tokens {found.error}")
        agents = set(store.column("agent"))
    if agents != set(programs):
        wrong.append(f"rollouts of {sorted(agents)}")
    lines = TrainingFiles(run, "default").metrics.read_text().splitlines()
    for line in map(json.loads, lines):
        print(f"step {line['step']}: {line.get('rollouts')} rollouts, mismatch {line['mismatch']:.1e}; {seconds:.0f} s")
        if not line["mismatch"] <= MAX_MISMATCH:
            wrong.append(f"engine and trainer disagree by {line['mismatch']}")
    if len(lines) != 1:
        wrong.append(f"{len(lines)} steps instead of one")
    print("\n".join(wrong) or "all is as it should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
