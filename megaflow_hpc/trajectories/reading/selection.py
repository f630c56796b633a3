"""Selects trajectories with an expression over their columns.

    store.select("status == 'completed' and reward >= 0.5 and policy == 'a'")
    store.select("rewards['tests'] > 0 and weight_version_min >= 3 and finished_at >= '2026-11-21T08:00'")

The expression uses Python syntax but is never executed as Python. Its syntax tree is checked against a short list of
allowed nodes and evaluated with numpy over whole columns. Only the columns used by the expression are read.
Expressions may contain column names, numbers, strings, ``and or not``, ``== != < <= > >=``, ``+ - * / %``, ``in`` and
``not in`` a list, ``isnan(x)``, ``abs(x)`` and, on strings, ``.startswith(s)``, ``.endswith(s)``, ``.contains(s)`` and
``.matches(glob)``.

As in Python, every comparison with a missing number (NaN, such as the reward of an unverified rollout) is false, except
``!=``. A string compared with a time is parsed as a UTC date, ``2026-11-21`` or ``2026-11-21T08:00:00``.
"""

from __future__ import annotations

import ast
import datetime
import difflib
import fnmatch
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.resources import docs
from megaflow_hpc.trajectories.hdf5.columns import Array, Integers, text
from megaflow_hpc.trajectories.hdf5.schema import ROW_COLUMNS
from megaflow_hpc.trajectories.reading.sources import Source, offsets_of

MAX_LENGTH = 10_000
"""Maximum length of an expression in characters."""

TIMES = ("started_at", "finished_at")

_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.true_divide,
    ast.Mod: np.mod,
}
_STRING_TESTS: Mapping[str, Callable[[str, str], bool]] = {
    "startswith": str.startswith,
    "endswith": str.endswith,
    "contains": operator.contains,
    "matches": fnmatch.fnmatchcase,
}
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {"isnan": np.isnan, "abs": np.abs}

_ALIASES = {"task": "task_id", "group": "group_id", "sample": "sample_index"}


# --- columns available to expressions ---------------------------------------------------------------------------------


class RowTable:
    """Columns with one entry per row, by name. Derived columns are computed on first use and cached."""

    def __init__(self, source: Source) -> None:
        names = {column.name: column.name for column in ROW_COLUMNS} | _ALIASES
        self._source = source
        self._paths = {name: f"trajectories/{column}" for name, column in names.items()}
        self._derived: dict[str, Callable[[], Array]] = {
            "tokens": self._tokens,
            "sampled_tokens": self._sampled_tokens,
            "duration_s": lambda: self.column("finished_at") - self.column("started_at"),
            "sequences": lambda: self._count("sequence"),
            "messages": lambda: self._count("message"),
            "images": lambda: self._count("image"),
            "attempts": lambda: self._count("attempt"),
            "weight_version_min": lambda: _weight_versions(source, "weight_version_min", np.minimum),
            "weight_version_max": lambda: _weight_versions(source, "weight_version_max", np.maximum),
        }
        self._cache: dict[str, Array] = {}
        self.rows = len(source)
        self.rewards = tuple(source.reward_names())
        """Names of all rewards that any row has."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns except the rewards."""
        return (*self._paths, *self._derived)

    def column(self, name: str) -> Array:
        """Returns the column with a name from :attr:`names`, or ``rewards/NAME``, with one entry per row. Text is
        returned as ``str`` objects. The caller must not modify the column.

        Raises:
            KeyError: The column is unknown.
        """
        rewards = [f"rewards/{reward}" for reward in self.rewards]
        if name not in (*self.names, *rewards):
            raise KeyError(f"{name}: no column; there are: {', '.join([*self.names, *rewards])}")
        if name not in self._cache:
            derive = self._derived.get(name, lambda: self._source.column(self._paths.get(name, name)))
            values = derive()
            self._cache[name] = text(values) if values.dtype.kind in "SO" else values
        return self._cache[name]

    def _count(self, item: str) -> Array:
        return np.diff(self._source.column(f"trajectories/{item}_offset"))

    def _tokens(self) -> Array:
        sequences = self._source.column("trajectories/sequence_offset")
        return np.diff(self._source.column("sequences/token_offset")[sequences])

    def _sampled_tokens(self) -> Array:
        sampled = self._source.column("turns/token_end") - self._source.column("turns/token_start")
        return np.diff(offsets_of(sampled)[self._source.column("trajectories/turn_offset")])


