"""The benchmark of image staging, in its small form: real images, real ranks, real cache."""

from __future__ import annotations

import argparse

from tests.bench import images


def test_with_room_for_a_quarter_every_image_is_copied_hardly_more_than_once() -> None:
    parser = argparse.ArgumentParser()
    images.add_arguments(parser)
    shape = {"images": 24, "samples": 6, "ranks": 2, "slots": 4, "kilobytes": 100, "budget": 0.25, "hold": 0.01}
    said: list[str] = []
    arguments = parser.parse_args([f"--{name}={value}" for name, value in shape.items()])
    copied, peak, here, *_ = images.run(arguments, said.append)
    assert len(said) == 2
    assert 1.0 <= copied.value <= 1.1
    assert 0 < peak.value <= 1.0
    assert here.n == 24 * 6
