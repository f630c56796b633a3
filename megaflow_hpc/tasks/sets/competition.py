"""Grades the solution of a programming problem by the rules of LiveCodeBench's checker.

This file is copied into each problem's tests, so it must run on Python 3.9 without other packages. Each test runs in a
new process, which does not know the expected output.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import subprocess
import sys
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

START_S = 1
"""Seconds for starting Python, added to the time limit of each test."""
MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json"
)
PREAMBLE = "".join(
    [f"from {name} import *\n" for name in f"{MODULES} builtins typing".split()]
    + [f"import {name}\n" for name in MODULES.split()]
    + ["sys.setrecursionlimit(50000)\n"]
)
"""Code to run before each solution. LiveCodeBench's problems assume these imports."""


def as_function(code: str) -> str:
    """Converts a program to its imports followed by a function ``program``. Unwraps a final ``if __name__ ==
    "__main__"``."""
    body = ast.parse(code).body
    if body and isinstance(last := body[-1], ast.If) and ast.unparse(last.test) == "__name__ == '__main__'":
        body[-1:] = last.body
    imports = [statement for statement in body if isinstance(statement, (ast.Import, ast.ImportFrom))]
    function = ast.parse("def program(): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [statement for statement in body if statement not in imports]
    return ast.unparse(ast.Module([*imports, function], []))


def run(solution: str, name: str = "") -> None:
    """Runs a solution on standard input.

    If ``name`` is empty, runs the solution as a program. Otherwise, calls the function or method of that name. Each
    line of the input is an argument as JSON, and the result is printed as a Python literal.
    """
    code = Path(solution).read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "solution"}
    if not name:
        exec(PREAMBLE + as_function(code), namespace)
        try:
            namespace["program"]()
        except SystemExit:
            pass
        return
    output = os.dup(1)
    os.dup2(2, 1)  # the solution's own output is not the result
    arguments = [json.loads(line) for line in sys.stdin.read().split("\n")]
    exec(f"{PREAMBLE}\n{code}", namespace)
    function = getattr(namespace["Solution"](), name) if "class Solution" in code else namespace[name]
    with os.fdopen(output, "w", encoding="utf-8") as stream:
        stream.write(repr(function(*arguments)))


def same_lines(found: str, expected: str) -> bool:
    """Returns whether all lines are equal, as text or as numbers. Ignores whitespace around lines and around the
    text."""
    lines = [[line.strip() for line in text.strip().split("\n")] for text in (found, expected)]
    return len(lines[0]) == len(lines[1]) and all(map(_same_line, *lines))


def _same_line(found: str, expected: str) -> bool:
    try:
        return found == expected or [*map(Decimal, found.split())] == [*map(Decimal, expected.split())]
    except InvalidOperation:
        return False


def same_value(found: str, expected: str) -> bool:
    """Returns whether a Python literal equals a JSON value. A tuple is accepted instead of a list."""
    try:
        value = ast.literal_eval(found)
        return bool((list(value) if isinstance(value, tuple) else value) == json.loads(expected))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def first_failure(solution: str, name: str, limit_s: float, tests: list[list[str]]) -> str:
    """Describes the first test that a solution fails. Returns an empty string if it passes all tests.

    Args:
        solution: File to run.
        name: Function or method to call. Empty for a program.
        limit_s: Maximum time of a test in seconds.
        tests: Input and expected output of each test.
    """
    command = [sys.executable, "-I", "-X", "utf8", __file__, solution, name]
    for number, (given, expected) in enumerate(tests, 1):
        data = given.encode("utf-8", "surrogatepass")
        try:
            done = subprocess.run(command, input=data, capture_output=True, timeout=limit_s + START_S)
        except subprocess.TimeoutExpired:
            return f"test {number}: takes longer than {limit_s:g} s"
        if done.returncode:
            return f"test {number}: {done.stderr[-2000:].decode(errors='replace')}"
        if not (same_value if name else same_lines)(done.stdout.decode(errors="replace"), expected):
            return f"test {number}: wrong answer"
    return ""


def main(solution: str, tests: str, reward: str) -> None:
    """Grades a solution and writes the reward. Deletes the tests before the solution runs."""
    problem = json.loads(gzip.decompress(Path(tests).read_bytes()))
    os.remove(tests)
    wrong = first_failure(solution, **problem)
    print(wrong or f"{len(problem['tests'])} tests passed")
    Path(reward).write_text("0\n" if wrong else "1\n")


if __name__ == "__main__":
    if hasattr(sys, "set_int_max_str_digits"):  # Python 3.11
        sys.set_int_max_str_digits(50_000)
    if len(sys.argv) == 3:
        run(*sys.argv[1:])
    else:
        main(*sys.argv[1:])
