"""Build images from Dockerfiles, and unpack them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images import sif
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.layered import is_layered, layer_path, read_layered
from megaflow_hpc.environments.images.layers.view import LayerView, of_blob
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping
from megaflow_hpc.environments.images.store import ImageStore


def build(
    context: Path,
    text: str,
    images: Mapping[str, str],
    *,
    args: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    said: list[str] | None = None,
    **limits: Any,
) -> Path:
    """Build the Dockerfile ``text`` in ``context`` with a store next to it; return the image.

    Args:
        said: gets the lines that the build reports.
        limits: limits of the builder.
    """
    context.mkdir(exist_ok=True)
    path = context / "Dockerfile"
    path.write_text(text, encoding="utf-8")
    store = Images(ImageStore(context.parent / "store"), builder=Builder(**limits))
    if said is not None:
        store.say = said.append
    dockerfile = Dockerfile(path, build_args=args)
    return store.resolve_dockerfile(dockerfile, ImageMapping(images, context.parent), timeout_s=timeout_s)


def layers_of(image: Path) -> LayerView:
    """Return a view of what the layers of an image have, without their base. :func:`unpacked` takes much longer."""
    return LayerView([of_blob(layer_path(image, layer.digest)) for layer in reversed(read_layered(image).layers)])


def unpacked(image: Path, target: Path) -> Path:
    """Unpack the files of an image to ``target``, which must not exist."""
    if is_layered(image):
        packed = target.with_name(f"{target.name}.sif")
        Builder().export(image, packed)
        image = packed
    assert sif.unpack(image, target, sif.system_partition(image))
    return target
