"""Stages images ahead of their use, in the background: the order that was named last counts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from megaflow_hpc.environments.images.cache.cache import ImageCache
from megaflow_hpc.errors import MegaflowError


class Prefetcher:
    """One thread that stages what will be needed next, as far as there is room.

    Args:
        is_flat: whether an image is used as one tree here.
    """

    def __init__(self, images: ImageCache, is_flat: Callable[[str], bool]) -> None:
        self._images = images
        self._is_flat = is_flat
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
                self._images.prefetch(order, self._is_flat, until=lambda: self._closed or self._order is not None)
            except (MegaflowError, OSError) as error:
                # Whoever needs the image will meet the same, and say it where it counts.
                print(f"staging ahead: {error}", file=sys.stderr, flush=True)
