"""Makes a failing input small."""

from __future__ import annotations

import time
from collections.abc import Callable


def smaller(data: bytes, fails: Callable[[bytes], bool], seconds: float) -> bytes:
    """Returns a part of an input that still fails, as small as the time allows."""
    deadline = time.monotonic() + seconds
    step = max(len(data) // 2, 1)
    while True:
        position, shrunk = 0, False
        while position < len(data):
            if time.monotonic() > deadline:
                return data
            without = data[:position] + data[position + step :]
            if fails(without):
                data, shrunk = without, True
            else:
                position += step
        if step == 1 and not shrunk:
            return data
        step = max(step // 2, 1)
