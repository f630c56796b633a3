"""Sandboxes over plain Apptainer (``sandbox``) and the images they are made of (``images``).

Agents' and verifiers' code asks for sandboxes here: an :class:`ApptainerProvider` gets a :class:`SandboxSpec` and hands
out :class:`ApptainerSandbox`, the one implementation of :class:`megaflow_hpc.types.Sandbox`. Nothing here knows of
tasks, agents or models. The names are imported on first use: who needs one module does not pay for all.
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
