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
from tests.support.warm import WarmPython

CLOSED = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1")
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Network settings by which ranks of one node meet, as in ``trainer.sh``."""


def engine_python() -> Path:
    """Return the interpreter that has torch and transformers."""
    venv = os.environ.get("MEGAFLOW_ENGINE_VENV")
    if not venv:
        pytest.fail("MEGAFLOW_ENGINE_VENV is not set; run the suite with launchers/test, which provides it")
    return Path(venv) / "bin" / "python"


SETTINGS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


_warm: list[WarmPython] = []
"""The Python that ran the last script."""


def _python() -> WarmPython:
    """Return a Python with transformers, which takes five seconds of CPU to import."""
    if not _warm or not _warm[-1].alive():
        modules = ("torch.distributed", "transformers.models.auto.modeling_auto", "transformers.models.llama")
        _warm[:] = [WarmPython(*modules, python=str(engine_python()), variables=SETTINGS)]
    return _warm[-1]


def run_ranks(script: str, folder: Path, *arguments: object, ranks: int = 1) -> Any:
    """Run ``script`` in ``folder`` with one thread per rank; return the JSON of rank 0's last line."""
    own = [{}] if ranks == 1 else _of_ranks(ranks, folder)
    result = _python().run_several(script, *map(str, arguments), variables=own, folder=folder)
    return _last_line(result)


def _of_ranks(count: int, folder: Path) -> list[dict[str, str]]:
    """Return the variables of each rank, as torchrun sets them."""
    shared = {"MEGAFLOW_TRAINER_STORE": f"file://{folder / secrets.token_hex(4)}.store", **LOOPBACK}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def run_apart(script: str, folder: Path, ranks: int = 1) -> Any:
    """Run ``script`` in new processes, several of which torchrun starts; return the JSON of rank 0's last line."""
    path, meeting = folder / "script.py", folder / secrets.token_hex(4)
    path.write_text(script)
    environment, several = {**os.environ, **SETTINGS}, []
    if ranks > 1:
        environment |= {**LOOPBACK, "MEGAFLOW_TRAINER_STORE": f"file://{meeting}.store"}
        several = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}", *CLOSED]
        several += [f"--rdzv-endpoint={meeting}.rendezvous"]
    command = [engine_python(), *several, path]
    return _last_line(subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment))


def _last_line(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return json.loads(result.stdout.splitlines()[-1])
