"""Converts task sets to Harbor directories and to JSON lines."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import os
import pickletools
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, cast

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.tar import Budget, Kind, Parts, unpack_tar
from megaflow_hpc.resources import imported
from megaflow_hpc.tasks.formats import TASK_ID, Refuse
from megaflow_hpc.tasks.sets import competition
from megaflow_hpc.texts import parse_json

MAX_TEXT_BYTES = 1 << 20
"""Maximum size in bytes of a file that a converter reads."""
MAX_TREE = (4 << 30, 500_000)
"""Maximum size in bytes, and maximum number of files and directories, of an unpacked archive."""
MAX_TESTS_BYTES = 512 << 20
"""Maximum size in bytes of a problem's hidden tests."""
ROWS_IN_MEMORY = 64
"""Maximum number of Parquet rows in memory at the same time."""


def to_lines(files: Sequence[Path], target: Path) -> None:
    """Writes the rows of Parquet and JSONL files to one JSONL file.

    Raises:
        ConfigError: A file cannot be read, or pyarrow is not installed.
    """
    with target.open("wb") as stream:
        for row in itertools.chain.from_iterable(map(_rows, files)):
            if not isinstance(row, bytes):
                row = json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
            stream.write(row + b"\n")


def _rows(file: Path) -> Iterator[dict[str, Any] | bytes]:
    """Yields the rows of a Parquet file, or the lines of a JSONL file as bytes."""
    if file.suffix != ".parquet":
        with file.open("rb") as stream:
            yield from (line.strip() for line in stream)
        return
    pyarrow, parquet = imported("pyarrow"), imported("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=ROWS_IN_MEMORY):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file}: not a readable Parquet file ({str(error)[:200]}); download it again") from None


def unpack(archive: Path, directory: Path) -> tuple[Path, list[Path]]:
    """Unpacks a tar.gz from a git host. Returns the repository's directory, and the paths of symlinks that were not
    unpacked because they could point outside it.

    Raises:
        ConfigError: The file is not such an archive, or is too large.
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
    """Moves the Harbor task directories below ``source`` to ``target``. Task directories inside a task are part of that
    task.

    Tasks with a symlink that points outside the task are left out.

    Args:
        missing: Paths of symlinks that were not unpacked.
    """
    if (source / "task.toml").exists():
        raise ConfigError(f"{source}: is a task itself; name the directory that contains the tasks")
    for file in sorted(source.rglob("task.toml"), key=lambda file: (len(file.parts), file)):
        if not file.exists():  # moved along with the task that contains it
            continue
        task, problem = target / file.parent.name, ""
        if task.exists():
            problem = f"{file.parent.relative_to(source)}: another directory of the set has this name"
        elif link := next(_leaving(file.parent, missing), None):
            problem = f"{link.relative_to(source)}: is a link out of the task; copy the file into the task"
        if problem:
            refuse(ConfigError(problem))
            shutil.rmtree(file.parent)  # including any tasks inside it
            continue
        file.parent.rename(task)


def _leaving(task: Path, missing: Sequence[Path]) -> Iterator[Path]:
    """Yields the symlinks in a task that point outside the task."""
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
HEALTHCHECK = """
[environment.healthcheck]
command = {first}
"""
MAX_NAME = 200
"""Maximum length of directory and file names."""


class NewTask(msgspec.Struct):
    """A Harbor task to write."""

    name: str
    files: Mapping[str, str | bytes]
    """Contents by path. A ``task.toml`` replaces the one that the next fields describe."""
    source: str
    image: str = "python"
    workdir: str = "/work"
    agent_s: float = 900.0
    verifier_s: float = 300.0
    first: str = ""
    """Command that runs before the agent."""

    def write(self, directory: Path) -> None:
        """Writes the task below ``directory``.

        Raises:
            ValueError: The task's name or a file's name is invalid, or another task has the same name.
        """
        if not TASK_ID.fullmatch(self.name) or self.name.startswith(".") or len(self.name) > MAX_NAME:
            raise ValueError(f"the task's name {self.name[:80]!r}: expected at most {MAX_NAME} letters and digits")
        if (directory / self.name).exists():
            raise ValueError(f"the task's name {self.name!r}: an earlier task has it")
        for name in self.files:
            if {"..", ""} & {*name.split("/")} or len(PurePosixPath(name).name) > MAX_NAME or "\0" in name:
                raise ValueError(f"{name[:80]!r}: not the name of a file in the task")
        values = {key: json.dumps(getattr(self, key)) for key in self.__struct_fields__ if key not in ("name", "files")}
        toml = TOML.format(**values) + (HEALTHCHECK.format(**values) if self.first else "")
        for name, content in {"task.toml": toml, **self.files}.items():
            path = directory / self.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
            if path.suffix == ".sh" or path.name == "gradlew":
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
cp -r /tests/files/. {workdir}/
cd {workdir}
reward=0
{{ {command}; }} && reward=1
echo $reward > /logs/verifier/reward.txt
"""
POLYGLOT_TASK = """

---

Change {names} in `{workdir}` so that the tests of this exercise pass. Keep the names of the functions and classes. Use
only the standard library. The tests are not in the directory.
"""
POLYGLOT_COMMANDS: Mapping[str, str] = {
    "cpp": "cmake -DEXERCISM_RUN_ALL_TESTS=1 -G 'Unix Makefiles' -S . -B /tmp/build && make -C /tmp/build",
    "go": "go test ./...",
    "java": "sh gradlew test",
    "javascript": "rm -rf node_modules && ln -s /npm-install/node_modules . && npm run test",
    "python": "python3 -m unittest *_test.py",
    "rust": "cargo test -- --include-ignored",
}
"""Maps each language to the command that tests an exercise. Python exercises use a plain Python image. Exercises in
other languages use Aider's image."""
_SKIPPED = re.compile(rb"\bx(?=test\()|@Disabled\([^)]*\)\s*\n")
"""Matches the markers with which Exercism disables tests until the user enables them."""


