"""``tasks``: imports tasks, builds them from real bugs, validates and lists them."""

from __future__ import annotations

import argparse
import asyncio
import glob
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.cli.output import note, print_json, print_result, say, table
from megaflow_hpc.cli.progress import PlanProgress, under_way
from megaflow_hpc.cli.verb import Subparsers, add_group, add_output, add_verb, whole
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.resources import docs
from megaflow_hpc.types import Task

IMPORT = """\
NAME[@VERSION] is a task set of --list. Its files come from the Hugging Face Hub (HF_ENDPOINT, HF_TOKEN), a git archive
or --from DIR. Repeated, the command continues a download that broke off. DIR/NAME.source.json records each file's
SHA-256. Parquet files need pip install 'megaflow-hpc[export]'.

X.jsonl: reads JSON lines in the format of SWE-bench and its relatives, and reports how each instance is tested: script
(the command of the line or of the swebench package) or named (pytest with the test ids). Leaves out lines that cannot
be read or tested, and reports why. With --output, writes the instances to DIR/NAME.jsonl, with the values of the
options. A campaign also reads X.jsonl itself: tasks: [{path: X.jsonl}].
"""

BUILD = f"""\
A bug file names two releases of a package, the tests that tell them apart and an issue text; an example is in
{docs("how-to/real-bugs.md")}.
Pip fetches both source distributions. Existing files are kept, so the command can be repeated.

then, in a campaign file:
  tasks: [tasks/bugs/*]
  environment: {{images: {{megaflow-bugs: tasks/images/megaflow-bugs.sif}}}}
"""

VALIDATE = """\
Each task runs twice in fresh sandboxes: unchanged (reward 0 expected) and with its solution (reward 1 expected). For
tasks made by tasks build, each named test must fail before, not just be missing. Tasks that cannot be read are reported
and left out. Exit status 1 if a task is invalid or left out.
"""

SOURCE = "a task directory, a directory of tasks, a quoted pattern, a module:Class, or a JSONL file"


def register(subparsers: Subparsers) -> None:
    """Registers ``tasks`` and its subcommands."""
    verbs = add_group(
        subparsers,
        "tasks",
        "import, build, validate and list tasks",
        examples=["tasks import swe-bench-verified.jsonl", "tasks validate tasks/bugs"],
    )
    _add_import(verbs)
    build = add_verb(
        verbs,
        "build",
        run_build,
        "build Harbor task directories and their image from real bugs of released packages",
        examples=[
            "tasks build bugs.yaml -o tasks/bugs                   # task directories only",
            "tasks build bugs.yaml -o tasks/bugs --base base.sif   # and tasks/images/megaflow-bugs.sif",
        ],
        description=BUILD,
    )
    build.add_argument("bugs", metavar="BUGS.yaml", help="the bug file")
    add_output(build, "directory in which to create the task directories", required=True, metavar="DIR")
    build.add_argument("--base", metavar="SIF", help="also build the tasks' image, on this one with python3 and git")
    build.add_argument("--image", metavar="SIF", help="the image to build; default: images/NAME.sif next to DIR")
    build.add_argument("--only", metavar="ID", action="extend", nargs="+", default=[], help="only these bugs")
    build.add_argument("--cache", metavar="DIR", help="cache of source distributions; default: ~/.cache/megaflow-hpc")

    validate = add_verb(
        verbs,
        "validate",
        run_validate,
        "prove that tasks give reward 0 unchanged and 1 with their solution",
        examples=[
            "tasks validate tasks/bugs",
            "tasks validate tasks/bugs/tomlkit-integer-division --image tasks/images/megaflow-bugs.sif --json",
            "tasks validate tasks/bugs --campaign campaign.yaml",
            "tasks validate 'tasks/py*' --image base.sif",
            "tasks validate mytasks:Sorting --image base.sif",
        ],
        description=VALIDATE,
    )
    validate.add_argument("source", metavar="SOURCE", help=SOURCE)
    validate.add_argument(
        "--image",
        metavar="SIF",
        help="the tasks' image, a file or docker://NAME; default: images/NAME.sif next to the tasks' directory",
    )
    validate.add_argument("--only", metavar="ID", action="extend", nargs="+", default=[], help="only these tasks")
    validate.add_argument(
        "--campaign", metavar="FILE", help="use this campaign's limits, network, verification and images"
    )
    validate.add_argument(
        "--network",
        choices=("none", "host"),
        help="network of tasks that set none (default: the campaign's, or none)",
    )
    validate.add_argument("--jobs", metavar="N", type=whole(1), default=2, help="number of concurrent sandboxes (2)")

    new = add_verb(
        verbs,
        "new",
        run_new,
        "write a valid task to start from, as a Harbor directory",
        examples=[
            "tasks new count-words                  # count-words/ in tasks/",
            "tasks validate tasks/count-words --image images/base.sif",
        ],
        description="Writes DIR/NAME with task.toml, instruction.md, environment/, solution/ and tests/. Comments "
        "explain each file, for you to change.",
    )
    new.add_argument("name", metavar="NAME", help="id of the task")
    new.add_argument("directory", metavar="DIR", nargs="?", default="tasks", help="parent directory; default: tasks")

    listing = add_verb(
        verbs,
        "list",
        run_list,
        "print the tasks of a directory",
        examples=["tasks list tasks/bugs", "tasks list swe-bench-verified.jsonl"],
        description="Lists the valid tasks, and reports each task that cannot be read or tested on stderr. Exit "
        "status 2 if there is one.",
    )
    listing.add_argument("source", metavar="SOURCE", help=SOURCE)


