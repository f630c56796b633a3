"""What a campaign file may be made of, asked before anything of it is read: the file may be somebody else's.

HDF5 reads more than the file that is opened: external and virtual storage name other files, links lead to them, and a
filter's number has a library loaded. A kilobyte can claim 10^12 rows. So a file is *sound* only if it is groups of
plain columns behind hard links, with the filters that we write, and of lengths that a file of its size can hold. It is
*whole* if its columns also are those of the schema, in type and length. Both are asked of each dataset, never of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t, h5z

from megaflow_hpc.trajectories.hdf5.schema import COLUMNS, OPTIONAL, ROOT_ATTRIBUTES, STRING, TEXT

PLAUSIBLE = 256
"""Largest sum of all columns' bytes, in multiples of the file's: deflate ends at 1032, token columns at about 5."""
ALWAYS = 256 << 20
"""Sum of all columns' bytes that a file of any size may claim: little enough to be read."""
CHUNK_BYTES = 64 << 20
"""Largest chunk. Ours are of at most 1 MiB, or of 1024 strings."""
MEMBERS = 4096
"""Most columns of a group; of ``rewards`` they are as many as the verifiers named."""
_ATTRIBUTES = 64
_ATTRIBUTE_ENTRIES = 4096

_FILTERS = ((), (h5z.FILTER_SHUFFLE,), (h5z.FILTER_DEFLATE,), (h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE))
_LAYOUTS = (h5d.COMPACT, h5d.CONTIGUOUS, h5d.CHUNKED)
_CLASSES = (h5t.INTEGER, h5t.FLOAT, h5t.STRING)
_TEXTS = frozenset(name.encode() for name, _ in ROOT_ATTRIBUTES if name != "format_version")

_DTYPES = {column.dtype: np.dtype(column.dtype) for column in COLUMNS.values() if column.dtype not in (STRING, TEXT)}

_EXTENTS = {
    "n": "trajectories/id",
    "m": "sequences/trajectory",
    "t": "turns/sequence",
    "k": "tokens/id",
    "q": "messages/offset",
    "qb": "messages/json",
    "a": "attempts/attempt",
    "f": "artifacts/name",
    "fb": "artifacts/bytes",
}
"""Extent → the column that has this length. For messages it is the offsets, which have one more entry."""


TARGETS = {
    "trajectories/sequence_offset": "sequences/trajectory",
    "trajectories/turn_offset": "turns/sequence",
    "trajectories/attempt_offset": "attempts/attempt",
    "sequences/token_offset": "tokens/id",
    "messages/offset": "messages/json",
    "artifacts/offset": "artifacts/bytes",
    "trajectories/message_offset": "messages/offset",
}
"""The column whose length an offset column ends with; ``message_offset`` ends with one less."""


class UnsoundError(ValueError):
    """A file is made of something that no campaign file has; the message says of what and where."""


class Found(NamedTuple):
    """A dataset of a sound file: ``kind`` is its numpy type, or ``text`` in UTF-8, or else what it is in words."""

    kind: Any
    shape: tuple[int, ...]


def sound(file: h5py.File) -> dict[str, Found]:
    """Makes sure that reading a file reads that file, and no more than its size can hold; returns its columns by path.

    Args:
        file: of somebody else it is read through :class:`~megaflow_hpc.trajectories.hdf5.heaps.Watched`, to the end of
            its attributes.

    Raises:
        UnsoundError: it is made of something that we never write.
        OSError, RuntimeError, LookupError, TypeError, ValueError: it is damaged.
    """
    if file.id.get_create_plist().get_sizes() != (8, 8):
        raise UnsoundError("addresses or lengths that are not of 8 bytes")
    _attributes("/", file.id, _TEXTS)
    found: dict[str, Found] = {}
    total = 0
    for name, item in _members("/", file.id):
        columns = [(name, item)]
        if isinstance(item, h5g.GroupID):
            columns = [(f"{name}/{column}", dataset) for column, dataset in _members(f"/{name}/", item)]
        for path, dataset in columns:
            if not isinstance(dataset, h5d.DatasetID):
                raise UnsoundError(f"/{path}: a group within a group, expected columns")
            found[path], claimed = _dataset(f"/{path}", dataset)
            total += claimed
    size = file.id.get_filesize()
    if total > max(ALWAYS, PLAUSIBLE * size):
        raise UnsoundError(f"claims columns of {total} bytes in a file of {size}; expected at most {PLAUSIBLE} times")
    return found


def faults(found: Mapping[str, Found]) -> Iterator[str]:
    """Yields what the columns of a sound file lack to be those of the schema: presence, type, one dimension."""
    for path, column in COLUMNS.items():
        if path not in found:
            if path not in OPTIONAL:
                yield f"/{path}: is missing"
            continue
        kind, shape = found[path]
        if len(shape) != 1:
            yield f"/{path}: is no one-dimensional dataset"
        elif column.dtype in (STRING, TEXT):
            if kind != "text":
                yield f"/{path}: type {kind}, expected UTF-8 strings"
        elif kind != _DTYPES[column.dtype]:
            yield f"/{path}: type {kind}, expected {column.dtype}"


