"""Sandboxes over plain Apptainer, images, task formats and the verifier. See docs/sandboxes.md."""

from __future__ import annotations

from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.snapshot import Snapshot
from megaflow_hpc.environments.sandbox.spec import SandboxSpec

__all__ = ["ApptainerProvider", "ApptainerSandbox", "SandboxSpec", "Snapshot"]
