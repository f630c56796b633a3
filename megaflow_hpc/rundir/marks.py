"""Mark files: files whose presence is the message.

::

    RUN/ledger/finished         every block is done; the pod that finished the last one writes it
    RUN/ledger/cancelled        the campaign was cancelled; ``resume`` removes it
    RUN/ledger/leaving/<pod>    this element of a pod array drains and is not requeued

The batch shell of a pod and its rank 0 talk by two files in a directory of their own (``MEGAFLOW_POD_DIR``)::

    drain                       the pod shall drain
    state                       the pod's last word, one of :data:`LAST_WORDS`
"""

from __future__ import annotations

from pathlib import Path

from megaflow_hpc.host.atomic import make_directory
from megaflow_hpc.rundir.layout import RunDir

FINISHED = "ledger/finished"
"""Path of the finished mark in the run directory; the ledger's rules publish it."""
DRAIN = "drain"
STATE = "state"
LAST_WORDS = ("done", "drained", "paused", "lost")
"""All rollouts are stored; blocks were given back; nothing more is started (a limit); another pod took the blocks."""
ORDERLY = LAST_WORDS[:3]
"""The last words of a pod that ended as it should."""


class Marks:
    """The mark files of one run."""

    def __init__(self, run: RunDir) -> None:
        self._finished, self._cancelled = run.path / FINISHED, run.ledger / "cancelled"
        self._leaving: Path = run.ledger / "leaving"

    @property
    def finished(self) -> bool:
        """Whether every block is done."""
        return self._finished.exists()

    def reopen(self) -> None:
        """Withdraws the finished mark, because blocks were added."""
        self._finished.unlink(missing_ok=True)

    @property
    def cancelled(self) -> bool:
        """Whether the campaign was cancelled."""
        return self._cancelled.exists()

    @property
    def over(self) -> bool:
        """Whether the campaign is finished or cancelled: engines and autoscalers leave."""
        return self.finished or self.cancelled

    def cancel(self) -> None:
        """Marks the campaign as cancelled."""
        self._cancelled.touch()

    def uncancel(self) -> None:
        """Removes the mark of a cancelled campaign, if there is one."""
        self._cancelled.unlink(missing_ok=True)

    def leave(self, pod: str) -> None:
        """Marks an element of a pod array (``123_4``) as leaving: it is not requeued when it has drained."""
        make_directory(self._leaving)
        (self._leaving / pod).touch()

    def leaving(self) -> set[str]:
        """Returns the elements that are leaving."""
        return {path.name for path in self._leaving.glob("*")}
