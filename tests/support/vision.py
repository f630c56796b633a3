"""Rollouts that show images, as an engine with the tiny vision-language model would have recorded them."""

from __future__ import annotations

import math
import random
from array import array
from typing import Any

from megaflow_hpc.trajectory import Image, ImageSpan, TokenSequence, Trajectory
from tests.support.samples import image
from tests.support.training import Uniform

PLACEHOLDER, IMAGE_START, IMAGE_END = 259, 260, 261
"""Ids of ``launchers/tiny_model.py --vision``."""
SQUARE = 28
"""Pixels of a token's side."""
WORDS = 262
"""Size of the model's vocabulary."""


def show(one: TokenSequence, shown: Image) -> None:
    """Puts an image at the beginning of a sequence."""
    count = (shown.width // SQUARE) * (shown.height // SQUARE)
    tokens = [IMAGE_START, *[PLACEHOLDER] * count, IMAGE_END]
    one.images = [ImageSpan(1, count, shown.sha256)] + [
        span._replace(start=span.start + len(tokens)) for span in one.images
    ]
    for name, value in (("logprobs", math.nan), ("loss_mask", 0), ("weight_versions", -1)):
        column: Any = getattr(one, name)
        setattr(one, name, array(column.typecode, [value] * len(tokens)) + column)
    one.tokens = array("i", tokens) + one.tokens


class SeeingPods(Uniform):
    """Pods whose rollouts begin with one to three images of several sizes, or with none."""

    def store(self, block: int, trajectory: Trajectory, epoch: int = 0, damage: str = "") -> None:
        draw = random.Random(trajectory.id)
        for one in trajectory.sequences:
            for _ in range(draw.randint(0, 3)):
                width, height = draw.choice([(28, 28), (56, 28), (28, 56), (84, 56)])
                shown = image(width, height, draw.randint(0, 2))
                show(one, shown)
                trajectory.images[shown.sha256] = shown
        super().store(block, trajectory, epoch, damage)