def _add_import(verbs: Subparsers) -> None:
    parser = add_verb(
        verbs,
        "import",
        run_import,
        "import a task set by name, or check SWE-bench style JSONL files",
        examples=[
            "tasks import --list",
            "tasks import swe-bench-verified -o tasks",
            "tasks import swe-smith@main -o tasks --from /data/swe-smith",
            "tasks import instances.jsonl",
            "tasks import swe-gym.jsonl -o tasks --image 'xingyaoww/sweb.eval.x86_64.{id_s}:latest' --runner named",
            "tasks import mine.jsonl -o tasks --test-cmd 'pytest -rA' --log-parser parse_log_pytest",
        ],
        description=IMPORT,
    )
    parser.add_argument("sources", metavar="NAME|X.jsonl", nargs="*", help="sets to import, or files to read")
    parser.add_argument("--list", action="store_true", help="list the sets that have a name")
    add_output(
        parser, "where to write the tasks; default: tasks, and for files: nothing, they are only checked", metavar="DIR"
    )
    parser.add_argument("--from", dest="origin", metavar="DIR", help="directory with the set's files; no download")
    parser.add_argument("--mirror", metavar="URL", default="", help="server with the same paths as the set's own")
    parser.add_argument("--accept-licence", action="store_true", help="accept the licence of the set")
    parser.add_argument(
        "--image",
        metavar="NAME",
        default="",
        help="image of every instance; {id} stands for its id, {id_1776} and {id_s} for the id with __ replaced. For "
        "miniwob: the file of the image that has its pages",
    )
    parser.add_argument("--seeds", metavar="N", type=whole(1), default=1, help="miniwob: tasks of each page (1)")
    parser.add_argument("--workdir", metavar="DIR", default="", help="checkout in the images, for lines that name none")
    parser.add_argument(
        "--test-cmd", metavar="CMD", default="", help="command that runs the tests, for lines without one"
    )
    parser.add_argument(
        "--log-parser", metavar="NAME", default="", help="parser of the test log, for lines that name none"
    )
    parser.add_argument(
        "--runner", choices=("script", "named"), default="", help="how to test instances whose line does not say"
    )
    parser.add_argument(
        "--strict", action="store_true", help="write nothing, and end with exit status 2, if a task would be left out"
    )


