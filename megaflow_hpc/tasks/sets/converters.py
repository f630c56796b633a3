"""Converts task sets to Harbor directories and to JSON lines."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.tar import Budget, Kind, Parts, unpack_tar
from megaflow_hpc.tasks.formats import TASK_ID, Refuse
from megaflow_hpc.texts import parse_json

MAX_TEXT_BYTES = 1 << 20
"""Maximum size of a file that a converter reads."""
MAX_TREE = (4 << 30, 500_000)
"""Maximum number of bytes, and of files and directories, of an unpacked archive."""
ROWS = 64
"""Number of Parquet rows in memory at once."""


def to_lines(files: Sequence[Path], target: Path) -> None:
    """Writes the rows of Parquet and JSONL files to one JSONL file.

    Raises:
        ConfigError: A file cannot be read, or pyarrow is not installed.
    """
    with target.open("wb") as stream:
        for file in files:
            if file.suffix == ".parquet":
                for row in _rows(file):
                    stream.write(json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass"))
                    stream.write(b"\n")
                continue
            with file.open("rb") as lines:
                for line in lines:
                    stream.write(line if line.endswith(b"\n") else line + b"\n")


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"{file}: Parquet files are read by the Python package 'pyarrow', which is not installed; pip install "
            "'megaflow-hpc[export]'"
        ) from None
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file}: not a readable Parquet file ({str(error)[:200]}); download it again") from None


def unpack(archive: Path, directory: Path) -> tuple[Path, list[Path]]:
    """Unpacks a git host's tar.gz. Returns the directory that contains the repository, and the paths of symlinks that
    are missing there, because they could lead out of it.

    Raises:
        ConfigError: It is not such an archive, or is too large.
    """
    links = list[Path]()

    def keep(parts: Parts, kind: Kind) -> bool:
        if kind == "symlink":
            links.append(directory.joinpath(*map(os.fsdecode, parts)))
        return kind in ("file", "directory", "symlink", "hardlink")

    try:
        with gzip.open(archive, "rb") as stream:
            unpack_tar(cast(BinaryIO, stream), directory, Budget(*MAX_TREE), keep)
        (root,) = directory.iterdir()
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise ConfigError(f"{archive}: not a git host's archive ({error}); delete it and download it again") from None
    return root, [link for link in links if not os.path.lexists(link)]


def harbor(source: Path, target: Path, refuse: Refuse, missing: Sequence[Path] = ()) -> None:
    """Moves the Harbor task directories below ``source`` to ``target``. Directories in a task belong to the task.

    Leaves out tasks with a symlink that leads out of them.

    Args:
        missing: Paths of symlinks that the source lacks.
    """
    if (source / "task.toml").exists():
        raise ConfigError(f"{source}: is a task itself; name the directory that contains the tasks")
    for file in sorted(source.rglob("task.toml"), key=lambda file: (len(file.parts), file)):
        if not file.exists():  # moved with the task that contains it
            continue
        task, problem = target / file.parent.name, ""
        if task.exists():
            problem = f"{file.parent.relative_to(source)}: another directory of the set has this name"
        elif link := next(_leaving(file.parent, missing), None):
            problem = f"{link.relative_to(source)}: is a link out of the task; copy the file into the task"
        if problem:
            refuse(ConfigError(problem))
            shutil.rmtree(file.parent)  # with the tasks among its files
            continue
        file.parent.rename(task)


def _leaving(task: Path, missing: Sequence[Path]) -> Iterator[Path]:
    """Yields the symlinks of a task that lead out of it."""
    yield from (link for link in missing if link.is_relative_to(task))
    for directory, folders, files in os.walk(task):
        for path in (Path(directory, name) for name in (*folders, *files)):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(task)):
                yield path


TOML = """\
schema_version = "1.2"

[metadata]
source = {source}

[agent]
timeout_sec = 900.0

[verifier]
timeout_sec = 300.0

[environment]
docker_image = {image}
workdir = "/work"
"""


def _write(task: Path, files: Mapping[str, str], image: str, source: str) -> None:
    for name, text in {"task.toml": TOML.format(image=json.dumps(image), source=json.dumps(source)), **files}.items():
        path = task / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        if path.suffix == ".sh":
            path.chmod(0o755)


class _Files(msgspec.Struct):
    solution: list[str]
    test: list[str]
    example: list[str]


class _Exercise(msgspec.Struct):
    """``.meta/config.json`` of an Exercism exercise."""

    files: _Files


POLYGLOT_TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
cp /tests/*.py /work/
cd /work
reward=0
python3 -m unittest *_test.py && reward=1
echo $reward > /logs/verifier/reward.txt
"""
POLYGLOT_TASK = """

---

Change {names} in `{workdir}` so that the tests of this exercise pass. Keep the names of the functions and classes. Use
only the standard library. The tests are not in the directory.
"""


