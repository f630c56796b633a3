"""Runs the ``swebench`` package's own test commands, log parsers and grading in a separate process.

:mod:`~megaflow_hpc.tasks.swebench.plan` runs this module as a script, with one JSON request on standard input and one
JSON response on standard output. The package's regular expressions parse untrusted output, so they run in a child
process that is killed if it hangs. A normal import of the package takes seconds, because its ``__init__`` files import
docker, datasets and modal. This script skips those files and replaces such libraries with empty modules. The rest is
pure Python, starts in 0.1 s and only needs ``swebench`` and ``unidiff``.

Version 4 of the package contains the test commands for its repositories, whereas version 5 reads them from the dataset
(``eval_script``, ``log_parser``, ``eval_type``). Both versions are supported. Requests::

    {"op": "plan", "instances": [{…}, …]}
        → {"plans": [{"eval_script": str, "log_parser": str, "eval_type": str}, …]}
    {"op": "grade", "instance": {…}, "plan": {…}, "log": path}
        → {"resolved": bool, "tests": {"FAIL_TO_PASS": {"success": […], "failure": […]}, …}}

A plan's ``error`` explains why the package cannot test the instance. ``missing`` names a package that is not installed.
At import time, this module only needs the standard library.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

HARNESS = "swebench.harness"
ABSENT = frozenset({"bs4", "datasets", "docker", "dotenv", "ghapi", "git", "modal", "requests", "tenacity", "tqdm"})
"""Libraries that are only used by parts of the package that this script skips."""
PLAN_TIMEOUT_S = 60.0
"""Maximum seconds per instance in a ``plan`` request."""
PARSERS = ("python", "javascript", "c", "go", "java", "php", "ruby", "rust")


class _Absent(types.ModuleType):
    """A stub module. Each of its attributes is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **keywords: None})


class _Finder:
    """Import finder that provides stub modules for :data:`ABSENT`, even if the real libraries are installed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Returns the spec of a stub module if ``name`` is in a library in :data:`ABSENT`, otherwise ``None``."""
        loader: Any = _Finder
        return ModuleSpec(name, loader, is_package=True) if name.partition(".")[0] in ABSENT else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> types.ModuleType:
        """Creates a stub module."""
        return _Absent(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Does nothing, because a stub module has no code."""


def prepare_import() -> None:
    """Makes ``swebench.harness.…`` importable without running the packages' own ``__init__``."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("swebench")
    root = next(iter(spec.submodule_search_locations))
    sys.meta_path.insert(0, _Finder)
    for name in ("swebench", HARNESS):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(root, *name.split(".")[1:])]
        sys.modules[name] = module


def parsers() -> tuple[dict[str, Callable[..., dict[str, str]]], dict[str, str]]:
    """Returns the log parsers by function name, and each repository's parser name."""
    named: dict[str, Callable[..., dict[str, str]]] = {}
    by_repo: dict[str, str] = {}
    for language in PARSERS:
        module = importlib.import_module(f"{HARNESS}.log_parsers.{language}")
        # Use the names in the module, because parse_log_flask is an alias of parse_log_pytest.
        by_name = {name: value for name, value in vars(module).items() if name.startswith("parse_log_")}
        named |= by_name
        for attribute, mapping in vars(module).items():
            if attribute.startswith("MAP_REPO_TO_PARSER"):
                for repo, parser in mapping.items():
                    name = next((name for name, value in by_name.items() if value is parser), parser.__name__)
                    named[name], by_repo[repo] = parser, name
    return named, by_repo


