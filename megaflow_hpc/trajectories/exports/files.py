"""Publishes directories atomically, opens compressed files, and makes safe file names."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import fsync
from megaflow_hpc.host.files import open_regular, remove_tree
from megaflow_hpc.resources import imported


@contextlib.contextmanager
def published_directory(path: Path) -> Iterator[Path]:
    """Yields a temporary sibling directory (mode 0700) that replaces ``path`` if the block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        if path.exists():  # rename cannot swap two directories, so move the old one away first
            aside = path.with_name(f"{temporary.name}.old")
            os.rename(path, aside)
            try:
                os.rename(temporary, path)
            except OSError:
                os.rename(aside, path)
                raise
            remove_tree(aside)
        else:
            os.rename(temporary, path)
        fsync(path.parent)
    finally:
        remove_tree(temporary, ignore_errors=True)


@contextlib.contextmanager
def writing(path: Path, compress: str) -> Iterator[IO[bytes]]:
    """Opens a new binary file for writing, with compression ``none``, ``gz`` or ``zst``."""
    with open(path, "xb", buffering=1 << 20) as file:
        if compress == "gz":
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=6, mtime=0) as packed:
                yield packed  # type: ignore[misc]
        elif compress == "zst":
            with imported("zstandard").ZstdCompressor(level=3).stream_writer(file, closefd=False) as packed:
                yield packed
        else:
            yield file


@contextlib.contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """Opens a binary file for reading. Detects compression from the first bytes, not from the file name."""
    with open_regular(path) as file:
        magic = file.read(4)
        file.seek(0)
        if magic[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=file) as packed:
                yield packed  # type: ignore[misc]
        elif magic == b"\x28\xb5\x2f\xfd":
            with imported("zstandard").ZstdDecompressor().stream_reader(file) as packed:
                yield io.BufferedReader(packed)
        else:
            yield file


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, line bytes) of a plain or compressed file.

    Raises:
        ConfigError: The file is corrupt.
    """
    number = 0
    try:
        with reading(path) as file:
            for line in file:
                number += 1
                yield number, line
    except EOFError as error:
        raise ConfigError(f"{path}: ends early ({error}); copy it again") from None
    except (OSError, zlib.error) as error:
        if isinstance(error, OSError) and error.filename:
            raise
        raise ConfigError(f"{path}: line {number + 1} cannot be unpacked ({error}); copy it again") from None
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # compared by name, because the package may be missing
            raise
        raise ConfigError(f"{path}: line {number + 1} cannot be unpacked ({error}); copy it again") from None


def safe_name(text: str) -> str:
    """Converts ``text`` to a single path component. Characters other than letters, digits and ``._+-`` become ``_``."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._+-") else "_" for c in text)
    return plain if plain.strip(".") else f"_{plain}"
