"""Run a script with torch in the engine's environment, on one rank or on several as torchrun starts them."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT

CLOSED = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1")
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Network settings by which ranks of one node meet, as in ``trainer.sh``."""


def engine_python() -> Path:
    """Return the interpreter that has torch and transformers."""
    venv = os.environ.get("MEGAFLOW_ENGINE_VENV")
    if not venv:
        pytest.fail("MEGAFLOW_ENGINE_VENV is not set; run the suite with launchers/test, which provides it")
    return Path(venv) / "bin" / "python"


def run_ranks(script: str, folder: Path, *arguments: object, ranks: int = 1, timeout_s: float = 240) -> Any:
    """Run ``script`` in ``folder`` with one thread per rank; return the JSON of rank 0's last line."""
    path, meeting = folder / "script.py", folder / secrets.token_hex(4)
    path.write_text(script)
    several = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", *CLOSED] if ranks > 1 else []
    several += [f"--rdzv-endpoint={meeting}.rendezvous"] if ranks > 1 else []
    own = {"MEGAFLOW_TRAINER_STORE": f"file://{meeting}.store", **LOOPBACK} if ranks > 1 else {}
    result = subprocess.run(
        [engine_python(), *several, path, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **own},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return json.loads(result.stdout.splitlines()[-1])
