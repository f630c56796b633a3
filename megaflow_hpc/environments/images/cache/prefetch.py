"""Stages images ahead of their use, in the background: the order that was named last counts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from megaflow_hpc.environments.images.cache.cache import ImageCache
from megaflow_hpc.environments.images.cache.parts import Form
from megaflow_hpc.errors import MegaflowError


class Prefetcher:
    """One thread that stages what will be needed next, as far as there is room.

    Args:
        form_of: in which form an image will be used here.
    """

    def __init__(self, images: ImageCache, form_of: Callable[[str], Form]) -> None:
        self._images = images
        self._form_of = form_of
        self._order: Sequence[str] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def order(self, images: Sequence[str]) -> None:
        """Names the images in use here and those that come next, the soonest first; replaces what was named before."""
        with self._changed:
            self._order = list(images)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits ``timeout_s`` seconds at most for the copy that is being made; a later tidying removes what is half
        made."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._order is not None)
                if self._closed:
                    return
                order, self._order = self._order or [], None
            try:
                self._images.prefetch(order, self._form_of, until=lambda: self._closed or self._order is not None)
            except (MegaflowError, OSError) as error:
                # Whoever needs the image will meet the same, and say it where it counts.
                print(f"staging ahead: {error}", file=sys.stderr, flush=True)
