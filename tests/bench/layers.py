"""First commands over chains of 1, 10 and 60 layers, side by side: ``python -m tests.bench.layers BASE.sif``.

Each layer has a file of its own, a file that all have, and a directory. Every sandbox has an image of its own, whose
topmost layer no other has: so each is staged, leased and started as the one image of a task is. ``start`` is from
asking for a sandbox whose image is here to the end of its first command, ``stage`` what comes before it the first time,
when all is here but the topmost layer. ``lookup`` is a command that asks for names that no layer has. Rounds go through
the counts by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.images.store import ImageStore
from tests.support.layers import Entries, add_image, add_layer

COUNTS = (1, 10, 60)
GOAL = 1.2
_LOOKUP = "i=0; while [ $i -lt 500 ]; do [ -e /usr/lib/none$i ]; i=$((i+1)); done"


def entries(name: str) -> Entries:
    """What one layer holds."""
    return {"opt/": "", "opt/chain/": "", f"opt/chain/{name}": "x", "opt/last": name, f"opt/{name}/": ""}


async def one(provider: ApptainerProvider, image: str) -> dict[str, float]:
    """Seconds of one image: to stage it, to start a sandbox and run a command in it, and to look names up."""
    began = time.perf_counter()
    await provider.stage(image)
    staged = time.perf_counter()
    async with await provider.start(SandboxSpec(image)) as sandbox:
        assert (await sandbox.exec(["/bin/true"])).exit_code == 0
        ready = time.perf_counter()
        assert (await sandbox.exec(_LOOKUP)).exit_code == 0
        looked = time.perf_counter()
    return {"stage": staged - began, "start": ready - staged, "lookup": looked - ready}


async def main(base: str, rounds: int) -> dict[str, dict[str, float]]:
    """Returns medians in milliseconds by figure and number of layers."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in COUNTS}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared, tempfile.TemporaryDirectory() as scratch:
        store = ImageStore(Path(shared, "store"))
        chain = [add_layer(store, entries(f"shared{number}")) for number in range(max(COUNTS))]
        async with ApptainerProvider(scratch) as provider:
            for turn in range(-1, rounds):  # the first stages what all share, and is not counted
                for count in COUNTS:
                    own = add_layer(store, entries(f"own{turn}-{count}"))
                    figures = await one(provider, add_image(store, base, [*chain[: count - 1], own]))
                    if turn >= 0:
                        found[count].append(figures)
    return {
        name: {str(count): 1000 * statistics.median(each[name] for each in found[count]) for count in COUNTS}
        for name in ("stage", "start", "lookup")
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", help="a SIF or a directory")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    figures = asyncio.run(main(os.path.abspath(arguments.base), arguments.rounds))
    ratio = figures["start"]["60"] / figures["start"]["1"]
    print(json.dumps({"ms": figures, "start over 60 layers to over 1": ratio, "goal": GOAL, "met": ratio <= GOAL}))
