"""First commands over chains of 1, 10 and 60 layers, side by side: ``python -m tests.bench.layers BASE.sif``.

Each layer has a file of its own, a file that all have, and a directory. Every image has a topmost layer that no other
has: so each is staged and leased as the one image of a task is. ``stage`` is that, when all is here but the topmost
layer. ``first`` is from asking for a sandbox whose image is here to the end of its first command, where the image is
new to the process, so by Apptainer; ``clone`` the same for the next one over it. ``lookup`` is a command that asks for
names that no layer has. Rounds go through the counts by turns.
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
    """The entries of one layer."""
    return {"opt/": "", "opt/chain/": "", f"opt/chain/{name}": "x", "opt/last": name, f"opt/{name}/": ""}


async def one(provider: ApptainerProvider, image: str) -> dict[str, float]:
    """Seconds of one image: to unpack it, to start two sandboxes to their first command, and to look names up."""
    began = time.perf_counter()
    await provider.stage(image)
    found = {"stage": time.perf_counter() - began}
    for name in ("first", "clone"):
        asked = time.perf_counter()
        async with await provider.start(SandboxSpec(image)) as sandbox:
            assert (await sandbox.exec(["/bin/true"])).exit_code == 0
            ready = time.perf_counter()
            assert (await sandbox.exec(_LOOKUP)).exit_code == 0
            looked = time.perf_counter()
        found |= {name: ready - asked, "lookup": looked - ready}
    return found


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
        for name in ("stage", "first", "clone", "lookup")
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", help="a SIF or a directory")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    figures = asyncio.run(main(os.path.abspath(arguments.base), arguments.rounds))
    ratios = {name: figures[name]["60"] / figures[name]["1"] for name in ("first", "clone")}
    print(json.dumps({"ms": figures, "over 60 layers to over 1": ratios, "goal": GOAL}, indent=1))
