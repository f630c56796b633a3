"""Inspect's own checks of a sandbox provider, which pytest collects in Inspect's environment."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from megaflow_hpc.environments import SandboxSpec
from megaflow_hpc.integrations import inspect_ai as provider
from megaflow_hpc.integrations.sandboxes import acquire_provider, release_provider

IMAGE = os.environ["MEGAFLOW_TEST_BASE_SIF"]
ROOT_MAY = "root may read and write any file, as in Inspect's own checks of Docker"
ONE_USER = "a sandbox has one user"
EXPECTED_TO_FAIL = {
    "root": {
        "test_read_file_not_allowed": ROOT_MAY,
        "test_write_text_file_without_permissions": ROOT_MAY,
        "test_write_binary_file_without_permissions": ROOT_MAY,
        "test_exec_as_user": ONE_USER,
    },
    "agent": {"test_exec_as_user": ONE_USER},
}


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["root", "agent"])
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[provider.ApptainerSandboxEnvironment]:
    owner = object()
    spec = SandboxSpec(IMAGE, workdir="/workspace", user=None if request.param == "root" else request.param)
    sandbox = await acquire_provider(owner).start(spec)
    yield provider.ApptainerSandboxEnvironment(sandbox)
    await sandbox.stop()
    await release_provider(owner)


@pytest.fixture
def sandbox_env(
    shared: provider.ApptainerSandboxEnvironment, request: pytest.FixtureRequest
) -> provider.ApptainerSandboxEnvironment:
    user = "root" if shared._sandbox.spec.user is None else "agent"
    if reason := EXPECTED_TO_FAIL[user].get(request.node.originalname):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    return shared
