"""One rank of the benchmark ``images``: leases images, holds them for a given time, and prefetches.

``python -m tests.bench.image_rank CACHE BYTES SLOTS``; JSON lines on standard input and output.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.cache.cache import ImageCache, Prefetcher
from megaflow_hpc.host.apptainer import find_apptainer


def main(cache_dir: str, budget: str, slots: str) -> None:
    """Executes the requests on standard input until it ends."""
    cache = ImageCache(Path(cache_dir), find_apptainer(), budget_bytes=int(budget), budget_inodes=1 << 40)
    speaking = threading.Lock()

    def say(message: dict[str, Any]) -> None:
        with speaking:
            print(json.dumps(message), flush=True)

    def rollout(message: dict[str, Any]) -> None:
        began = time.monotonic()
        try:
            lease = cache.ready(message["image"])
            here = lease is not None
            lease = lease or cache.acquire(message["image"])
            waited = time.monotonic() - began
            time.sleep(message["hold_s"])
            lease.release()
        except Exception as error:
            say({"id": message["id"], "error": repr(error)})
            return
        say({"id": message["id"], "waited_s": waited, "here": here})

    ahead = Prefetcher(cache, lambda _: False)
    with ThreadPoolExecutor(int(slots)) as rollouts:
        for line in sys.stdin:
            message = json.loads(line)
            if "order" in message:
                ahead.order(message["order"])
            else:
                rollouts.submit(rollout, message)
    ahead.close()
    say({"copied_bytes": cache.copied_bytes})


if __name__ == "__main__":
    main(*sys.argv[1:])
