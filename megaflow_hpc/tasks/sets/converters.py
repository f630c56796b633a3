"""Converts task sets to Harbor directories and to JSON lines."""

from __future__ import annotations

import base64
import gzip
import json
import os
import pickletools
import re
import shlex
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.tar import Budget, Kind, Parts, unpack_tar
from megaflow_hpc.tasks.formats import TASK_ID, Refuse
from megaflow_hpc.tasks.sets import competition
from megaflow_hpc.texts import parse_json

MAX_TEXT_BYTES = 1 << 20
"""Maximum size of a file that a converter reads."""
MAX_TREE = (4 << 30, 500_000)
"""Maximum number of bytes, and of files and directories, of an unpacked archive."""
MAX_TESTS_BYTES = 512 << 20
"""Maximum size of the hidden tests of a problem."""
ROWS_IN_MEMORY = 64
"""Maximum number of Parquet rows in memory at once."""


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
            for batch in table.iter_batches(batch_size=ROWS_IN_MEMORY):
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
timeout_sec = {agent_s}

[verifier]
timeout_sec = {verifier_s}

[environment]
docker_image = {image}
workdir = {workdir}
"""
MAX_NAME = 200
"""Maximum length of the name of a task's directory."""


class NewTask(msgspec.Struct):
    """A Harbor task to write."""

    name: str
    files: Mapping[str, str | bytes]
    source: str
    image: str = "python"
    workdir: str = "/work"
    agent_s: float = 900.0
    verifier_s: float = 300.0

    def write(self, directory: Path) -> None:
        """Writes the task below ``directory``.

        Raises:
            ValueError: Its name is invalid, or another task has it.
        """
        if not TASK_ID.fullmatch(self.name) or self.name.startswith(".") or len(self.name) > MAX_NAME:
            raise ValueError(f"the task's name {self.name[:80]!r}: expected at most {MAX_NAME} letters and digits")
        if (directory / self.name).exists():
            raise ValueError(f"the task's name {self.name!r}: an earlier task has it")
        values = {key: json.dumps(getattr(self, key)) for key in self.__struct_fields__ if key not in ("name", "files")}
        for name, content in {"task.toml": TOML.format(**values), **self.files}.items():
            path = directory / self.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
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
            NewTask(exercise.name, written, f"aider-polyglot python/{exercise.name}").write(target)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            refuse(ConfigError(f"{exercise.relative_to(source)}: {error}"))


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


def _humanevalfix(row: Any) -> NewTask:
    fix = msgspec.convert(row, _Fix)
    head = f"{fix.imports}\n{fix.declaration}"
    files = {
        "instruction.md": HUMANEVAL_TASK.format(code=f"{head}{fix.buggy_solution}".strip()),
        "environment/solution.py": f"{head}{fix.buggy_solution}\n",
        "solution/solution.py": f"{head}{fix.canonical_solution}\n",
        "solution/solve.sh": "#!/bin/bash\ncp /solution/solution.py /work/\n",
        "tests/check.py": f"\n\n{fix.test}\n",
        "tests/test.sh": HUMANEVAL_TEST,
    }
    return NewTask(_task_name(fix.task_id), files, f"humanevalfix {fix.task_id}")


