"""Files of weights that belong to no model."""

from __future__ import annotations

import json
import struct


def safetensors(content: bytes, name: str = "w") -> bytes:
    """Returns a safetensors file with one tensor of bytes."""
    header = json.dumps({name: {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}).encode()
    return struct.pack("<Q", len(header)) + header + content
