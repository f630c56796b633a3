"""``megaflow-hpc tasks import``: checks SWE-bench-style files and writes them in a uniform format."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from megaflow_hpc.cli.output import note, print_json, say, table
from megaflow_hpc.cli.progress import under_way
from megaflow_hpc.cli.verb import Subparsers, add_output, add_verb
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_atomic

DESCRIPTION = """\
Reads JSONL of SWE-bench, SWE-Gym, SWE-rebench, SWE-bench-Live, SWE-smith or Multi-SWE-bench, one instance a line, and
reports how each would be tested: script (the line's own or the swebench package's command, its log parsed by the
package) or named (pytest with the ids). Lines without a problem statement are left out and counted. With --output the
instances are written to DIR/NAME.jsonl in a uniform format, with the values of the options. A campaign reads such
files directly, imported or not: tasks: [{path: X.jsonl}].
"""


def register(verbs: Subparsers) -> None:
    """Adds ``tasks import``."""
    parser = add_verb(
        verbs,
        "import",
        run_import,
        "check SWE-bench style JSONL files, and write them in a uniform format",
        examples=[
            "tasks import swe-bench-verified.jsonl",
            "tasks import swe-gym.jsonl -o tasks --image 'xingyaoww/sweb.eval.x86_64.{id_s}:latest' --runner named",
            "tasks import mine.jsonl -o tasks --test-cmd 'pytest -rA' --log-parser parse_log_pytest",
        ],
        description=DESCRIPTION,
    )
    parser.add_argument("files", metavar="X.jsonl", nargs="+", help="files to read")
    add_output(parser, "write DIR/NAME.jsonl; without it the files are only checked", metavar="DIR")
    parser.add_argument(
        "--image",
        metavar="NAME",
        default="",
        help="image of every instance: {id} in it is the instance id, {id_1776} and {id_s} the id with __ replaced",
    )
    parser.add_argument(
        "--workdir", metavar="DIR", default="", help="the checkout in the images, where a line has none"
    )
    parser.add_argument("--test-cmd", metavar="CMD", default="", help="runs the tests, where a line has no command")
    parser.add_argument("--log-parser", metavar="NAME", default="", help="reads its log, where a line names none")
    parser.add_argument("--runner", choices=("script", "named"), default="", help="for lines that do not say")


def run_import(arguments: argparse.Namespace) -> int:
    """Checks files, and writes them if requested. Returns the exit status."""
    from megaflow_hpc.tasks.swebench.instances import Line, read_instances
    from megaflow_hpc.tasks.swebench.plan import LineSource, read_tasks, settle, to_task

    names = [Path(file).name for file in arguments.files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if arguments.output and twice:
        raise ConfigError(
            f"--output {arguments.output}: two files are called {twice}; import them into different directories"
        )
    options = {"test_cmd": arguments.test_cmd, "log_parser": arguments.log_parser, "runner": arguments.runner}
    if arguments.workdir:
        options["workdir"] = arguments.workdir
    changed = bool(arguments.image) or any(options.values())
    rows: list[dict[str, Any]] = []
    for file in arguments.files:
        source = Path(file).absolute()
        if source.suffix != ".jsonl":
            raise ConfigError(f"{source}: expected a .jsonl file")
        with under_way(f"reading {source}"), tempfile.TemporaryDirectory() as scratch:
            skipped: list[Line] = []
            read = list(read_instances(source, skipped=skipped))
            instances = [instance.fill_in(arguments.image, **options) for _, instance in read]
            text = "".join(json.dumps(instance.record(), ensure_ascii=False) + "\n" for instance in instances)
            if changed:  # check the tasks in the form that will be written
                copy = Path(scratch, source.name)
                copy.write_text(text, encoding="utf-8", errors="surrogatepass")
                tasks = settle(read_tasks(copy))
            else:
                tasks = settle([to_task(line, instance) for line, instance in read])
        if skipped:
            note(f"{skipped[0]}: has no problem_statement; left out {len(skipped)} such lines")
        target = Path(arguments.output).absolute() / source.name if arguments.output else None
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, text.encode("utf-8", "surrogatepass"), mode=0o644)
            note(f"{target}: {len(tasks)} instances")
        rows += [
            {
                "id": task.id,
                "repo": instance.repo,
                "tested_by": LineSource.of(task).runner,
                "fail_to_pass": len(instance.FAIL_TO_PASS),
                "pass_to_pass": len(instance.PASS_TO_PASS),
                "image": task.image,
                "path": str(target or source),
            }
            for task, instance in zip(tasks, instances, strict=True)
        ]
    if arguments.json:
        print_json(rows)
    else:
        say(table(("id", "repo", "tested by", "fail", "pass", "image"), [tuple(row.values())[:6] for row in rows]))
        counts = Counter(row["tested_by"] for row in rows)
        say(f"{len(rows)} instances, tested by " + ", ".join(f"{name}: {count}" for name, count in counts.items()))
    return 0
