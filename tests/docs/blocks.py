"""The code blocks of README and docs: where they stand, what they are, and how each is run.

A block runs as it stands on the page, in the order of the page and in one directory for the whole page
(:mod:`.session`). What the page says of a block:

- the title of its fence, as in ```` ```yaml title="campaign.yaml" ````: it is also written to a file of that name;
- a comment on the line above, which readers do not see:
  ``<!-- not run: needs GPUs -->``: not run, for this reason;
  ``<!-- lab -->``: run where the tests have the lab's Slurm;
  ``<!-- form: bugs -->``: another form of YAML than a campaign.

``python -m tests.docs.blocks`` counts them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sybil import Document
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).parents[2]

SHOWN = ("", "text")
"""Languages of blocks that show output or drawings, which nobody copies into a shell."""

INFO = re.compile(r"(?P<language>\w*)(?:[ \t]+(?P<options>[^\n]*))?$\n?", re.MULTILINE)
MARK = re.compile(r"<!--\s*(?P<name>not run|lab|form)\s*(?::\s*(?P<value>.*?))?\s*-->\s*\Z")
TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    """Path relative to the project."""
    line: int
    language: str
    source: str
    title: str | None
    """File name to which the block is written."""
    mark: str | None
    """``not run``, ``lab`` or ``form``."""
    value: str | None
    """The mark's value: the reason, or the form."""

    @property
    def fate(self) -> str:
        """How the block is treated: ``shown`` (no code), ``not run``, ``lab`` or ``run``."""
        if self.language in SHOWN:
            return "shown"
        return self.mark if self.mark in ("not run", "lab") else "run"

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return README and every page of the docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page from top to bottom."""
    text = page.read_text()
    document = Document(text, str(page))
    for region in RawFencedCodeBlockLexer(info_pattern=INFO)(document):
        options = region.lexemes.get("options") or ""
        title = TITLE.search(options)
        mark = MARK.search(text[: region.start].rstrip(" "))
        yield Block(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, region.start) + 1,
            language=region.lexemes.get("language") or "",
            source=str(region.lexemes["source"]),
            title=title[1] if title else None,
            mark=mark["name"] if mark else None,
            value=mark["value"] if mark else None,
        )


def main() -> int:
    """Print how many blocks of each page are run, and why others are not."""
    total: Counter[str] = Counter()
    for page in pages():
        found = list(blocks(page))
        count = Counter(block.fate for block in found)
        total += count
        if found:
            print(f"{page.relative_to(ROOT)!s:45} " + "  ".join(f"{fate} {n}" for fate, n in sorted(count.items())))
        for block in found:
            if block.fate == "not run":
                print(f"    line {block.line}: {block.value}")
    print("all: " + "  ".join(f"{fate} {n}" for fate, n in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
