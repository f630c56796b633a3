"""Arguments that several benchmarks have, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
import os

from megaflow_hpc.errors import ConfigError


def add_count(parser: argparse.ArgumentParser, name: str, default: int, help_: str, least: int = 1) -> None:
    """Adds an option that counts something of which there must be at least ``least``."""

    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: give a whole number of at least {least}")
        return int(text)

    parser.add_argument(name, type=whole, default=default, metavar="N", help=f"{help_} (%(default)s)")


def above_zero(text: str) -> float:
    """The value of an option that is a number above 0, such as a time in seconds.

    Raises:
        ArgumentTypeError: it is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value


def add_image(parser: argparse.ArgumentParser) -> None:
    """Adds ``--image``, which :func:`image_of` reads."""
    default = os.environ.get("MEGAFLOW_TEST_BASE_SIF")
    help_ = "image with a shell and python3; default: $MEGAFLOW_TEST_BASE_SIF"
    parser.add_argument("--image", metavar="SIF", default=default, help=help_)


def image_of(arguments: argparse.Namespace, sif: bool = False) -> str:
    """The absolute path of the image to measure with.

    Args:
        sif: a SIF is needed; an unpacked image will not do.

    Raises:
        ConfigError: there is no such image.
    """
    image = arguments.image
    remedy = "name a SIF with python3, such as one that megaflow-hpc images pull docker://python:3.12 makes"
    if not image:
        raise ConfigError(f"--image: missing, and MEGAFLOW_TEST_BASE_SIF is not set; {remedy}")
    if os.path.isdir(image) and not sif and not os.path.lexists(os.path.join(image, "bin", "sh")):
        raise ConfigError(f"--image {image}: a directory without bin/sh, no unpacked image; {remedy}")
    if not os.path.exists(image) or (sif and not os.path.isfile(image)):
        raise ConfigError(f"--image {image}: no such image; {remedy}")
    return os.path.abspath(image)