def _task_name(row_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", row_id)


PROBLEM_TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
python3 -I /tests/check.py /work/solution.py /tests/tests.json.gz /logs/verifier/reward.txt
"""
PROBLEM_TASK = """

---

Write the solution in Python to `/work/solution.py`. No other answer is read. Use only the standard library. Each of the
hidden tests may take {limit_s} seconds. {how}
"""
PROGRAM = "The solution is a program that reads from standard input and writes to standard output."
FUNCTION = """Keep the names of the starter code, which the file contains:

```python
{code}
```"""


def _problem(
    name: str, text: str, code: str, function: str, limit_s: int, tests: Iterable[tuple[str, str]], source: str
) -> NewTask:
    """Returns the task to solve a programming problem.

    Args:
        code: Starter code.
        function: Function or method that the tests call. Empty if the solution is a program.
        limit_s: Maximum time of a test in seconds.
        tests: Input and expected output of each test.
    """
    pairs = list(tests)
    if not pairs or not text.strip():
        raise ValueError(f"problem {name!r}: has no {'statement' if pairs else 'tests'}")
    problem = {"name": function, "limit_s": limit_s, "tests": pairs}
    how = FUNCTION.format(code=code.rstrip()) if code else f"The tests call `{function}`." if function else PROGRAM
    files: dict[str, str | bytes] = {
        "instruction.md": text + PROBLEM_TASK.format(how=how, limit_s=limit_s),
        "environment/solution.py": code,
        "tests/check.py": Path(competition.__file__).read_bytes(),
        "tests/tests.json.gz": gzip.compress(json.dumps(problem).encode(), 6, mtime=0),
        "tests/test.sh": PROBLEM_TEST,
    }
    verifier_s = max(300.0, 60.0 + len(pairs) * (limit_s + competition.START_S))
    return NewTask(_task_name(name), files, f"{source} {name}", verifier_s=verifier_s)


class _CodeTest(msgspec.Struct):
    input: str
    output: str
    testtype: Literal["stdin", "functional"]


class _Metadata(msgspec.Struct):
    func_name: str | None = None


class _Contest(msgspec.Struct):
    """A line of LiveCodeBench's code generation."""

    question_content: str
    question_id: str
    starter_code: str
    public_test_cases: str
    private_test_cases: str
    metadata: str


def _livecodebench(row: Any) -> NewTask:
    line = msgspec.convert(row, _Contest)
    texts = line.public_test_cases, _hidden_tests(line.private_test_cases)
    tests = [test for text in texts for test in msgspec.json.decode(text, type=list[_CodeTest])]
    function = msgspec.json.decode(line.metadata, type=_Metadata).func_name or ""
    pairs = [(test.input, test.output) for test in tests]
    return _problem(line.question_id, line.question_content, line.starter_code, function, 6, pairs, "livecodebench")


_TEXT_PICKLE = re.compile("(PROTO )?(FRAME )?(SHORT_BIN|BIN)?UNICODE8? ((LONG_BIN|BIN)?PUT |MEMOIZE )?STOP")


def _hidden_tests(text: str) -> str:
    """Returns LiveCodeBench's hidden tests as JSON: the text itself, or the text in a compressed pickle, in base64.

    Never loads the pickle, which could run any code.
    """
    if text.lstrip().startswith("["):
        return text
    unpacker = zlib.decompressobj()
    pickled = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TESTS_BYTES)
    if not unpacker.eof:
        raise ValueError(f"private_test_cases: cut off, or more than {MAX_TESTS_BYTES:,} bytes of tests")
    operations = list(islice(pickletools.genops(pickled), 6))
    form = " ".join(operation.name for operation, _, _ in operations)
    if not _TEXT_PICKLE.fullmatch(form) or operations[-1][2] != len(pickled) - 1:
        raise ValueError(f"private_test_cases: expected a pickle of one text, not of {form}")
    return next(value for _, value, _ in operations if isinstance(value, str))


class _Message(msgspec.Struct):
    content: str


class _Input(msgspec.Struct):
    input: list[_Message]


class _UnitTests(msgspec.Struct):
    inputs: list[str]
    outputs: list[str]
    fn_name: str | None = None


class _Verifier(msgspec.Struct):
    unit_tests: _UnitTests


class _GymRow(msgspec.Struct):
    """A row of NeMo Gym's ``code_gen`` server."""

    responses_create_params: _Input
    verifier_metadata: _Verifier
    hash_id: str


def _nemo_gym_code(row: Any) -> NewTask:
    line = msgspec.convert(row, _GymRow)
    text = "\n\n".join(message.content for message in line.responses_create_params.input)
    tests = line.verifier_metadata.unit_tests
    pairs = zip(tests.inputs, tests.outputs, strict=True)
    return _problem(line.hash_id, text, "", tests.fn_name or "", 10, pairs, "nemotron")


ROWS: Mapping[str, Callable[[Any], NewTask]] = {
    "humanevalfix": _humanevalfix,
    "livecodebench": _livecodebench,
    "nemo-gym-code": _nemo_gym_code,
}
"""Functions that convert a row to a task, by format."""


def write_rows(files: Sequence[Path], target: Path, refuse: Refuse, convert: Callable[[Any], NewTask]) -> None:
    """Writes the rows of Parquet and JSONL files as Harbor tasks into an empty directory."""
    for file in files:
        rows = _rows(file) if file.suffix == ".parquet" else _lines(file)
        for number, row in enumerate(rows, 1):
            if row == b"":
                continue
            try:
                convert(parse_json(row) if isinstance(row, bytes) else row).write(target)
            except (ValueError, zlib.error, msgspec.MsgspecError) as error:
                refuse(ConfigError(f"{file}:{number}: {error}"))


def _lines(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        yield from (line.strip() for line in stream)


DIRECTORIES: Mapping[str, Callable[[Path, Path, Refuse, Sequence[Path]], None]] = {
    "harbor": harbor,
    "aider-polyglot": aider_polyglot,
}
"""Converters of archives by format. Each writes task directories into an empty directory."""