def aider_polyglot(source: Path, target: Path, refuse: Refuse, missing: Sequence[Path] = ()) -> None:
    """Converts the exercises of Aider's polyglot benchmark to Harbor tasks."""
    for config in sorted(source.glob("*/exercises/practice/*/.meta/config.json")):
        exercise = config.parent.parent
        try:
            _exercise(exercise, exercise.parents[2].name).write(target)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            refuse(ConfigError(f"{exercise.relative_to(source)}: {error}"))


def _exercise(exercise: Path, language: str) -> NewTask:
    if language not in POLYGLOT_COMMANDS:
        raise ValueError(f"expected an exercise in {', '.join(POLYGLOT_COMMANDS)}")
    files = msgspec.json.decode(_read(exercise, ".meta/config.json"), type=_Exercise).files
    documents = [".docs/introduction.md", ".docs/instructions.md", ".docs/instructions.append.md"]
    text = "\n\n".join(_read(exercise, name).decode() for name in documents if (exercise / name).is_file())
    paths = (str(path.relative_to(exercise)) for path in sorted(exercise.rglob("*")) if path.is_file())
    given = {path: _read(exercise, path) for path in paths if not path.startswith((".meta/", ".docs/"))}
    if absent := sorted({*files.solution, *files.test} - given.keys()):
        raise ValueError(f"{', '.join(absent)}: missing")
    # Name the directory after the exercise, because CMake derives the program's name from it.
    values = {"workdir": f"/work/{exercise.name}", "command": POLYGLOT_COMMANDS[language]}
    names = ", ".join(f"`{name}`" for name in files.solution)
    written: dict[str, str | bytes] = {"instruction.md": text + POLYGLOT_TASK.format(names=names, **values)}
    for path, data in given.items():
        if path not in files.test:
            written[f"environment/{path}"] = data
        if path not in files.solution:
            written[f"tests/files/{path}"] = _SKIPPED.sub(b"", data) if path in files.test else data
    for example, path in _solutions(exercise, files).items():
        written[f"solution/files/{path}"] = _read(exercise, example)
    written["solution/solve.sh"] = f"#!/bin/bash\ncp -r /solution/files/. {values['workdir']}/\n"
    written["tests/test.sh"] = POLYGLOT_TEST.format(**values)
    image = "python" if language == "python" else "aider-polyglot"
    source = f"aider-polyglot {language}/{exercise.name}"
    return NewTask(f"{language}-{exercise.name}", written, source, image, values["workdir"])


def _solutions(exercise: Path, files: _Files) -> dict[str, str]:
    """Maps each example file to the solution file of the same name, or else of the same suffix, which it replaces.

    Other example files are helpers, which are placed next to the solution.
    """
    free, placed = list(files.solution), dict[str, str]()
    for same in (lambda path: path.name, lambda path: path.suffix):
        for example in (each for each in files.example if each not in placed):
            for path in free:
                if same(PurePosixPath(path)) == same(PurePosixPath(example)):
                    placed[example] = path
                    free.remove(path)
                    break
    for example in files.example:
        placed.setdefault(example, str(PurePosixPath(files.solution[0]).with_name(PurePosixPath(example).name)))
    manifest = ".meta/Cargo-example.toml"  # Rust's examples may need crates
    if "Cargo.toml" in free and (exercise / manifest).is_file():
        placed[manifest] = "Cargo.toml"
    return placed


