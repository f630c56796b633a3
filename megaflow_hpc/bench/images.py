"""Measures how much is copied to a node that runs far more images than its cache can hold.

The images are small but real: Apptainer built the first, and the others differ in content and digest. Ranks, one
process each, lease them in the order in which a pod's scheduler starts their rollouts. They also prefetch in that
order, into one cache that holds a tenth of the images. A perfect order reads every image once. The rollouts are
simulated: each holds its image for some milliseconds. The code comes with the sources (``tests/bench/images.py``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from megaflow_hpc.bench.arguments import above_zero, add_count
from megaflow_hpc.bench.checkout import from_checkout
from megaflow_hpc.bench.figures import Figure

HELP = "bytes copied to a node whose cache holds a tenth of its images"
EXAMPLES = ("bench images --images 100 --samples 4",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_count(parser, "--images", 500, "distinct images")
    add_count(parser, "--samples", 16, "rollouts of each image")
    add_count(parser, "--ranks", 4, "processes that share the node")
    add_count(parser, "--slots", 8, "rollouts at a time in each of them")
    add_count(parser, "--kilobytes", 400, "size of an image, in kB")
    parser.add_argument(
        "--budget", type=above_zero, default=0.1, metavar="SHARE", help="room, as a share of all images (%(default)s)"
    )
    parser.add_argument(
        "--hold", type=above_zero, default=0.02, metavar="S", help="mean seconds of a rollout (%(default)s)"
    )


def run(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Figure]:
    """Makes small images, runs the ranks of a node over them, and measures what was copied."""
    figures: list[Figure] = from_checkout("images", "bench images").measure(arguments, note)
    return figures
