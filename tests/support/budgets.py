"""Counts of the package that only go down: size, settings, names that exist twice, and phrases that are hard to read.

``python -m tests.support.budgets`` prints the current counts, in the form of the table in tests/test_architecture.py.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import megaflow_hpc
from tests.rooms import modules

PACKAGE = Path(megaflow_hpc.__file__).parent
FILES = sorted(modules(PACKAGE.parent).values())
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
HARD_PHRASES = (
    r"^(What|Whether|Of|Who|Whose|As|That|How many|By what|From which)\b(?!.*\?$)",
    r"\b(is|are) none\b|\bthere is none\b",
    r"\b(lies|lie|stands|stand) (in|at|beside|there|here|under|below|with)\b",
    r"\b(is|are|was|were) told\b|\btells? (of|what|that)\b|\bsays of\b",
    r"\bwhoever\b|\bsomebody\b|\bsomeone else's\b",
    r"\bgoes on\b|\bgo on\b",
    r"\bso (many|long) (of|as|that)?\b",
    r"\bby turns\b|\bby what\b",
    r"\bbeside\b",
    r"\bwhere (it|that|there|one|a [a-z]+) (is|has|can|may|does)\b",
    r"\bfrom which on\b|\banew\b",
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yields every text that stands alone: docstrings, and the texts below attributes and constants."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and isinstance(statement.value.value, str):
                yield statement


def code_tokens(path: Path) -> int:
    """Returns the tokens of a module without comments and docstrings."""
    lines: set[int] = set()
    for text in docstrings(parsed(path)):
        lines.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return sum(token.type not in LAYOUT and token.start[0] not in lines for token in tokens)


def tokens_by_room() -> dict[str, int]:
    """Returns the thousands of tokens of each top-level room, rounded up."""
    counts: Counter[str] = Counter()
    for path in FILES:
        parts = path.relative_to(PACKAGE).parts
        counts[parts[0] if len(parts) > 1 else "at the top"] += code_tokens(path)
    return {room: -(-count // 1000) for room, count in sorted(counts.items())}


def repeated_class_names() -> list[str]:
    """Returns the names of public classes that several modules define."""
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(PACKAGE)))
    return sorted(name for name, modules in homes.items() if len(modules) > 1)


def hard_phrases_per_1000() -> int:
    """Returns the hard phrases in 1,000 docstrings."""
    texts = [text.value.value.strip() for path in FILES for text in docstrings(parsed(path))]  # type: ignore[attr-defined]
    found = sum(len(re.findall(pattern, text)) for pattern in HARD_PHRASES for text in texts)
    return -(-1000 * found // len(texts))


def counts() -> dict[str, int]:
    """Returns the current value of each budget."""
    from megaflow_hpc.config.reference import tables
    from megaflow_hpc.config.variables import VARIABLES

    return {
        "campaign keys": sum(len(table.keys) for table in tables()),
        "environment variables": sum(len(variables) for variables in VARIABLES.values()),
        "modules": len(FILES),
        "public class names that exist twice": len(repeated_class_names()),
        "hard phrases in 1,000 docstrings": hard_phrases_per_1000(),
        **{f"thousand tokens of {room}": count for room, count in tokens_by_room().items()},
    }


if __name__ == "__main__":
    for name, count in counts().items():
        print(f'    "{name}": {count},')
