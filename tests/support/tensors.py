"""Files of weights that belong to no model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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


def model_without_weights(folder: Path, **config: Any) -> Path:
    """Writes ``config.json`` and the header of the weights of a dense model. A size of ``None`` is left out."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "vocab_size": 1000}
    sizes |= {name: size for name, size in config.items() if name in sizes and isinstance(size, int)}
    hidden, inside = sizes["hidden_size"], sizes["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for number in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inside, hidden) for name in ("gate", "up", "down")}
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    folder.mkdir(parents=True, exist_ok=True)
    headers(folder / "model.safetensors", shapes)
    said = {"num_attention_heads": 4, "model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **config}
    (folder / "config.json").write_text(json.dumps({name: value for name, value in said.items() if value is not None}))
    return folder


def raw_tensors(path: Path) -> dict[str, bytes]:
    """Returns the bytes of each tensor of a safetensors file."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    places = {name: tensor["data_offsets"] for name, tensor in json.loads(data[8:size]).items() if name[0] != "_"}
    return {name: data[size + begin : size + end] for name, (begin, end) in places.items()}