def _read(directory: Path, name: str) -> bytes:
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ValueError(f"{name} is outside the exercise")
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise ValueError(f"{name} has more than {MAX_TEXT_BYTES:,} bytes")
    return path.read_bytes()


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
    """A line of the HumanEvalPack dataset."""

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
    """Returns the task of solving a programming problem.

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
    how = PROGRAM
    if code:
        how = FUNCTION.format(code=code.rstrip())
    elif function:
        how = f"The tests call `{function}`."
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
    """A line of LiveCodeBench's code-generation dataset."""

    question_content: str
    question_id: str
    starter_code: str
    public_test_cases: str
    private_test_cases: str
    metadata: str


def _livecodebench(row: Any) -> NewTask:
    line = msgspec.convert(row, _Contest)
    texts = line.public_test_cases, _hidden_tests(line.private_test_cases)
    pairs = [(test.input, test.output) for text in texts for test in msgspec.json.decode(text, type=list[_CodeTest])]
    function = msgspec.json.decode(line.metadata, type=_Metadata).func_name or ""
    return _problem(line.question_id, line.question_content, line.starter_code, function, 6, pairs, "livecodebench")


_TEXT_PICKLE = re.compile("(PROTO )?(FRAME )?(SHORT_BIN|BIN)?UNICODE8? ((LONG_BIN|BIN)?PUT |MEMOIZE )?STOP")


def _hidden_tests(text: str) -> str:
    """Returns LiveCodeBench's hidden tests as JSON.

    The text is either JSON itself, or a base64-encoded, compressed pickle that contains the JSON. Never loads the
    pickle, because that could run arbitrary code.
    """
    if text.lstrip().startswith("["):
        return text
    unpacker = zlib.decompressobj()
    pickled = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TESTS_BYTES)
    if not unpacker.eof:
        raise ValueError(f"private_test_cases: cut off, or more than {MAX_TESTS_BYTES:,} bytes of tests")
    operations = list(itertools.islice(pickletools.genops(pickled), 6))
    form = " ".join(operation.name for operation, _, _ in operations)
    if not _TEXT_PICKLE.fullmatch(form) or operations[-1][2] != len(pickled) - 1:
        raise ValueError(f"private_test_cases: expected a pickle of one text, not of {form}")
    return next(value for _, value, _ in operations if isinstance(value, str))


class _UnitTests(msgspec.Struct):
    inputs: list[str]
    outputs: list[str]
    fn_name: str | None = None


def _nemo_gym_code(row: Any) -> NewTask:
    """Converts a row of NeMo Gym's ``code_gen`` server."""
    text = "\n\n".join(message["content"] for message in row["responses_create_params"]["input"])
    tests = msgspec.convert(row["verifier_metadata"]["unit_tests"], _UnitTests)
    pairs = zip(tests.inputs, tests.outputs, strict=True)
    return _problem(row["hash_id"], text, "", tests.fn_name or "", 10, pairs, "nemotron")


R2E_TEST = """\
#!/bin/bash
cd /testbed
rm -rf r2e_tests
if [ -d /r2e_tests ]; then cp -r /r2e_tests r2e_tests; else mkdir r2e_tests; fi
cp /tests/r2e_tests/* r2e_tests/
{command} > /logs/verifier/output.txt 2>&1
"$(command -v python3 || echo .venv/bin/python)" /tests/grade.py
"""
R2E_GRADE = """\
import json
import re

output = re.sub(r"\\x1b\\[[0-9;]*m", "", open("/logs/verifier/output.txt", errors="replace").read())
found = {}
for line in output.partition("short test summary info")[2].splitlines():
    match = re.match(r"(PASSED|FAILED|ERROR) (.+)", line)
    if match:
        found[".".join(match[2].split("::")[1:]).split(" - ")[0]] = match[1]
expected = {name.split(" - ")[0]: outcome for name, outcome in json.load(open("/tests/expected.json")).items()}
found.pop("", None), expected.pop("", None)
for name in sorted(found.keys() | expected.keys()):
    if found.get(name) != expected.get(name):
        print(f"{name}: {found.get(name)}, expected {expected.get(name)}")
with open("/logs/verifier/reward.txt", "w") as reward:
    reward.write(str(int(found == expected)))
"""
R2E_SOLVE = "#!/bin/bash\ncd /testbed && git -c safe.directory='*' apply --whitespace=nowarn /solution/fix.patch\n"
R2E_FIRST = "rm -rf /r2e_tests /root/r2e_tests /testbed/r2e_tests /testbed/run_tests.sh"
R2E_MARKS: Mapping[str, str] = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


class _Commit(msgspec.Struct):
    """A row of the R2E-Gym dataset."""

    repo_name: str
    docker_image: str
    commit_hash: str
    parsed_commit_content: str
    execution_result_content: str
    problem_statement: str
    expected_output_json: str