def _weight_versions(source: Source, name: str, extreme: np.ufunc) -> Array:
    """Returns the lowest or highest weight version among each row's sampled tokens. -1 if no token was sampled."""
    unset = np.iinfo(np.int32).max if extreme is np.minimum else -1
    result = np.full(len(source), unset, np.int64)
    versions = source.column(f"sequences/{name}")
    is_known = versions >= 0
    extreme.at(result, source.column("sequences/trajectory")[is_known], versions[is_known])
    return np.where(result == unset, -1, result)


# --- expressions ------------------------------------------------------------------------------------------------------


def select(expression: str, table: RowTable) -> Integers:
    """Returns the numbers of the rows that match an expression, in order.

    Args:
        expression: An expression in the syntax described above.
        table: The columns that the expression may use.

    Raises:
        ConfigError: The expression does not parse, names an unknown column, or uses unsupported syntax. The message
            gives the position.
    """
    if len(expression) > MAX_LENGTH:
        raise ConfigError(f"selection: {len(expression)} characters, at most {MAX_LENGTH}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        column = getattr(error, "offset", None) or 1
        fault = getattr(error, "msg", None) or error
        raise ConfigError(
            f"selection: {expression!r}: column {column}: {fault}; expected one "
            "such as: status == 'completed' and reward >= 0.5"
        ) from None
    try:
        with np.errstate(invalid="ignore", divide="ignore"):
            value = _Evaluation(expression.strip(), table).of(tree.body)
    except RecursionError:
        raise ConfigError("selection: nested too deeply; split it") from None
    except (TypeError, ValueError, ArithmeticError) as error:  # such as a sum of conditions, or an unbounded integer
        raise ConfigError(f"selection: {expression!r}: {error}; compare columns with numbers or text") from None
    mask = np.broadcast_to(np.asarray(value), (table.rows,))
    if mask.dtype != np.bool_:
        raise ConfigError(f"selection: {expression!r} is a value, not a condition; compare it with something")
    return np.flatnonzero(mask).astype(np.int64)


class _Evaluation:
    """Evaluates one syntax tree. Values are numpy arrays over all rows, or plain constants."""

    def __init__(self, text: str, table: RowTable) -> None:
        self._text = text
        self._table = table

    def of(self, node: ast.expr) -> Any:
        """Returns the value of a syntax tree node.

        Raises:
            ConfigError: The node or one of its descendants is not allowed in a selection.
        """
        match node:
            case ast.Constant(value=bool() | int() | float() | str()):
                return node.value
            case ast.Name():
                return self._column(node, node.id)
            case ast.Subscript(value=ast.Name(id="rewards"), slice=ast.Constant(value=str() as name)):
                return self._reward(node, name)
            case ast.Attribute(value=ast.Name(id="rewards"), attr=name):
                return self._reward(node, name)
            case ast.BoolOp():
                return self._logical(node)
            case ast.UnaryOp(op=ast.Not()):
                return np.logical_not(self._condition(node.operand))
            case ast.UnaryOp(op=ast.USub()):
                return -self._number(node.operand)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                return _ARITHMETIC[type(node.op)](self._number(node.left), self._number(node.right))
            case ast.Compare():
                return self._compare(node)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](self._number(argument))
            case ast.Call(
                func=ast.Attribute(value=value, attr=name), args=[ast.Constant(value=str() as text)], keywords=[]
            ) if name in _STRING_TESTS:
                return self._string_test(node, value, name, text)
        raise self._fault(
            node, f"{ast.unparse(node)!r} is not allowed here; see the forms in {docs('how-to/reading.md')}"
        )

    def _column(self, node: ast.expr, name: str) -> Array:
        if name not in self._table.names:
            near = difflib.get_close_matches(name, self._table.names, 3) or sorted(self._table.names)
            raise self._fault(node, f"no column {name!r}; there are: {', '.join(near)}")
        return self._table.column(name)

    def _reward(self, node: ast.expr, name: str) -> Array:
        if name not in self._table.rewards:
            names = ", ".join(self._table.rewards) or "none"
            raise self._fault(node, f"no reward named {name!r}; there are: {names}")
        return self._table.column(f"rewards/{name}")

    def _logical(self, node: ast.BoolOp) -> Any:
        combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        result = self._condition(node.values[0])
        for value in node.values[1:]:
            result = combine(result, self._condition(value))
        return result

    def _condition(self, node: ast.expr) -> Any:
        value = self.of(node)
        if np.asarray(value).dtype != np.bool_:
            raise self._fault(node, f"{ast.unparse(node)!r} is a value, not a condition; compare it with something")
        return value

    def _number(self, node: ast.expr) -> Any:
        value = self.of(node)
        if _is_text(value):
            raise self._fault(node, f"{ast.unparse(node)!r} is text, expected a number")
        return value

    def _compare(self, node: ast.Compare) -> Any:
        result: Any = True
        left = node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            result = np.logical_and(result, self._compare_two(node, left, op, right))
            left = right
        return result

    def _compare_two(self, node: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple | ast.Set):
                raise self._fault(right, "expected a list behind 'in', as in: policy in ['a', 'b']")
            is_in: Any = False
            for item in right.elts:
                is_in = np.logical_or(is_in, self._compare_two(node, left, ast.Eq(), item))
            return np.logical_not(is_in) if isinstance(op, ast.NotIn) else is_in
        if type(op) not in _COMPARE:
            raise self._fault(node, "'is' is not allowed; use ==, or isnan(x)")
        a = self._operand(left, right)
        b = self._operand(right, left)
        if _is_text(a) != _is_text(b):
            raise self._fault(node, f"{ast.unparse(node)!r} compares text with a number")
        return _COMPARE[type(op)](a, b)

    def _operand(self, node: ast.expr, other: ast.expr) -> Any:
        """Returns the value of one side of a comparison. Converts dates to Unix seconds if the other side is a time."""
        value = self.of(node)
        if not (isinstance(value, str) and isinstance(other, ast.Name) and other.id in TIMES):
            return value
        try:
            date = datetime.datetime.fromisoformat(value)
        except ValueError:
            raise self._fault(
                node, f"{value!r} is not a date; expected one such as '2026-11-21T08:00:00' (UTC)"
            ) from None
        if date.tzinfo is None:
            date = date.replace(tzinfo=datetime.UTC)
        return date.timestamp()

    def _string_test(self, node: ast.expr, value: ast.expr, name: str, text: str) -> Any:
        column = self.of(value)
        if not _is_text(column) or isinstance(column, str):
            raise self._fault(node, f"{ast.unparse(value)!r} is not a text column")
        return _map_distinct(column, lambda item: _STRING_TESTS[name](item, text))

    def _fault(self, node: ast.expr, what: str) -> ConfigError:
        return ConfigError(f"selection: {self._text!r}: column {node.col_offset + 1}: {what}")


def _map_distinct(column: Array, test: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Applies ``test`` to every entry, calling it once per distinct string."""
    results: dict[Any, bool] = {}
    mask = np.empty(len(column), np.bool_)
    for row, item in enumerate(column.tolist()):
        if item not in results:
            results[item] = test(item)
        mask[row] = results[item]
    return mask


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype == object)
