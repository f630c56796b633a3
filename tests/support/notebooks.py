"""Executes the cells of a notebook in a process of its own, without a kernel.

``python -m tests.support.notebooks NOTEBOOK DIRECTORY`` executes it there and stores the outputs in it, like Jupyter.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any


def run(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Execute the code cells in the working directory; return the outputs of each: text, and the last expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs = []
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        tree, printed, found = ast.parse("".join(cell["source"])), io.StringIO(), []
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"cell {number}", "exec"), names)
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names) if last else None
        if text := printed.getvalue():
            found.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            if hasattr(value, "_repr_png_"):
                data = {"image/png": base64.b64encode(value._repr_png_()).decode(), "text/plain": ["<Chart>"]}
            found.append({"output_type": "execute_result", "metadata": {}, "execution_count": number + 1, "data": data})
        outputs.append(found)
    return outputs


def main() -> None:
    path = Path(sys.argv[1]).absolute()
    notebook = json.loads(path.read_text())
    os.chdir(sys.argv[2])
    sys.path.insert(0, sys.argv[2])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, found) in enumerate(zip(code, run(notebook), strict=True)):
        cell["outputs"], cell["execution_count"] = found, number + 1
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
