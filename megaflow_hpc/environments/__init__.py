"""Sandboxes on plain Apptainer (``sandbox``), images (``images``) and builds of Dockerfiles (``builds``).

Agents and verifiers get sandboxes here. An :class:`ApptainerProvider` takes a :class:`SandboxSpec` and returns an
:class:`ApptainerSandbox`, the only implementation of :class:`megaflow_hpc.types.Sandbox`. This room knows nothing of
tasks, agents or models. The names are imported on first use, which keeps imports of single modules fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaflow_hpc.environments.sandbox.provider import ApptainerProvider as ApptainerProvider
    from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox as ApptainerSandbox
    from megaflow_hpc.environments.sandbox.snapshot import Snapshot as Snapshot
    from megaflow_hpc.environments.sandbox.spec import SandboxSpec as SandboxSpec

_HOME = {
    "ApptainerProvider": "sandbox.provider",
    "ApptainerSandbox": "sandbox.sandbox",
    "SandboxSpec": "sandbox.spec",
    "Snapshot": "sandbox.snapshot",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