def specifications(instance: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns version 4's setup and test commands for the instance's repository and ``version``."""
    constants = importlib.import_module(f"{HARNESS}.constants")
    by_repo = getattr(constants, "MAP_REPO_VERSION_TO_SPECS", {})
    specification = by_repo.get(instance["repo"], {}).get(str(instance.get("version")))
    return specification if specification and "test_cmd" in specification else None


def plan(instance: Mapping[str, Any]) -> dict[str, Any]:
    """Decides how to test and grade an instance. ``eval_script`` is empty if the package has no test command for the
    instance."""
    named, by_repo = parsers()
    constants = importlib.import_module(f"{HARNESS}.constants")
    fail_only = instance["repo"] in getattr(constants, "FAIL_ONLY_REPOS", ())
    eval_type = str(instance.get("eval_type") or ("fail_only" if fail_only else "pass_and_fail"))
    parser = str(instance.get("log_parser") or by_repo.get(instance["repo"], ""))
    if parser and parser not in named:
        return {"error": f"log_parser {parser!r}: this version of swebench has only {', '.join(sorted(named))}"}
    script = ""
    specification = None
    if not any(instance.get(key) for key in ("eval_script", "test_cmd", "test_cmds")):
        specification = specifications(instance)
    if specification:
        scripts = importlib.import_module(f"{HARNESS}.test_spec.create_scripts")
        lines = scripts.make_eval_script_list(
            instance, specification, "testbed", "/testbed", instance["base_commit"], instance["test_patch"]
        )
        script = "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"
    return {"eval_script": script, "log_parser": parser, "eval_type": eval_type}


def try_plan(instance: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of :func:`plan`, or an error if the package cannot handle the instance (e.g. a broken
    test_patch) or needs more than :data:`PLAN_TIMEOUT_S`."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {PLAN_TIMEOUT_S:g} s")

    before = signal.signal(signal.SIGALRM, stop)  # Python's regular expressions are interruptible
    signal.setitimer(signal.ITIMER_REAL, PLAN_TIMEOUT_S)
    try:
        return plan(instance)
    except ModuleNotFoundError:
        raise
    except Exception as error:
        return {"error": f"the swebench package cannot read it: {error!r:.300}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Specification:
    """The fields of the package's ``TestSpec`` that grading needs, for both versions of the package."""

    instance_id: str
    repo: str
    version: str
    FAIL_TO_PASS: list[str]
    PASS_TO_PASS: list[str]
    log_parser: str
    eval_type: str


def grade(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the package's own verdict on a test log, using ``get_eval_report``."""
    grading: Any = importlib.import_module(f"{HARNESS}.grading")
    instance = request["instance"]
    chosen = request["plan"]
    parser = parsers()[0][chosen["log_parser"]]
    specification = Specification(
        instance["instance_id"],
        instance["repo"],
        str(instance.get("version") or ""),
        list(instance["FAIL_TO_PASS"]),
        list(instance.get("PASS_TO_PASS", ())),
        chosen["log_parser"],
        chosen["eval_type"],
    )
    if hasattr(grading, "PARSER_REGISTRY"):
        grading.PARSER_REGISTRY = {**grading.PARSER_REGISTRY, chosen["log_parser"]: parser}
    else:
        # Version 4 looks up everything by repository and version, which works only for its own repositories.
        repo, version = specification.repo, specification.version
        grading.MAP_REPO_TO_PARSER = {**grading.MAP_REPO_TO_PARSER, repo: parser}
        versions = grading.MAP_REPO_VERSION_TO_SPECS.get(repo, {})
        grading.MAP_REPO_VERSION_TO_SPECS = {repo: {**versions, version: {"test_cmd": "", **versions.get(version, {})}}}
        grading.FAIL_ONLY_REPOS = {repo} if specification.eval_type == "fail_only" else set()
    prediction = {"instance_id": specification.instance_id, "model_name_or_path": "", "model_patch": ""}
    report = grading.get_eval_report(specification, prediction, request["log"], include_tests_status=True)
    result = report[specification.instance_id]
    return {"resolved": result["resolved"], "tests": result.get("tests_status", {})}


def main() -> int:
    """Handles the request on standard input, ``plan`` or ``grade``. The response may name a ``missing`` package."""
    request = json.load(sys.stdin)
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps the package's own output out of the response
    try:
        prepare_import()
        if request["op"] == "plan":
            answer: dict[str, Any] = {"plans": [try_plan(instance) for instance in request["instances"]]}
        else:
            answer = grade(request)
    except ModuleNotFoundError as error:
        answer = {"missing": error.name or str(error)}
    json.dump(answer, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
