"""The page of the Python API, made from docstrings: ``python launchers/docs.py pages`` writes docs/reference/python.md.

Source files are read and not imported, so signatures are as written and attributes have their docstrings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megaflow_hpc"

INTRODUCTION = """\
# Python

This page shows the docstrings of the public API. Other modules may change in any release.

```text
from megaflow_hpc import Campaign, Run, open_trajectories      # plan, submit, follow, read
from megaflow_hpc.training.dataflow import Dataflow            # train with a loop of your own
from megaflow_hpc.types import AgentResult, Task               # write agents and tasks
```

The [notebook](../tutorials/notebook.ipynb) runs a campaign and plots its results. Names are imported on first use, so
`import megaflow_hpc` takes milliseconds. `repr` of an object says what it is. Every error that the package raises
deliberately is a [`MegaflowError`](#errors), whose message names value, expectation and remedy.

"""

SECTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "Campaigns and runs": (("campaign/facade.py", "Campaign Findings check"), ("campaign/run.py", "Run Cancelled")),
    "Trajectories": (
        ("trajectories/reading/store.py", "open_trajectories TrajectoryStore Row"),
        ("trajectories/reading/conversations.py", "Conversation ConversationCall"),
        ("trajectory.py", "Trajectory Turn TokenSequence Attempt"),
    ),
    "Comparing": (
        ("report/figures.py", "figures_of RunFigures"),
        ("report/comparison.py", "compare Difference matrix_of Matrix"),
        ("report/charts.py", "charts_of Chart"),
    ),
    "Training": (
        ("training/dataflow.py", "Dataflow Step"),
        ("training/microbatch.py", "Minibatch MicroBatch"),
        ("rundir/training.py", "Commit"),
    ),
    "Tasks": (("types.py", "Task Limits Verdict Artifact"), ("tasks/loading.py", "load_tasks")),
    "Agents": (("types.py", "Agent ResumableAgent AgentResult ModelEndpoint"),),
    "Sandboxes": (
        ("types.py", "Sandbox ExecResult"),
        ("environments/sandbox/provider.py", "ApptainerProvider"),
        ("environments/sandbox/spec.py", "SandboxSpec"),
    ),
    "Errors": (
        (
            "errors.py",
            "MegaflowError ConfigError SiteError SandboxError LimitError UserCodeError ModelServiceError StarvedError "
            "LedgerError",
        ),
    ),
}
"""Title of a section → (source file, names) in the order of the page."""

HIDDEN = {
    "Campaign": "where site_mistakes start",
    "Run": "jobs live_jobs tended job_uses pods_live over follow conclude stored_rollouts",
    "Dataflow": "amend again check try_plan committed ordinal sequences",
    "Trajectory": "to_record from_record",
}
"""Class → methods that only this package calls."""
HEADINGS = ("Args", "Returns", "Yields", "Raises", "Attributes")
NOT_RUN = "<!-- not run: an example of a docstring; the pages of tutorials and how-tos are run -->"


def page() -> str:
    """Returns the page in Markdown."""
    lines = []
    for section, files in SECTIONS.items():
        lines += [f"## {section}", ""]
        for file, names in files:
            found = {node.name: node for node in ast.parse((PACKAGE / file).read_text()).body if hasattr(node, "name")}
            module = ".".join(["megaflow_hpc", *Path(file).with_suffix("").parts])
            for name in names.split():
                lines += _entry(found[name], module)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    return INTRODUCTION + text.rstrip() + "\n"


def _entry(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (f"### `{node.name}`", "", f"`{module}.{_signature(node)}`", "", *_document(node), "")
        return
    assert isinstance(node, ast.ClassDef)
    init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    kind = f" ({', '.join(bases)})" if bases and module.endswith(".errors") else ""
    made = _signature(init, node.name) if init and not module.endswith(".errors") else node.name
    yield from (f"### `{node.name}`", "", f"`{module}.{made}`{kind}", "", *_document(node), "")
    yield from _fields(node)
    for one in node.body:
        hidden = HIDDEN.get(node.name, "").split()
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name[0] != "_" and one.name not in hidden:
            marks = {ast.unparse(mark).rpartition(".")[2] for mark in one.decorator_list}
            if marks & {"property", "cached_property"}:
                kind = f": {_type(one.returns)}" if one.returns else ""
                yield from (f"#### `{node.name}.{one.name}`{kind}", "", *_document(one), "")
            else:
                yield from (f"#### `{node.name}.{one.name}`", "", f"`{_signature(one)}`", "", *_document(one), "")


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yields a table of the attributes of a class that have a type in its body."""
    rows = []
    for place, one in enumerate(node.body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and not one.target.id.startswith("_"):
            after = node.body[place + 1] if place + 1 < len(node.body) else None
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = _inline(" ".join(str(after.value.value).split()))
            default = ast.unparse(one.value) if one.value and not isinstance(one.value, ast.Call) else ""
            cells = (f"`{one.target.id}`", _type(one.annotation), f"`{default}`" if default else "", text)
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    if rows:
        yield from ("| attribute | type | default | meaning |", "| --- | --- | --- | --- |", *rows, "")


def _type(node: ast.expr) -> str:
    return f"`{ast.unparse(node)}`"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str = "") -> str:
    """Returns a function's signature on one line, without ``self``."""
    arguments = node.args
    for listed in (arguments.posonlyargs, arguments.args):
        if listed and listed[0].arg in ("self", "cls"):
            del listed[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{prefix}{name or node.name}({ast.unparse(arguments)}){returns}"


def _document(node: ast.AST) -> Iterator[str]:
    """Yields a docstring as Markdown: sections as lists, examples and literal blocks as code."""
    lines = (ast.get_docstring(node) or "").splitlines()  # type: ignore[arg-type]
    listed = prose = False
    place = 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if line.rstrip(":") in HEADINGS and line.endswith(":"):
            yield from ("", f"{line.rstrip(':')}:", "")
            listed, prose = True, line in ("Returns:", "Yields:")
        elif prose and line.startswith("    "):
            yield _inline(line.strip())
        elif line.startswith(">>>"):
            block = [line]
            while place < len(lines) and lines[place].strip():
                block.append(lines[place])
                place += 1
            yield from (
                "",
                NOT_RUN,
                "```python",
                *(re.sub(r"\s*# doctest: \+SKIP", "", one) for one in block),
                "```",
                "",
            )
        elif line.startswith("    ") and not listed:
            block = [line[4:]]
            while place < len(lines) and (lines[place].startswith("    ") or not lines[place]):
                block.append(lines[place][4:])
                place += 1
            yield from ("", NOT_RUN, "```python", *"\n".join(block).rstrip().splitlines(), "```", "")
        elif listed and line.startswith("    ") and not line.startswith("     "):
            name, colon, rest = line.strip().partition(": ")
            named = colon and re.fullmatch(r"[\w, *]+", name)
            yield f"- `{name}`: {_inline(rest)}" if named else f"- {_inline(line.strip())}"
        elif listed and line.strip():
            yield f"  {_inline(line.strip())}"
        else:
            listed = listed and not line
            yield _inline(line.removesuffix("::") + (":" if line.endswith("::") else ""))


def _inline(text: str) -> str:
    """Converts reStructuredText's code and roles to Markdown's code."""
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", text)
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("``", "`")
