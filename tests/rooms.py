"""The graph of the rooms, read from imports: ``python -m tests.rooms`` prints rooms, arrows and circles.

A room is a folder (``pod/master``). Modules at the top, such as ``types`` and ``errors``, are rooms of one module. An
arrow leads from the importing room to the imported one. Imports inside functions and under ``TYPE_CHECKING`` count too,
so they cannot hide a circle. The package is parsed and not imported.

The search for circles covers every level: modules and folders in one folder, each folder as a whole. So neither ``pod``
nor ``pod/master`` nor any module may depend on its dependents. A folder may have modules that its subrooms share, and
others that use these rooms.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.places import ROOT

PACKAGE = "megaflow_hpc"
Graph = Mapping[str, set[str]]


@functools.cache
def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return dotted name → file of every module of the package. A package stands for its ``__init__``."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imported(path: Path, own: str = "") -> set[str]:
    """Return the dotted names that a file imports anywhere. ``own`` is its package, for relative imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = importlib.util.resolve_name("." * node.level + module, own)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def module_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return module → modules of the package that it imports."""
    known = modules(root)

    def module_of(name: str) -> str:
        while name and name not in known:
            name = name.rpartition(".")[0]
        return name

    graph = {}
    for module, path in known.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        graph[module] = {module_of(name) for name in imported(path, package)} - {"", module}
    return graph


def room_of(module: str) -> str:
    """Return the room of a module: ``megaflow_hpc.pod.master.loop`` → ``pod/master``."""
    path = modules()[module].relative_to(ROOT / PACKAGE)
    return "/".join(path.parts[:-1]) or path.stem


def room_graph(graph: Graph) -> dict[str, set[str]]:
    """Return room → rooms from which its modules import."""
    rooms: dict[str, set[str]] = {}
    for module, others in graph.items():
        rooms.setdefault(room_of(module), set()).update(room_of(other) for other in others)
    return {room: others - {room} for room, others in rooms.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Return one circle, as a chain with equal ends, for every group of nodes that reach each other."""
    found = []
    for group in _components(graph):
        if len(group) > 1:
            start = min(group)
            found.append(_way_back(graph, start, group))
    return found


def levels(graph: Graph) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return folder → child → sibling that it imports → the imports."""
    doors = {module for module, path in modules().items() if path.name == "__init__.py"}
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for module, others in graph.items():
        for other in others:
            here = [*module.split("."), *(["__init__"] if module in doors else [])]
            there = [*other.split("."), *(["__init__"] if other in doors else [])]
            depth = next(i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b)
            level = found.setdefault("/".join(here[:depth]), {})
            level.setdefault(there[depth], {})
            level.setdefault(here[depth], {}).setdefault(there[depth], []).append(f"{module} imports {other}")
    return found


def circles_of_levels(graph: Graph) -> list[str]:
    """Return every circle on every level with its imports, one line each."""
    found = []
    for folder, level in sorted(levels(graph).items()):
        for chain in circles({node: set(others) for node, others in level.items()}):
            imports = [level[a][b][0] for a, b in itertools.pairwise(chain)]
            found.append(f"{folder}: {' → '.join(chain)} ({'; '.join(imports)})")
    return found


def _components(graph: Graph) -> Iterable[set[str]]:
    """Return the groups of nodes that reach each other, by computing reachability, since there are few rooms."""
    reach: dict[str, set[str]] = {}
    for node in graph:
        seen: set[str] = set()
        todo = [node]
        while todo:
            for other in graph[todo.pop()]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        reach[node] = seen
    left = set(graph)
    while left:
        node = min(left)
        group = {node} | {other for other in reach[node] if node in reach[other]}
        left -= group
        yield group


def _way_back(graph: Graph, start: str, group: set[str]) -> list[str]:
    """Return the shortest way from ``start`` back to itself within ``group``."""
    ways = [[start]]
    seen: set[str] = set()
    for way in ways:
        for other in sorted(graph[way[-1]] & group):
            if other == start:
                return [*way, start]
            if other not in seen:
                seen.add(other)
                ways.append([*way, other])
    return [start]


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rooms", description="the rooms of the package and who imports whom"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    graph = module_graph()
    rooms = room_graph(graph)
    inside: dict[str, list[str]] = {}
    for module in graph:
        inside.setdefault(room_of(module), []).append(module)
    sizes = {room: sum(lines(modules()[m]) for m in members) for room, members in inside.items()}
    found = circles_of_levels(graph)
    arrows = sum(len(others) for others in rooms.values())
    if arguments.json:
        table = {
            room: {"modules": sorted(inside[room]), "lines": sizes[room], "imports": sorted(others)}
            for room, others in rooms.items()
        }
        print(json.dumps({"rooms": table, "arrows": arrows, "circles": found}, indent=1))
    else:
        for room in sorted(rooms):
            size = f"{len(inside[room]):>3} modules {sizes[room]:>6} lines"
            print(f"{room:<32} {size}  → {' '.join(sorted(rooms[room]))}")
        print(f"{len(rooms)} rooms, {len(graph)} modules, {sum(sizes.values())} lines, {arrows} arrows")
        print("\n".join(f"circle in {line}" for line in found) or "no circle")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
