"""Reads what sandboxes must do without, for nodes on which detection is wrong."""

from __future__ import annotations

import os
from typing import Literal, get_args

from megaflow_hpc.errors import ConfigError

Feature = Literal["clones", "overlay", "nsenter", "program"]
VARIABLE = "MEGAFLOW_SANDBOX_WITHOUT"


def is_without(feature: Feature) -> bool:
    """Returns whether ``MEGAFLOW_SANDBOX_WITHOUT`` names a feature, so that its fallback is used.

    Raises:
        ConfigError: the variable names an unknown feature.
    """
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
    named = [word for word in words if word]
    for word in named:
        if word not in get_args(Feature):
            raise ConfigError(f"{VARIABLE}: {word!r}: expected {', '.join(get_args(Feature))}, separated by commas")
    return feature in named
