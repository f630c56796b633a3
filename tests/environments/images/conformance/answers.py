"""What a builder made of a case, in a form that two builders' can be compared in and kept in a file.

Only what differs from the base image is told: ``{"files": {path: "KIND MODE OWNER CONTENT TIME" or "-"}, "env": {…},
"workdir": …, "user": …}``; of a build that failed or was refused ``{"fails": what was said}``. Times are ``kept`` for
what was last changed when the contexts' files were, ``now`` for the build's own, and are not told of directories.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from tests.environments.images.conformance.cases import LONG_AGO
from tests.support.image_trees import Entry, Tree

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OF_THE_BUILDER = re.compile(
    r"/(\.singularity\.d|environment|singularity|\.exec|\.run|\.shell|\.test|\.dockerenv)(/|\Z)"
    r"|/(dev|proc|sys)/|/(dev|proc|sys|run|run/secrets)\Z|/etc/(hosts|hostname|resolv\.conf|mtab)\Z"
)
"""What builders put into images by themselves, or mount while they build."""

Answer = dict[str, Any]


def answer(tree: Tree, base: Tree, env: Mapping[str, str], workdir: str | None, user: str | None) -> Answer:
    """What was made: a tree, over that of its base, and what a container of it starts with."""
    files = {}
    for path in sorted(tree.keys() | base.keys()):
        if not _OF_THE_BUILDER.match(path) and (text := _text(tree.get(path))) != _text(base.get(path)):
            files[path] = text
    # A whole directory that is gone is told once.
    files = {path: text for path, text in files.items() if text != "-" or files.get(posixpath.dirname(path)) != "-"}
    return {
        "files": files,
        "env": {name: value for name, value in sorted(env.items()) if (name, value) != ("PATH", PATH)},
        "workdir": posixpath.normpath("/" + (workdir or "/").lstrip("/")),
        "user": user or "",
    }


def _text(entry: Entry | None) -> str:
    if entry is None:
        return "-"
    words = [entry.kind, f"{entry.mode:o}", entry.owner]
    if entry.kind != "directory":
        words += [entry.content[:12] if entry.kind == "file" else entry.content]
        words += ["kept" if entry.mtime == LONG_AGO else "now" if entry.mtime > 1_600_000_000 else str(entry.mtime)]
    return " ".join([*words, f"same as {entry.same}"] if entry.same else words)


def compare(expected: Answer, found: Answer) -> list[str]:
    """Lines that say what differs, if anything."""
    if "fails" in expected or "fails" in found:
        if "fails" in expected and "fails" in found:
            return []
        return [f"expected {expected.get('fails', 'an image')!r}, found {found.get('fails', 'an image')!r}"]
    lines = []
    for path in sorted(expected["files"].keys() | found["files"].keys()):
        texts = [each["files"].get(path, "as in the base") for each in (expected, found)]
        if texts[0] != texts[1]:
            lines.append(f"{path}: expected {texts[0]}, found {texts[1]}")
    for what in ("env", "workdir", "user"):
        if expected[what] != found[what]:
            lines.append(f"{what}: expected {expected[what]!r}, found {found[what]!r}")
    return lines
