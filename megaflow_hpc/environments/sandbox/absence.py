"""Whether a sandbox at rest has nothing at a path, told from the host: no container is started to learn that."""

from __future__ import annotations

import os
from pathlib import PurePosixPath

from megaflow_hpc.environments.sandbox.rootfs.writable import LayerPaths, leads

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def nothing_at(paths: LayerPaths, path: str) -> bool:
    """Whether there is nothing at the absolute ``path``, or an empty directory that the layer alone has.

    ``False`` also where it cannot be told: a link or a deletion is in the way, the image has something there or is not
    unpacked. Nothing may run in the sandbox. No link of the layer is followed.
    """
    parts = PurePosixPath(path).parts[1:]
    return (
        ".." not in parts
        and _nothing_in_layer(paths, parts)
        and (paths.image is not None and not leads(paths.image, parts))
    )


def _nothing_in_layer(paths: LayerPaths, parts: tuple[str, ...]) -> bool:
    try:
        place = os.open(paths.upper, _DIRECTORY)
    except OSError:
        return False
    try:
        for part in parts:
            below = os.open(part, _DIRECTORY, dir_fd=place)
            os.close(place)
            place = below
        return not os.listdir(place)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        os.close(place)
