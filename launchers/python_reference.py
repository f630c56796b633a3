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

The docstrings of the public API: parameters and attributes as `name: type = default`, then errors. `PathLike` stands
for `str | os.PathLike[str]`. Other modules may change in any release.

```text
from megaflow_hpc import Campaign, Run, open_trajectories      # plan, submit, follow, read
from megaflow_hpc.training.dataflow import Dataflow            # train with a loop of your own
from megaflow_hpc.types import AgentResult, Task               # write agents and tasks
```

The [notebook](../tutorials/notebook.ipynb) runs a campaign and plots its results. Every error that the package raises
deliberately is a [`MegaflowError`](#errors), whose message names value, expectation and remedy.

"""

SECTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "Campaigns and runs": (("campaign/facade.py", "Campaign Findings check"), ("campaign/run.py", "Run Cancelled")),
    "Trajectories": (
        ("trajectories/reading/store.py", "open_trajectories TrajectoryStore Row"),
        ("trajectories/reading/conversations.py", "Conversation ConversationCall"),
        ("trajectory.py", "Trajectory TokenSequence Turn Attempt"),
        ("types.py", "Artifact"),
    ),
    "Comparing": (
        ("report/figures.py", "figures_of RunFigures"),
        ("report/comparison.py", "compare Difference"),
        ("report/charts.py", "charts_of Chart"),
    ),
    "Training": (
        ("training/dataflow.py", "Dataflow Step"),
        ("training/microbatch.py", "Minibatch MicroBatch"),
        ("rundir/training.py", "Commit"),
    ),
    "Tasks": (("types.py", "Task Limits"),),
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
    "ApptainerProvider": "terminal stage prefetch",
    "Campaign": "where site_mistakes start runs",
    "Dataflow": "start checkpoint amend again check try_plan committed ordinal sequences leave_out add_checkpoint "
    "request images",
    "Difference": "label",
    "Run": "jobs live_jobs tended job_uses pods_live over follow conclude stored_rollouts job_ids check_stopped",
    "SandboxSpec": "check parsed_binds as_root",
    "Row": "conversation_record",
    "TrajectoryStore": "flat lengths",
    "Commit": "plan columns amendments at trainer",
    "Step": "plan amendments columns sequences images",
    "RunFigures": "unphased repeated versions",
    "Task": "to_dict from_dict",
}
"""Class → methods and attributes that only this package needs."""
COLUMNS = {
    "Row": "Each column of [`/trajectories`](trajectory-format.md#trajectories) is an attribute, such as `id` and "
    "`reward`, except offsets and the number of `turns`. These are attributes too:",
    "Trajectory": "Attributes: those of `Row` as plain Python values. `messages` has the messages of all "
    "conversations, and `parents` the index of the message before each.",
    "TokenSequence": "Attributes: `policy`, `tokens`, `logprobs`, `loss_mask`, `weight_versions`, `experts` and "
    "`images`, as in the [file](trajectory-format.md#tokens). `Row.sequences` has them as numpy arrays.",
    "Turn": "Attributes: the columns of [`/turns`](trajectory-format.md#turns).",
    "Attempt": "Attributes: the columns of [`/attempts`](trajectory-format.md#attempts).",
}
"""Class → description of those attributes that are columns of the file, which the page does not repeat."""
OUTPUTS = {"Cancelled", "Chart", "Commit", "Conversation", "ConversationCall", "Difference", "ExecResult", "Findings"}
OUTPUTS |= {"MicroBatch", "RunFigures"}
"""Classes that only this package constructs, so that the page omits the defaults of their attributes."""
UNTYPED = {"RunFigures"}
"""Classes whose undocumented attributes have types that the page does not show."""
FROM_METHODS = {"MicroBatch", "Minibatch", "Row", "Step", "TrajectoryStore"}
"""Classes whose objects come from methods, so that the page omits how they are constructed."""
HEADINGS = ("Args", "Returns", "Yields", "Raises", "Attributes")
NOT_RUN = "<!-- not run: an example -->"


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
    text = re.sub(r"(?<=\n)((?:- |  ).*\n)\n(?=- )", r"\1", text)
    text = re.sub(r"str \| (os\.PathLike\[str\]|Path\b)", "PathLike", text)
    return INTRODUCTION + text.rstrip() + "\n"


def _entry(node: ast.AST, module: str) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (f"### `{node.name}`", "", f"`{module}.{_signature(node)}`", "", *_document(node), "")
        return
    assert isinstance(node, ast.ClassDef)
    if module.endswith(".errors"):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        text = _inline(" ".join((ast.get_docstring(node) or "").split()))
        yield f"- `{node.name}({bases})`: {text}"
        return
    init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    made = _signature(init, node.name) if init and node.name not in FROM_METHODS else node.name
    yield from (f"### `{node.name}`", "", f"`{module}.{made}`", "", *_document(node), "")
    if node.name in COLUMNS:
        yield from (COLUMNS[node.name], "")
        if node.name != "Row":
            return
    attributes = list(_attributes(node))
    yield from (["Attributes:", "", *attributes] if made != node.name and attributes[1:] else attributes)
    hidden = HIDDEN.get(node.name, "").split()
    for one in node.body:
        if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) or one.name[0] == "_" or one.name in hidden:
            continue
        if not _is_property(one):
            yield from (f"**`{_signature(one)}`**", "", *_document(one), "")


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yields a list of the attributes that have a type in the class, and of its properties.

    Those without a docstring come last, on one line.
    """
    hidden = HIDDEN.get(node.name, "").split()
    unexplained = []
    for place, one in enumerate(node.body):
        text = ""
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            if node.name in COLUMNS:
                continue
            name, kind = one.target.id, ast.unparse(one.annotation)
            if one.value and not isinstance(one.value, ast.Call) and node.name not in OUTPUTS:
                kind += f" = {ast.unparse(one.value)}"
            after = node.body[place + 1] if place + 1 < len(node.body) else None
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = _inline(" ".join(str(after.value.value).split()))
        elif isinstance(one, ast.FunctionDef) and _is_property(one) and one.returns:
            name, kind = one.name, ast.unparse(one.returns)
            text = " ".join(" ".join(line.replace("- raises", "Raises") for line in _document(one)).split())
        else:
            continue
        if name[0] == "_" or name in hidden:
            continue
        if text:
            yield f"- `{name}: {kind}`: {text}"
        else:
            unexplained.append(f"`{name}`" if node.name in UNTYPED else f"`{name}: {kind}`")
    if unexplained:
        yield f"- {', '.join(unexplained)}"
    yield ""


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)


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
    listed = prose = raised = False
    place = 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if line.rstrip(":") in HEADINGS and line.endswith(":"):
            listed, prose, raised = True, line in ("Returns:", "Yields:"), line == "Raises:"
            yield from ("", *(["Returns:", ""] if prose else []))
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
            first = f"{'raises ' if raised else ''}`{name}`: {_inline(rest)}" if named else _inline(line.strip())
            yield f"- {first}"
        elif listed and line.strip():
            yield f"  {_inline(line.strip())}"
        else:
            listed = listed and not line
            yield _inline(line.removesuffix("::") + (":" if line.endswith("::") else ""))


def _inline(text: str) -> str:
    """Converts reStructuredText's code and roles to Markdown's code."""
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", text)
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("``", "`")
