"""Reads the headers of safetensors files without loading the tensors, and validates them as strictly as an engine.

::

    8 bytes      length N of the header, little-endian
    N bytes      JSON: {NAME: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [BEGIN, END]}, "__metadata__": {…}}
    the rest     the tensors, contiguous

(https://github.com/huggingface/safetensors, "Format".)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import open_regular, read_regular

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
"""Maximum length of a header in bytes, as in the safetensors library."""
BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


class Tensor(NamedTuple):
    """A tensor's entry in the header."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors in one file's header, by name.

    Raises:
        ConfigError: The file is truncated or not a valid safetensors file. The message says what is wrong.
    """

    def broken(why: str) -> ConfigError:
        return ConfigError(f"{path}: {why}, so no engine can load it; save the weights again")

    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise broken(f"is not a safetensors file ({size} bytes, its header would have {length})")
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        places = sorted((*map(int, entry["data_offsets"]), name) for name, entry in entries.items())
        tensors = {name: Tensor(str(e["dtype"]), tuple(map(int, e["shape"]))) for name, e in entries.items()}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise broken(f"has a header that cannot be read ({error!r:.100})") from None
    end = 0
    for begin, behind, name in places:
        tensor = tensors[name]
        bits = math.prod(tensor.shape) * BITS.get(tensor.dtype, 0)
        if begin != end or behind < begin or (tensor.dtype in BITS and bits != 8 * (behind - begin)):
            raise broken(f"has tensor {name!r} of {tensor.dtype} {list(tensor.shape)} at bytes {begin} to {behind}")
        end = behind
    if 8 + length + end != size:
        raise broken(f"has {size} bytes, and its header describes {8 + length + end}")
    return tensors


def read_directory(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors in all safetensors files of a directory, by name.

    Raises:
        ConfigError: A file is invalid, or a file listed in the index is missing.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= read_header(path)
    index = folder / INDEX
    try:
        named = set(json.loads(read_regular(index))["weight_map"].values())
    except FileNotFoundError:
        return tensors
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index}: cannot be read ({error!r:.100}); save the weights again") from None
    for name in sorted(map(str, named)):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name}: is missing, although {INDEX} names it; save the weights again")
    return tensors


def why_not_of(new: Mapping[str, Tensor], served: Mapping[str, Tensor]) -> str:
    """Returns the reason why tensors cannot belong to the served model. Returns an empty string if no reason is found.

    Libraries add prefixes (``model.`` or ``model.language_model.``) and drop tied tensors when they save a model. The
    check therefore only compares the shapes of tensors with equal names, and requires some names to share a suffix.
    """
    for name in new.keys() & served.keys():
        if new[name].shape != served[name].shape:
            return f"tensor {name!r} has shape {list(new[name].shape)}, in the served model {list(served[name].shape)}"
    ends = [{".".join(name.split(".")[-2:]) for name in tensors} for tensors in (new, served)]
    if new and served and not ends[0] & ends[1]:
        return f"it has {min(new)!r} and no tensor of the served model, which has {min(served)!r}"
    return ""