def run_import(arguments: argparse.Namespace) -> int:
    """Imports task sets, or checks task files and writes them if requested. Returns the exit status."""
    from megaflow_hpc.tasks.loading import summarise
    from megaflow_hpc.tasks.sets.download import task_sets
    from megaflow_hpc.tasks.sets.importing import import_set
    from megaflow_hpc.tasks.swebench.format import import_file

    if arguments.list:
        return _list_sets(arguments.json)
    if not arguments.sources:
        raise ConfigError("name a task set or a .jsonl file; see: megaflow-hpc tasks import --list")
    names = [Path(file).name for file in arguments.sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if arguments.output and twice:
        raise ConfigError(
            f"--output {arguments.output}: two sources are called {twice}; import them into different directories"
        )
    options = {"test_cmd": arguments.test_cmd, "log_parser": arguments.log_parser, "runner": arguments.runner}
    if arguments.workdir:
        options["workdir"] = arguments.workdir
    change = None
    if arguments.image or any(options.values()):
        change = lambda instance: instance.fill_in(arguments.image, **options)  # noqa: E731
    rows = list[dict[str, Any]]()
    left_out = list[str]()
    for argument in arguments.sources:
        _refuse_unused(arguments, argument)
    for argument in arguments.sources:
        source = Path(argument).absolute()
        if source.suffix != ".jsonl":
            if (os.sep in argument or source.exists()) and argument.partition("@")[0] not in task_sets():
                raise ConfigError(f"{source}: expected a .jsonl file, or the name of a task set")
            result = import_set(
                argument,
                Path(arguments.output or "tasks").absolute(),
                origin=Path(arguments.origin).absolute() if arguments.origin else None,
                mirror=arguments.mirror,
                accepted=arguments.accept_licence,
                change=change,
                say=note,
                image=Path(arguments.image).absolute() if arguments.image else None,
                seeds=arguments.seeds,
                strict=arguments.strict,
            )
            note(f"{result.path}: {len(result.rows)} tasks, version {result.revision}")
            note(f"in a campaign file: tasks: [{{path: {result.pattern}}}]")
            rows += result.rows
            left_out += result.left_out
            continue
        target = Path(arguments.output).absolute() / source.name if arguments.output else None
        with under_way(f"reading {source}"):
            imported = import_file(source, target, change, arguments.strict)
        if target is not None:
            note(f"{target}: {len(imported.rows)} instances")
        rows += imported.rows
        left_out += imported.left_out
    for line in summarise(left_out):
        note(f"left out: {line}")
    if arguments.json:
        print_json(rows)
    else:
        if all("tested_by" in row for row in rows):
            cells = [tuple(row.values())[:6] for row in rows]
            say(table(("id", "repo", "tested by", "fail", "pass", "image"), cells))
        counts = Counter(row.get("tested_by", "test.sh") for row in rows)
        tested = ", ".join(f"{n}: {counts[n]}" for n in counts)
        say(f"{len(rows)} instances, tested by {tested}" + (f"; {len(left_out)} left out" if left_out else ""))
    return 0


def _refuse_unused(arguments: argparse.Namespace, source: str) -> None:
    """Raises ConfigError for an option that has no effect on this source. The names of task sets are checked later."""
    from megaflow_hpc.tasks.sets.download import task_sets

    task_set = task_sets().get(source.partition("@")[0])
    unused: tuple[str, ...]
    if source.endswith(".jsonl"):
        kind, unused = "a file is read as it is", ("--from", "--mirror", "--seeds")
    elif task_set is None or task_set.unread:
        return
    elif task_set.format == "swebench":
        kind, unused = "only pages have seeds", ("--seeds",)
    else:
        kind, unused = "its tasks bring their tests", ("--workdir", "--test-cmd", "--log-parser", "--runner")
        if task_set.format != "miniwob":
            kind, unused = "its tasks are Harbor directories", ("--image", *unused, "--seeds")
    given = {"--from": arguments.origin, "--seeds": arguments.seeds > 1}
    for option in unused:
        if given[option] if option in given else getattr(arguments, option[2:].replace("-", "_")):
            hint = ", and map its images in environment.images of the campaign" if option == "--image" else ""
            raise ConfigError(f"{option}: has no effect on {source}: {kind}; leave it out{hint}")


def _list_sets(as_json: bool) -> int:
    """Prints the named task sets and their properties."""
    import msgspec

    from megaflow_hpc.tasks.sets.download import task_sets

    sets = task_sets()
    rows = [
        (name, each.tasks, each.bytes, each.licence, each.images, each.format or f"not read: {each.unread}")
        for name, each in sets.items()
    ]
    result = [{"name": name, "page": each.page, **msgspec.to_builtins(each)} for name, each in sets.items()]
    print_result(as_json, result, table(("name", "tasks", "bytes", "licence", "images", "format"), rows))
    return 0


def run_build(arguments: argparse.Namespace) -> int:
    """Builds task directories, and an image for them if a base image is given. Returns the exit status."""
    from megaflow_hpc.tasks.releases import image as bug_image
    from megaflow_hpc.tasks.releases import sdists
    from megaflow_hpc.tasks.releases import tasks as releases
    from megaflow_hpc.tasks.releases.bugs import read_bugs, select

    content, where = read_bugs(arguments.bugs)
    chosen = select(content.bugs, arguments.only)
    output = Path(arguments.output).absolute()
    cache = Path(arguments.cache) if arguments.cache else sdists.cache_directory()
    built = releases.build_tasks(content, chosen, output, cache.absolute(), where, note)
    image = Path(arguments.image).absolute() if arguments.image else output.parent / "images" / f"{content.image}.sif"
    for stranger in releases.strangers(content, output):
        note(f"{stranger}: built from a bug that {arguments.bugs} no longer has; delete it if you do not want it")
    if arguments.base:
        bug_image.build_image(content, Path(arguments.base).absolute(), image, note)
    else:
        note(f"no image built; add --base SIF, or map {content.image!r} in environment.images of the campaign")
    if arguments.json:
        tasks = [
            {"id": task.id, "path": str(task.path), "package": task.bug.package, "kind": task.bug.kind}
            | {"patch_lines": task.lines, "built": task.fresh}
            for task in built
        ]
        print_json({"tasks": tasks, "image": str(image) if arguments.base else None, "image_name": content.image})
    else:
        say(f"{len(built)} tasks in {output}" + (f", image {image}" if arguments.base else ""))
    return 0


def task_directories(directory: str) -> list[Path]:
    """Returns the task directories that an argument names: a task, a directory of tasks, or a pattern.

    Raises:
        ConfigError: The directory contains no tasks, or the pattern matches none.
    """
    if glob.has_magic(directory) and not os.path.lexists(directory):
        from megaflow_hpc.tasks.harbor.format import find_tasks

        return [Path(path) for path in find_tasks(directory, Path.cwd())]
    root = Path(directory).absolute()
    if (root / "task.toml").is_file():
        return [root]
    directories = sorted(path.parent for path in root.glob("*/task.toml") if not path.parent.name.startswith("."))
    if not directories:
        raise ConfigError(
            f"{root}: no Harbor task directory (one with task.toml) there; build some with: megaflow-hpc tasks build"
            ", or begin one with: megaflow-hpc tasks new NAME"
        )
    return directories


def _source(argument: str) -> str:
    """Converts an argument to a task source of a campaign. A directory of tasks becomes a pattern.

    Raises:
        ConfigError: The directory contains no tasks.
    """
    from megaflow_hpc.tasks.formats import format_of_source
    from megaflow_hpc.tasks.harbor.format import FORMAT as HARBOR

    if format_of_source(argument) is not HARBOR:
        return argument
    directories = task_directories(argument)
    if not Path(argument).is_dir():
        return argument
    only_one = directories == [Path(argument).absolute()]
    return glob.escape(argument) if only_one else f"{glob.escape(argument)}/*"


def run_validate(arguments: argparse.Namespace) -> int:
    """Validates tasks and prints the results. Returns 1 if any task is invalid."""
    from megaflow_hpc.agents.without_model import OracleAgent
    from megaflow_hpc.config import load
    from megaflow_hpc.config.sections import EnvironmentConfig
    from megaflow_hpc.environments.builds.builder import Builder
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.sources import ImageMapping, Registries
    from megaflow_hpc.environments.images.store import ImageStore
    from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
    from megaflow_hpc.tasks.loading import image_requests, in_image_directories, load_tasks
    from megaflow_hpc.tasks.validation import Validation, validate

    source = _source(arguments.source)
    campaign = load(arguments.campaign) if arguments.campaign else None
    environment = campaign.environment if campaign else EnvironmentConfig(network="none")
    if arguments.network:
        environment = environment.model_copy(update={"network": arguments.network})
    registries = Registries(environment.mirrors, environment.air_gapped)
    images = Images(ImageStore(named=environment.image_store), registries, Builder(environment.network_of_builds))
    services = campaign.services if campaign else {}
    left_out = list[str]()
    tasks = load_tasks([source], Path.cwd(), images.dockerfiles, services, left_out)
    if arguments.only:
        ids = [task.id for task in tasks]
        if unknown := sorted(set(arguments.only) - {*ids}):
            unread: list[str] = []
            wanted = map(glob.escape, [*unknown, ids[0]])  # a source without a valid task is an error
            load_tasks([{"path": source, "include": list(wanted)}], Path.cwd(), left_out=unread)
            raise Mistakes(
                unread or [f"--only {unknown[0]}: no such task in {arguments.source}; see: megaflow-hpc tasks list"]
            )
        tasks, left_out = [task for task in tasks if task.id in arguments.only], []
    for line in left_out:
        note(f"left out: {line}")
    requests = image_requests(tasks)
    if arguments.campaign and not arguments.image:
        mapping = ImageMapping(environment.images, Path(arguments.campaign).absolute().parent, arguments.campaign)
    else:
        names = {request.base or request.name: Path(request.path) for request in requests}
        files_by_name = {name: arguments.image or _image_beside(path, name) for name, path in names.items()}
        for name, path in names.items():
            if not arguments.image and not Path(files_by_name[name]).exists():
                raise ConfigError(
                    f"{path}: its image {name!r} is not at {files_by_name[name]}; name it with --image FILE.sif or "
                    "--image docker://NAME, such as docker://debian:12, or name a campaign file with --campaign"
                )
        mapping = ImageMapping(files_by_name, Path.cwd(), "--image")
    with PlanProgress() as watch:
        images.say, images.show = watch.say, watch.show
        files = images.resolve_all(requests, mapping)
    tasks = in_image_directories(tasks, files, images, mapping)

    async def go() -> list[Validation]:
        done = []
        async with ApptainerProvider() as provider:
            async for result in validate(tasks, files, OracleAgent(), provider, environment, arguments.jobs):
                done.append(result)
                took_s = result.before.duration_s + result.after.duration_s
                rewards = (
                    f"reward {result.before.reward} before, {result.after.reward} with its solution, {took_s:.1f} s"
                )
                note(f"{result.task}: {'ok' if result.valid else 'NOT VALID'} ({rewards})")
                for problem in result.problems[:10]:
                    note(f"  {problem}")
        return sorted(done, key=lambda result: result.task)

    results = asyncio.run(go())
    invalid = [result.task for result in results if not result.valid]
    if arguments.json:
        valid = not invalid and not left_out
        print_json({"valid": valid, "tasks": [result.to_dict() for result in results], "left_out": left_out})
    else:
        # Few verifiers report results of individual tests.
        named = any(result.before.failing or result.after.passing for result in results)
        head = ["task", "reward before", "reward after", "valid"]
        rows: list[list[object]] = []
        for result in results:
            verdict = "ok" if result.valid else "NO"
            rows.append([result.task, result.before.reward, result.after.reward, verdict])
        if named:
            head[3:3] = ["failing tests", "passing tests"]
            for row, result in zip(rows, results, strict=True):
                row[3:3] = [len(result.after.failing), len(result.after.passing)]
        say(table(head, rows))
        less = f"; {len(left_out)} left out" if left_out else ""
        say(f"{len(results) - len(invalid)} of {len(results)} tasks are valid{less}")
    return 1 if invalid or left_out else 0


def _image_beside(task: Path, name: str) -> str:
    from megaflow_hpc.environments.images.sources import match_name

    directory = task.parent if task.is_file() else task.parent.parent
    return str(match_name(name, {"*": f"{directory / 'images'}/*.sif"}))


def run_new(arguments: argparse.Namespace) -> int:
    """Writes the template of a new task. Returns the exit status."""
    from megaflow_hpc.tasks.harbor.format import BASE, write_template

    path = write_template(arguments.name, Path(arguments.directory))
    image = "" if Path(_image_beside(path, "base")).exists() else f" --image {BASE}"
    text = f"{path}\nprove it: megaflow-hpc tasks validate {path}{image}"
    print_result(arguments.json, {"path": str(path), "id": path.name}, text)
    return 0


RELEASE = ("package", "buggy", "fixed", "kind", "changelog")
"""Metadata keys of tasks that ``tasks build`` creates."""


def run_list(arguments: argparse.Namespace) -> int:
    """Prints the valid tasks of a source. Returns 2 if it also contains invalid tasks."""
    from megaflow_hpc.tasks.loading import load_tasks

    left_out = list[str]()
    tasks = load_tasks([_source(arguments.source)], Path.cwd(), left_out=left_out)
    status = ConfigError.exit_status if left_out else 0
    for line in left_out:
        note(line)
    release_keys = [key for key in RELEASE if any(task.metadata.get(key) for task in tasks)]
    rows = [_row(task, release_keys) for task in tasks]
    if arguments.json:
        print_json([{**row, "path": task.path} for row, task in zip(rows, tasks, strict=True)])
        return status
    shown = [
        {**row, "solution": "yes" if row["solution"] else "no", "instruction": str(row["instruction"])[:60]}
        for row in rows
    ]
    head = [{"agent_timeout_s": "agent s"}.get(key, key) for key in rows[0]]
    say(table(head, [tuple(row.values()) for row in shown]))
    return status


def _row(task: Task, release_keys: Sequence[str]) -> dict[str, Any]:
    lines = task.instruction.strip().splitlines()
    return {
        "id": task.id,
        "image": task.image,
        "agent_timeout_s": task.agent_timeout_s,
        "solution": task.kind == "harbor" and any(Path(task.path).glob("**/solution/*")),
        **{key: task.metadata.get(key, "") for key in release_keys},
        "instruction": lines[0].strip() if lines else "",
    }
