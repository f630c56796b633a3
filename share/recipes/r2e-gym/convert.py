"""Writes the rows of a carried R2E-Gym as Harbor tasks.

usage: python convert.py FILE... -o DIRECTORY [--limit N]

FILE is a parquet file, which needs pyarrow, or has JSON lines. The tests come from the row, and their helpers from the
image. The reward is 1 if every test has exactly the outcome that the data set expects, and no other test ran.
"""

import argparse
import json
import shutil
from pathlib import Path

TASK = """\
version = "1.0"

[metadata]
source = "R2E-Gym"
repository = {repository}
commit = {commit}

[environment]
docker_image = {image}
workdir = "/testbed"

# Runs before the agent: the images contain the tests.
[environment.healthcheck]
command = "rm -rf /r2e_tests /root/r2e_tests /testbed/r2e_tests /testbed/run_tests.sh"

[agent]
timeout_sec = 3600

[verifier]
timeout_sec = 1200
"""
TEST = """\
#!/bin/bash
cd /testbed
rm -rf r2e_tests
if [ -d /r2e_tests ]; then cp -r /r2e_tests r2e_tests; else mkdir r2e_tests; fi
cp /tests/r2e_tests/* r2e_tests/
COMMAND > /logs/verifier/output.txt 2>&1
"$(command -v python3 || echo .venv/bin/python)" /tests/grade.py
"""
GRADE = """\
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
SOLVE = "#!/bin/bash\ncd /testbed && git -c safe.directory='*' apply --whitespace=nowarn /solution/fix.patch\n"
WARNINGS = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning'"
COLOUR = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}


def rows(path):
    """Yields the rows of a file as dictionaries."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise SystemExit("error: parquet files need pyarrow: pip install pyarrow") from None
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(20):
            yield from batch.to_pylist()
    else:
        for line in path.read_text().splitlines():
            if line.strip():
                yield json.loads(line)


def command(repository, codes):
    """Returns the command that runs the tests of a repository, as R2E-Gym does."""
    before, program = WARNINGS, "-m pytest -rA r2e_tests"
    if repository == "tornado":
        program = "r2e_tests/tornado_unittest_runner.py"
    elif repository == "pillow" and any("unittest" in code for code in codes):
        program = "r2e_tests/unittest_custom_runner.py"
    elif repository == "orange3":
        before += " QT_QPA_PLATFORM=minimal xvfb-run --auto-servernum"
    return f"{before} .venv/bin/python -W ignore {program}"


def patch(commit):
    """Returns the fix: the differences of a commit in Python files that are no tests."""
    lines = []
    for file in commit["file_diffs"]:
        path = file["header"]["file"]["path"]
        names = path.lower().split("/")
        if not path.endswith(".py") or {"test", "tests"} & set(names) or names[-1].startswith("test_"):
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
            lines += [COLOUR[line["type"]] + line["content"] for line in hunk["line_group"]["all_lines"]]
    return "\n".join(lines) + "\n"


def write(row, directory):
    """Writes a row as a task."""
    tests = json.loads(row["execution_result_content"])
    texts = {
        "task.toml": TASK.format(
            repository=json.dumps(row["repo_name"]),
            commit=json.dumps(row["commit_hash"]),
            image=json.dumps(row["docker_image"]),
        ),
        "instruction.md": "Repair the code in /testbed, so that this issue is solved:\n\n" + row["problem_statement"],
        "tests/test.sh": TEST.replace("COMMAND", command(row["repo_name"], tests["test_file_codes"])),
        "tests/grade.py": GRADE,
        "tests/expected.json": row["expected_output_json"],
        "solution/solve.sh": SOLVE,
        "solution/fix.patch": patch(json.loads(row["parsed_commit_content"])),
    }
    for name, code in zip(tests["test_file_names"], tests["test_file_codes"], strict=True):
        texts[f"tests/r2e_tests/{Path(name).name}"] = code
    if directory.exists():
        shutil.rmtree(directory)
    for name, text in texts.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="write only the first N rows")
    asked = parser.parse_args()
    count = 0
    for path in asked.files:
        for row in rows(path):
            if count == asked.limit:
                break
            write(row, asked.output / f"{row['repo_name']}-{row['commit_hash'][:12]}")
            count += 1
    print(f"{asked.output}: {count} tasks")


if __name__ == "__main__":
    main()
