"""A real vLLM in an Apptainer image: answers by generate, recorded exactly, and new weights loaded in place.

Not part of the suite, because it starts a vLLM of its own. ``launchers/test tests/model/engines/vllm_image.py``.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.rundir import weights
from tests.support.engines import make_model
from tests.support.serving import Servers, answer_to, conversation

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_vllm_in_an_image_is_recorded_exactly_and_loads_weights(
    servers: Servers, tmp_path: Path, base_sif: Path
) -> None:
    """The image has Python and no compiler: the engine's virtual environment is bound into it, and compiles nothing."""
    venv = os.environ["MEGAFLOW_ENGINE_VENV"]
    models = [make_model(tmp_path / name, seed=seed) for seed, name in enumerate(("tiny", "other"))]
    section = {"engine": "vllm", "path": str(models[0]), "gpus": 0, "python": venv, "image": str(base_sif)}
    (numa,) = Path("/usr/lib").glob("*/libnuma.so.1")  # of the machine's packages, which the image lacks
    binds = [f"{path}:{path}:ro" for path in (venv, numa)]
    args = {"max-model-len": 2048, "dtype": "float32", "enforce-eager": True}
    servers.start({**section, "binds": binds, "args": args}, "default", "--poll-s", "0.3", TORCH_COMPILE_DISABLE="1")
    servers.record(0, timeout_s=600)

    async def turn(number: int) -> set[int]:
        async with ModelGateway(wait_s=60) as gateway:
            gateway.update_endpoints(servers.records())
            model = await gateway.open("t/default/0", "default")
            await answer_to(model, {"messages": conversation("hello"), "max_tokens": 20, "logit_bias": {"256": -100}})
            (sequence,) = (await gateway.close("t/default/0")).sequences
        assert sum(sequence.loss_mask) == 20
        return {v for v, m in zip(sequence.weight_versions, sequence.loss_mask, strict=True) if m}

    assert asyncio.run(turn(0)) == {0}
    weights.publish(servers.run, models[1])
    deadline = time.monotonic() + 60
    while servers.record(0)["weight_version"] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert asyncio.run(turn(1)) == {1}
