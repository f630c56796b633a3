"""Replaces the sandbox of a task without an image, whose agent only takes part in a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from megaflow_hpc.errors import UserCodeError
from megaflow_hpc.types import ExecResult, Task


class NoSandbox:
    """A sandbox without a container or files. Every operation raises an error that blames the calling code.

    Args:
        task: The task, which error messages name.
    """

    breaches: Sequence[Any] = ()

    def __init__(self, task: Task) -> None:
        self._task = task

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        """Raises :class:`UserCodeError`, as do the other operations."""
        self._refuse("exec")

    async def upload(self, source: str, target: str) -> None:
        self._refuse("upload")

    async def download(self, source: str, target: str) -> None:
        self._refuse("download")

    async def read(self, path: str, limit: int = 0) -> bytes | None:
        self._refuse("read")

    async def listen(self, port: int = 0) -> Any:
        self._refuse("listen")

    async def kill_processes(self) -> None:
        """Does nothing, because there are no processes."""

    async def end_processes(self) -> None:
        """Does nothing, because there are no processes."""

    def _refuse(self, operation: str) -> NoReturn:
        raise UserCodeError(f"sandbox.{operation}: task {self._task.id} has no sandbox (image: none); name an image")
