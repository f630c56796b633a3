"""Lets vLLM's CPU build use its newer model runner, which reports routed experts, without a Triton compiler for CPUs.

vLLM asks for a Triton with the backend ``cpu``, which no package index has. Triton's own interpreter
(``TRITON_INTERPRET=1``) computes the same kernels slowly. It needs no backend, but vLLM looks for one by name. So this
adds the name. Python imports this file at its start if its directory is in ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAME = "triton.backends"


class _AddBackend:
    """Finds :data:`NAME` as usual, and adds a backend when it has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != NAME:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def and_add(module: Any) -> None:
            execute(module)
            from triton.backends.driver import DriverBase  # type: ignore[import-not-found]

            class Driver(DriverBase):
                """A driver that is never active, because the interpreter asks for none."""

                is_active = classmethod(lambda cls: False)

            compiler = next(iter(module.backends.values())).compiler
            module.backends["cpu"] = module.Backend(compiler=compiler, driver=Driver)

        spec.loader.exec_module = and_add
        return spec


if os.environ.get("TRITON_INTERPRET") == "1":
    sys.meta_path.insert(0, _AddBackend())  # type: ignore[arg-type]
