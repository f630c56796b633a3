"""Files of weights that belong to no model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path


def safetensors(content: bytes, name: str = "w") -> bytes:
    """Returns a safetensors file with one tensor of bytes."""
    header = json.dumps({name: {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    return struct.pack("<Q", len(header)) + header + content


def headers(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Writes a file of bfloat16 tensors whose values are a hole in the file, so that large models need no disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