class _Execution(msgspec.Struct):
    test_file_names: list[str]
    test_file_codes: list[str]


def _r2e_gym(row: Any) -> NewTask:
    """Converts a row of R2E-Gym. The tests come from the row. Their helpers come from the image, where they are hidden
    from the agent. Every test must have exactly the expected outcome."""
    line = msgspec.convert(row, _Commit)
    tests = msgspec.json.decode(line.execution_result_content, type=_Execution)
    if not msgspec.json.decode(line.expected_output_json, type=dict[str, str]):
        raise ValueError("expected_output_json: has no test")
    files: dict[str, str | bytes] = {
        f"tests/r2e_tests/{PurePosixPath(name).name}": code
        for name, code in zip(tests.test_file_names, tests.test_file_codes, strict=True)
    }
    files |= {
        "instruction.md": f"Repair the code in /testbed, so that this issue is solved:\n\n{line.problem_statement}",
        "tests/test.sh": R2E_TEST.format(command=_r2e_command(line.repo_name, tests.test_file_codes)),
        "tests/grade.py": R2E_GRADE,
        "tests/expected.json": line.expected_output_json,
        "solution/solve.sh": R2E_SOLVE,
        "solution/fix.patch": _r2e_fix(parse_json(line.parsed_commit_content)),
    }
    name, source = f"{line.repo_name}-{line.commit_hash[:12]}", f"r2e-gym {line.repo_name} {line.commit_hash}"
    return NewTask(_task_name(name), files, source, line.docker_image, "/testbed", 3600.0, 1200.0, R2E_FIRST)


def _r2e_command(repository: str, codes: list[str]) -> str:
    """Returns the command with which R2E-Gym runs the tests of a repository."""
    before, program = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning'", "-m pytest -rA r2e_tests"
    if repository == "tornado":
        program = "r2e_tests/tornado_unittest_runner.py"
    elif repository == "pillow" and any("unittest" in code for code in codes):
        program = "r2e_tests/unittest_custom_runner.py"
    elif repository == "orange3":
        before += " QT_QPA_PLATFORM=minimal xvfb-run --auto-servernum"
    return f"{before} .venv/bin/python -W ignore {program}"


def _r2e_fix(commit: Any) -> str:
    """Returns the fix, which is the commit's changes to Python files other than tests."""
    lines = []
    for file in commit["file_diffs"]:
        path = file["header"]["file"]["path"]
        names = path.lower().split("/")
        if not path.endswith(".py") or {"test", "tests"} & {*names} or names[-1].startswith("test_"):
            continue
        if not file["minus_file"] or not file["plus_file"]:
            continue
        lines += [f"diff --git a/{path} b/{path}"]
        lines += [file["header"]["misc_line"]] if file["header"].get("misc_line") else []
        lines += [f"--- {file['minus_file']['path']}", f"+++ {file['plus_file']['path']}"]
        for hunk in file["hunks"]:
            ranges = [hunk["descriptor"][side] for side in ("old_range", "new_range")]
            old, new = (f"{r['start']},{1 if r.get('length') is None else r['length']}" for r in ranges)
            lines.append(f"@@ -{old} +{new} @@")
            lines += [R2E_MARKS[line["type"]] + line["content"] for line in hunk["line_group"]["all_lines"]]
    return "\n".join(lines) + "\n"


ROWS: Mapping[str, Callable[[Any], NewTask]] = {
    "humanevalfix": _humanevalfix,
    "livecodebench": _livecodebench,
    "nemo-gym-code": _nemo_gym_code,
    "r2e-gym": _r2e_gym,
}
"""Maps each format to the function that converts a row to a task."""


def write_rows(files: Sequence[Path], target: Path, refuse: Refuse, convert: Callable[[Any], NewTask]) -> None:
    """Converts the rows of Parquet and JSONL files to Harbor tasks in an empty directory."""
    for file in files:
        for number, row in enumerate(_rows(file), 1):
            if row == b"":
                continue
            try:
                convert(parse_json(row) if isinstance(row, bytes) else row).write(target)
            except (ValueError, zlib.error, msgspec.MsgspecError) as error:
                refuse(ConfigError(f"{file}:{number}: {error}"))
            except (LookupError, TypeError, AttributeError) as error:  # a nested field is missing or has the wrong type
                refuse(ConfigError(f"{file}:{number}: not in the format of this set ({error!r:.200})"))


DIRECTORIES: Mapping[str, Callable[[Path, Path, Refuse, Sequence[Path]], None]] = {
    "harbor": harbor,
    "aider-polyglot": aider_polyglot,
}
"""Maps each format of archives to its converter, which writes task directories into an empty directory."""
