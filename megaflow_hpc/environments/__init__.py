"""Provides Apptainer sandboxes (``sandbox``), container images (``images``) and Dockerfile builds (``builds``).

An :class:`ApptainerProvider` starts an :class:`ApptainerSandbox` from a :class:`SandboxSpec`. Agents and verifiers run
in these sandboxes. :class:`ApptainerSandbox` is the only implementation of :class:`megaflow_hpc.types.Sandbox`. This
package does not depend on tasks, agents or models. Names are imported lazily, so importing one submodule stays fast.
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