def lengths(found: Mapping[str, Found]) -> Iterator[str]:
    """Yields which columns of a file without :func:`faults` are not as long as the others of their kind."""
    for path, column in COLUMNS.items():
        extent = column.extent.removesuffix("+1")
        if path in found and extent in _EXTENTS:
            (entries,), expected = found[path].shape, found[_EXTENTS[extent]].shape[0] + column.is_offset
            expected -= extent == "q"
            if entries != expected:
                yield f"/{path}: {entries} entries, expected {expected}"
    rows = found["trajectories/id"].shape
    for path, (kind, shape) in found.items():
        if path.startswith("rewards/") and (shape != rows or kind != _DTYPES["float32"]):
            yield f"/{path}: {kind} {shape}, expected float32 {rows}"


def _members(place: str, group: Any) -> Iterator[tuple[str, Any]]:
    """Yields the members of a group, each opened: groups and datasets behind hard links."""
    count = group.get_num_objs()
    if count > MEMBERS:
        raise UnsoundError(f"{place}: {count} members, expected at most {MEMBERS}")
    links: list[tuple[bytes, int]] = []
    group.links.iterate(lambda name, info: links.append((name, info.type)), info=True)
    for raw, kind in links:
        name = raw.decode("utf-8", "backslashreplace")
        if kind != h5l.TYPE_HARD:
            raise UnsoundError(f"{place}{name}: a link to another place, expected a column in this file")
        item = h5o.open(group, raw)
        if not isinstance(item, h5d.DatasetID | h5g.GroupID):
            raise UnsoundError(f"{place}{name}: a {type(item).__name__}, expected a column")
        yield name, item


def _dataset(path: str, dataset: Any) -> tuple[Found, int]:
    """Makes sure that a dataset is plain; returns what it is, and the bytes that its entries take in memory."""
    plist = dataset.get_create_plist()
    layout = plist.get_layout()
    if layout not in _LAYOUTS or (layout == h5d.CONTIGUOUS and plist.get_external_count()):
        raise UnsoundError(f"{path}: its bytes lie in other files")
    kind, space = dataset.get_type(), dataset.get_space()
    size = _plain(path, kind, space)
    text = kind.get_class() == h5t.STRING
    if layout == h5d.CHUNKED:
        filters = tuple(plist.get_filter(number)[0] for number in range(plist.get_nfilters()))
        if filters not in _FILTERS:
            raise UnsoundError(f"{path}: filters {list(filters)}, expected shuffle and deflate")
        if math.prod(plist.get_chunk()) * size > CHUNK_BYTES:
            raise UnsoundError(f"{path}: chunks of {math.prod(plist.get_chunk()) * size} bytes")
    elif text and kind.is_variable_str():
        raise UnsoundError(f"{path}: strings of variable length that are not in chunks")
    _attributes(path, dataset)
    utf8 = text and kind.get_cset() == h5t.CSET_UTF8
    shape = space.get_simple_extent_dims()
    return Found("text" if utf8 else "strings that are not in UTF-8" if text else kind.dtype, shape), math.prod(
        shape
    ) * size


def _attributes(path: str, item: Any, texts: frozenset[bytes] = frozenset()) -> None:
    """Makes sure that attributes are few and plain: numbers, or one text each."""
    count = h5a.get_num_attrs(item)
    if count > _ATTRIBUTES:
        raise UnsoundError(f"{path}: {count} attributes, expected at most {_ATTRIBUTES}")
    for number in range(count):
        attribute = h5a.open(item, index=number)
        name = attribute.name
        place = f"{path}: attribute {name.decode('utf-8', 'backslashreplace')}"
        kind, space = attribute.get_type(), attribute.get_space()
        _plain(place, kind, space)
        text = kind.get_class() == h5t.STRING
        entries = space.get_simple_extent_npoints()
        if entries > (1 if text else _ATTRIBUTE_ENTRIES):
            raise UnsoundError(f"{place}: {entries} entries")
        if name in texts and not text:
            raise UnsoundError(f"{place}: expected a text")
        if text and entries and kind.is_variable_str():  # its bytes lie in a heap, which is looked at now
            attribute.read(np.empty(attribute.shape, attribute.dtype), mtype=h5t.py_create(attribute.dtype))


def _plain(place: str, kind: Any, space: Any) -> int:
    """Makes sure that a type is of numbers or text, and returns the bytes of an entry."""
    if kind.get_class() not in _CLASSES:
        raise UnsoundError(f"{place}: {type(kind).__name__}, expected numbers or text")
    if space.get_simple_extent_type() not in (h5s.SIMPLE, h5s.SCALAR):
        raise UnsoundError(f"{place}: holds nothing")
    return int(kind.get_size())
