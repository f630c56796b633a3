"""A large JSON document without long texts, decoded some hundred kilobytes at a time.

A decoder keeps the interpreter's lock until it is done. So an array or object that is long is taken apart behind its
commas, and each piece decoded by itself; in what lies around it a mark stands for it meanwhile::

    {"content": [{"token": "a", …}, {"token": "b", …}, …  ]}
                [{"token": "a", …}] + [{"token": "b", …}] + …        pieces of the array, one after the other
    {"content": "<mark>"}                                            then the rest
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megaflow_hpc.model.aside import give_way

WHOLE = 512 * 2**10
"""Bytes of a document that is not taken apart, if it has no more than :data:`FEW` arrays and objects."""
FEW = 10_000
PIECE = 32 * 2**10
"""Bytes of a piece; single values are longer only where they cannot be taken apart."""
DEPTH = 1000
"""Arrays and objects within one another; orjson decodes 1,024."""
_TOKEN = re.compile(rb'[^][{}"]{0,16384}+("[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{}"])?+', re.DOTALL)
"""A text, or a bracket, and what stands before it; a quote alone begins a text that does not end."""
_MANY = 512
"""Tokens or values between two pauses."""
_SPACE = b" \t\r\n"


class TooMuch(ValueError):
    """A document would cost far more than its bytes."""


class _Open:
    """An array or object that has begun.

    From ``cut`` on it has not been looked at; what lies between long ones inside, and their marks, is in ``before``.
    """

    __slots__ = ("array", "before", "begin", "cut", "held", "value")

    def __init__(self, begin: int, array: bool) -> None:
        self.begin, self.array = begin, array
        self.cut = begin + 1
        self.before: list[bytes] = []
        self.held = 0
        self.value: list[Any] | dict[str, Any] | None = None

    def keep(self, *parts: bytes, cut: int) -> None:
        """Goes on at ``cut``, with what has taken the place of what lies before it."""
        self.before += parts
        self.held += sum(map(len, parts))
        self.cut = cut


class Pieces:
    """One document.

    Args:
        data: it; its texts are short.
        mark: what no text in it begins with by chance.
        kept: mark → the value that it stands for.
        parsed: decodes a piece.
    """

    def __init__(self, data: bytes, mark: str, kept: dict[str, Any], parsed: Callable[[bytes], Any]) -> None:
        self._data, self._mark, self._kept, self._parsed = data, mark, kept, parsed

    def value(self) -> Any:
        """Returns the value of the document.

        Raises:
            ValueError: It is not JSON.
        """
        if len(self._data) <= WHOLE and self._data.count(b"[") + self._data.count(b"{") <= FEW:
            return self._decoded(self._data)
        whole = _Open(-1, False)
        stack, last = [whole], 0
        for number, token in enumerate(_TOKEN.finditer(self._data)):
            at, end = token.span(1) if token[1] else (token.end(), token.end())
            kind = self._data[at] if at < end else 0
            if not number % _MANY:
                give_way()
            if at - stack[-1].cut + stack[-1].held > PIECE and len(stack) > 1:
                self._take_apart(stack[-1], last, at)
            last = end
            if not kind:  # a long row of numbers
                give_way()
            elif kind == 34:  # a quote
                if end - at == 1:
                    raise ValueError("a text does not end")
            elif kind in b"[{":
                if len(stack) > DEPTH:
                    raise ValueError("nested too deeply")
                stack.append(_Open(at, kind == 91))
            else:
                self._close(stack, at, kind == 93)
        if len(stack) > 1:
            raise ValueError("an array or object does not end")
        return self._decoded(b"".join([*whole.before, self._data[whole.cut :]]))

    def _take_apart(self, top: _Open, start: int, stop: int) -> None:
        """Decodes what is there of a long array or object, as far as a comma between ``start`` and ``stop``."""
        while stop - top.cut + top.held > PIECE:
            least = top.cut + PIECE - top.held
            at = self._data.rfind(b",", start, max(start, least))
            if at < 0:
                at = self._data.find(b",", max(start, least), stop)
            if at < 0:
                return
            self._extend(top, at)
            top.cut = start = at + 1

    def _extend(self, top: _Open, stop: int) -> None:
        part = b"".join([*top.before, self._data[top.cut : stop]])
        top.before, top.held = [], 0
        if not part.strip(_SPACE):
            raise ValueError("a comma without a value")
        found = self._decoded(b"[%b]" % part if top.array else b"{%b}" % part)
        if top.value is None:
            top.value = found
        elif isinstance(top.value, list):
            top.value += found
        else:
            top.value.update(found)
        give_way()

    def _close(self, stack: list[_Open], at: int, array: bool) -> None:
        top = stack.pop()
        if not stack or top.array != array:
            raise ValueError("brackets do not match")
        above = stack[-1]
        if top.value is not None:
            self._extend(top, at)
            mark = f"{self._mark}p{len(self._kept)}"
            self._kept[mark] = top.value
            above.keep(self._data[above.cut : top.begin], b'"%b"' % mark.encode(), cut=at + 1)
        elif top.before:  # it is decoded with what lies around it, as those are that stay where they are
            around = self._data[above.cut : top.begin + 1]
            above.keep(around, *top.before, self._data[top.cut : at + 1], cut=at + 1)

    def _decoded(self, part: bytes) -> Any:
        found = self._parsed(part)
        return self._filled(found) if self._mark.encode() in part else found

    def _filled(self, value: Any) -> Any:
        """Puts what was kept back where its marks stand."""
        if isinstance(value, str):
            return self._kept.get(value, value)
        if isinstance(value, list):
            items = list[Any]()
            for start in range(0, len(value), _MANY):
                items += [self._filled(item) for item in value[start : start + _MANY]]
                give_way()
            return items
        if isinstance(value, dict):
            if not self._kept.keys().isdisjoint(value):
                raise TooMuch("a name of 32 KiB and more")
            return {key: self._filled(item) for key, item in value.items()}
        return value