def aider_polyglot(source: Path, target: Path, refuse: Refuse, missing: Sequence[Path] = ()) -> None:
    """Writes the Python exercises of Aider's polyglot benchmark as Harbor tasks."""
    for config in sorted(source.glob("python/exercises/practice/*/.meta/config.json")):
        exercise = config.parent.parent
        try:
            files = msgspec.json.decode(_read(exercise, ".meta/config.json"), type=_Exercise).files
            documents = [".docs/introduction.md", ".docs/instructions.md", ".docs/instructions.append.md"]
            text = "\n\n".join(_read(exercise, name) for name in documents if (exercise / name).is_file())
            names = ", ".join(f"`{PurePosixPath(name).name}`" for name in files.solution)
            written = {"instruction.md": text + POLYGLOT_TASK.format(names=names, workdir="/work")}
            written |= {f"environment/{PurePosixPath(name).name}": _read(exercise, name) for name in files.solution}
            written |= {f"tests/{PurePosixPath(name).name}": _read(exercise, name) for name in files.test}
            solve = ["#!/bin/bash"]
            for name, example in zip(files.solution, files.example, strict=True):
                written[f"solution/{PurePosixPath(name).name}"] = _read(exercise, example)
                solve.append(f"cp {shlex.quote(f'/solution/{PurePosixPath(name).name}')} /work/")
            written |= {"solution/solve.sh": "\n".join(solve) + "\n", "tests/test.sh": POLYGLOT_TEST}
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            refuse(ConfigError(f"{exercise.relative_to(source)}: {error}"))
            continue
        _write(target / exercise.name, written, "python", f"aider-polyglot python/{exercise.name}")


def _read(directory: Path, name: str) -> str:
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"{name} is outside the exercise")
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise ValueError(f"{name} has more than {MAX_TEXT_BYTES:,} bytes")
    return path.read_text(encoding="utf-8")


HUMANEVAL_TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
cat /work/solution.py /tests/check.py > /tmp/checked.py
reward=0
timeout 60 python3 /tmp/checked.py && reward=1
echo $reward > /logs/verifier/reward.txt
"""
HUMANEVAL_TASK = """\
`solution.py` in `/work` has a function with a bug. Repair it. Keep its name and its parameters. Hidden tests will call
it:

```python
{code}
```
"""


class _Fix(msgspec.Struct):
    """A line of HumanEvalPack."""

    task_id: str
    declaration: str
    buggy_solution: str
    canonical_solution: str
    test: str
    imports: str = msgspec.field(default="", name="import")


def humanevalfix(lines: Path, target: Path, refuse: Refuse, missing: Sequence[Path] = ()) -> None:
    """Writes the lines of HumanEvalPack as Harbor tasks in which a bug is to be repaired."""
    with lines.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                fix = msgspec.convert(parse_json(line), _Fix)
                name = re.sub(r"[^A-Za-z0-9._-]", "-", fix.task_id)
                if not TASK_ID.fullmatch(name) or name.startswith(".") or (target / name).exists():
                    raise ValueError(f"task_id {fix.task_id!r}: expected a name that no other line has")
            except (ValueError, msgspec.MsgspecError) as error:
                refuse(ConfigError(f"{lines}:{number}: {error}"))
                continue
            head = f"{fix.imports}\n{fix.declaration}"
            written = {
                "instruction.md": HUMANEVAL_TASK.format(code=f"{head}{fix.buggy_solution}".strip()),
                "environment/solution.py": f"{head}{fix.buggy_solution}\n",
                "solution/solution.py": f"{head}{fix.canonical_solution}\n",
                "solution/solve.sh": "#!/bin/bash\ncp /solution/solution.py /work/\n",
                "tests/check.py": f"\n\n{fix.test}\n",
                "tests/test.sh": HUMANEVAL_TEST,
            }
            _write(target / name, written, "python", f"humanevalfix {fix.task_id}")


DIRECTORIES: Mapping[str, Callable[[Path, Path, Refuse, Sequence[Path]], None]] = {
    "harbor": harbor,
    "aider-polyglot": aider_polyglot,
    "humanevalfix": humanevalfix,
}
"""Converters by format. Each writes task directories into an empty directory."""
