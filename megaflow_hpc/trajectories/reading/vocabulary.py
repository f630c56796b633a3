"""Looks up the text of token ids in a model's ``tokenizer.json``, to show individual tokens.

A tokenizer's own ``decode`` cannot be used, because it joins tokens, drops leading blanks and cannot show partial
characters. Two encodings of bytes are supported, which cover current models: byte-level (GPT-2's alphabet of 256
printable characters; Qwen, Llama 3, DeepSeek) and SentencePiece (``▁`` for a blank, ``<0x0A>`` for a byte; Llama 2,
Gemma, Mistral).

A run directory keeps the ``tokenizer.json`` of each policy whose model is a local directory. For a campaign file moved
elsewhere, the model directory recorded in the campaign is used if it still exists.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.layout import RunDir

FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 128 << 20
"""Maximum size of a ``tokenizer.json``. The largest known one is 33 MB."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """Maps token ids to text.

    Args:
        tokenizer: The parsed content of a ``tokenizer.json``.

    Raises:
        ValueError: The tokenizer has no vocabulary in a supported format.
    """

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        try:
            vocabulary = tokenizer["model"]["vocab"]
            if isinstance(vocabulary, list):  # Unigram: [piece, score], indexed by id
                vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
            self._pieces = {int(number): str(piece) for piece, number in vocabulary.items()}
            self._special = {int(t["id"]): str(t["content"]) for t in tokenizer.get("added_tokens") or ()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"no vocabulary of a known form ({error!r})") from error
        steps = json.dumps([tokenizer.get("decoder"), tokenizer.get("pre_tokenizer")])
        self._byte_level = '"ByteLevel"' in steps

    def piece(self, token: int) -> str:
        """Returns the text of a token id. Returns an empty string for an unknown id.

        Partial characters are decoded with ``surrogateescape``.
        """
        if token in self._special:
            return self._special[token]
        piece = self._pieces.get(token, "")
        if self._byte_level:
            data = b"".join(_ALPHABET.get(c) or c.encode("utf-8", "surrogatepass") for c in piece)
            return data.decode("utf-8", "surrogateescape")
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)]).decode("utf-8", "surrogateescape")
        return piece.replace("▁", " ")


def load(path: Path) -> Vocabulary:
    """Reads a vocabulary from a ``tokenizer.json``, plain or gzipped, or from a model directory.

    Raises:
        ConfigError: The file is missing or its format is not supported.
    """
    path = path / FILE if path.is_dir() else path
    try:
        data = read_regular(path, MAX_TOKENIZER_BYTES)
        if data[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(MAX_TOKENIZER_BYTES + 1)
            if len(data) > MAX_TOKENIZER_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_TOKENIZER_BYTES >> 20} MiB")
        return Vocabulary(json.loads(data))
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise ConfigError(f"{path}: no {FILE} to read token ids with ({error})") from error


def kept(run: RunDir, policy: str) -> Path:
    """Returns the path at which a run directory stores a policy's tokenizer."""
    return run.path / "tokenizers" / f"{policy}.json.gz"


def find(source: Path, models: Mapping[str, Any], policy: str) -> Path | None:
    """Returns the path of a policy's tokenizer. Returns ``None`` if it does not exist.

    Args:
        source: The run directory or campaign file being read.
        models: The entry ``models`` of the file's ``versions`` attribute. Maps each policy to its model's description,
            which has the key ``path``.
        policy: A key of ``models``.
    """
    run = RunDir(source if source.is_dir() else source.parent)
    candidates = [kept(run, policy)]
    model = models.get(policy)
    path = model.get("path") if isinstance(model, Mapping) else None
    if path and os.path.isabs(str(path)):
        candidates.append(Path(path) / FILE)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _alphabet() -> dict[str, bytes]:
    """Returns the byte that each character of GPT-2's byte-level alphabet stands for.

    Printable bytes map to themselves. All other bytes are represented by characters from code point 256 up.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + number): bytes([byte]) for number, byte in enumerate(others)}


_ALPHABET = _alphabet()
