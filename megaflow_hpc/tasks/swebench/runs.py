"""Prepares, solves and judges SWE-bench style instances in a sandbox.

As in SWE-bench, an agent submits a *patch*, which is the difference of the checkout before and after the agent's work.
All other changes are discarded: the sandbox is reset to the image, the patch and then ``test_patch`` are applied, and
the tests run. So tampering with the container does not help the agent.

Planning decides how outcomes are determined (:mod:`.plan`). With ``script``, the ``swebench`` package parses and grades
the log between SWE-bench's markers. With ``named``, pytest runs the tests by id, and the outcomes come from pytest's
own reports (:mod:`named_tests`).
"""

from __future__ import annotations

import asyncio
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError, LimitError, SandboxError
from megaflow_hpc.tasks import checkout, named_tests
from megaflow_hpc.tasks.judged_layer import home_of
from megaflow_hpc.tasks.swebench.instances import Instance
from megaflow_hpc.tasks.swebench.plan import LineSource, ask, load, request_fields
from megaflow_hpc.texts import parse_json
from megaflow_hpc.types import ExecResult, Task, Verdict

MAX_LOG_BYTES = 32 << 20
"""Maximum size of stored test output in bytes."""
GIT_TIMEOUT_S = 300.0
"""Timeout of git commands in seconds."""
OWN_FILES = "/.megaflow-swebench"
"""Directory in the sandbox for the verifier's own files. Created after the agent has ended."""
START_REF = "refs/megaflow-hpc/start"
"""Git reference to the original commit. Used by the verifier's scripts."""
GIT = "git -c safe.directory='*' -c core.hooksPath=/dev/null -c user.name=megaflow -c user.email=megaflow@localhost"
MARKERS = (">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code")
"""Markers that SWE-bench's grading expects in the log."""


# --- before and instead of the agent --------------------------------------------------------------------------------


async def prepare(task: Task, sandbox: ApptainerSandbox) -> bool:
    """Checks that the image contains the checkout, and introduces the bug of a SWE-smith instance.

    Raises:
        SandboxError: The image does not match the instance, or the instance's file has changed.
    """
    instance = load(task)
    await _hand_out(task, instance, sandbox, for_agent=True)
    return True


async def _hand_out(task: Task, instance: Instance, sandbox: ApptainerSandbox, *, for_agent: bool) -> None:
    steps = [f"cd {shlex.quote(instance.workdir)}", f"{GIT} rev-parse -q --verify HEAD >/dev/null"]
    mark = f"{GIT} update-ref {START_REF} HEAD"
    if not instance.bug_patch:
        steps += [] if for_agent else [mark]
    else:
        await _upload(sandbox, {"bug.patch": instance.bug_patch})
        # Like SWE-smith, remove the failing tests from the agent's checkout. The verifier's reference keeps them.
        files = " ".join(shlex.quote(name) for name in _files_of(instance.FAIL_TO_PASS))
        insert = [
            f"{GIT} apply --whitespace=nowarn {OWN_FILES}/bug.patch",
            f"rm -rf -- {OWN_FILES} {files}",
            f"{GIT} add -A",
        ]
        commit = f"{GIT} commit -q --no-verify -m 'Initial commit'"
        if for_agent:
            # Rewrite the history, because the parent commit is the solution.
            orphan = f"{GIT} checkout -q --orphan megaflow-start"
            others = f"{GIT} for-each-ref --format='delete %(refname)' | grep -v heads/megaflow-start"
            forget = [f"{GIT} reflog expire --expire=now --all", f"{GIT} gc -q --prune=now"]
            steps += [*insert, orphan, commit, f"{others} | {GIT} update-ref --stdin", *forget]
        else:
            steps += [mark, *insert, commit]
    done = await sandbox.exec(" && ".join(steps), cwd="/", timeout_s=GIT_TIMEOUT_S)
    if done.exit_code:
        raise SandboxError(
            f"task {task.id}: {instance.workdir} in image {task.image} is not the instance's checkout: "
            f"{done.stderr.strip()[-300:] or done.exit_code}; map the name to that image in environment.images"
        )


async def solve(task: Task, sandbox: ApptainerSandbox) -> ExecResult:
    """Applies the reference solution of an instance."""
    instance = load(task)
    patch, back = (instance.bug_patch, "-R ") if instance.bug_patch else (instance.patch, "")
    if not patch:
        raise ConfigError(f"task {task.id}: its line has no patch; the oracle agent needs one")
    await _upload(sandbox, {"solution.patch": patch})
    apply = f"{GIT} apply --whitespace=nowarn {back}{OWN_FILES}/solution.patch"
    script = f"cd {shlex.quote(instance.workdir)} && {apply}; status=$?; rm -rf {OWN_FILES}; exit $status"
    return await sandbox.exec(script, cwd="/", timeout_s=GIT_TIMEOUT_S)


async def _upload(sandbox: ApptainerSandbox, files: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in files.items():
            # Write bytes to preserve line endings, which are part of a patch.
            Path(scratch, name).write_bytes(text.encode("utf-8", "surrogateescape"))
        await sandbox.upload(scratch, OWN_FILES)


def _files_of(tests: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


# --- judging --------------------------------------------------------------------------------------------------------


async def verify(task: Task, sandbox: ApptainerSandbox, patch: checkout.Patch | None) -> Verdict:
    """Judges the agent's patch by running the tests on a clean image.

    The reward is 1 if the instance is resolved, otherwise 0. The rewards ``fail_to_pass`` and ``pass_to_pass`` are the
    fractions of tests in these lists with the expected outcome.

    Raises:
        SandboxError: The sandbox was lost, or the instance's file has changed.
    """
    instance = load(task)
    if patch is None:
        return _unresolved(f"{instance.workdir} is no longer a git checkout")
    if patch.error and not patch.data:
        return _unresolved(patch.error)
    await sandbox.reset()
    return await _judge(task, instance, patch.data, sandbox)


async def _judge(task: Task, instance: Instance, patch: bytes, sandbox: ApptainerSandbox) -> Verdict:
    """Judges ``patch`` on a clean image."""
    await _hand_out(task, instance, sandbox, for_agent=False)
    if patch:
        applied = await _apply(instance, patch, sandbox)
        if applied.exit_code:
            return _unresolved(f"the agent's patch does not apply to a clean checkout:\n{applied.stderr[-2000:]}")
    try:
        if LineSource.of(task).runner == "named":
            return await _run_named(task, instance, sandbox)
        return await _run_script(task, instance, sandbox)
    except (TimeoutError, RuntimeError, LimitError) as error:  # if the log cannot be parsed, the tests count as failed
        return _unresolved(str(error), error=str(error))


def _unresolved(output: str, error: str = "") -> Verdict:
    rewards = {"reward": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0}
    return Verdict(reward=0.0, rewards=rewards, output=output, error=error)


def _unfinished_verdict(task: Task, done: ExecResult) -> Verdict | None:
    """Returns the verdict if the tests timed out or exceeded a limit, or ``None`` if they finished."""
    if not done.timed_out and not done.breach:
        return None
    why = done.breach or f"the tests ran longer than {task.verifier_timeout_s:g} s"
    return _unresolved(f"{why}:\n{done.stdout[-20000:]}", error=why)


async def _apply(instance: Instance, patch: bytes, sandbox: ApptainerSandbox) -> ExecResult:
    """Applies a patch. Tries the same commands in the same order as SWE-bench's harness."""
    await _upload(sandbox, {"model.patch": patch.decode("utf-8", "surrogateescape")})
    clean = f"{{ {GIT} checkout -q -- .; {GIT} clean -fdq; }} 2>/dev/null"
    tries = [f"{GIT} apply --verbose {option}" for option in ("", "--3way ", "--reject ")]
    tries.append("patch --batch --forward --fuzz=5 -p1 -i ")
    script = f"; {clean}; ".join(f"{command}{OWN_FILES}/model.patch && exit 0" for command in tries)
    return await sandbox.exec(
        f"cd {shlex.quote(instance.workdir)} || exit 1; {script}; exit 1", cwd="/", timeout_s=GIT_TIMEOUT_S
    )


async def _run_script(task: Task, instance: Instance, sandbox: ApptainerSandbox) -> Verdict:
    planned = await asyncio.to_thread(ask, {"op": "plan", "instances": [request_fields(instance)]})
    [plan] = planned["plans"]
    if "error" in plan:
        raise RuntimeError(plan["error"])
    plan["log_parser"] = plan["log_parser"] or "parse_log_pytest"
    script = _with_exit_status(instance.eval_script) or plan["eval_script"] or _script(instance)
    await _upload(sandbox, {"eval.sh": script, "test.patch": instance.test_patch})
    done = await _run(task, instance, sandbox, f"bash {OWN_FILES}/eval.sh")
    if (verdict := _unfinished_verdict(task, done)) is not None:
        return verdict
    with tempfile.NamedTemporaryFile() as log:
        # The package reads the log as strict UTF-8.
        log.write(done.stdout_bytes.decode("utf-8", "replace").encode())
        log.flush()
        request = {"op": "grade", "instance": request_fields(instance), "plan": plan, "log": log.name}
        graded = await asyncio.to_thread(ask, request)
    problems = [
        f"{kind}: {test}" for kind in ("FAIL_TO_PASS", "PASS_TO_PASS") for test in _failures(graded["tests"], kind)
    ]
    shares = {kind: _share(graded["tests"], kind) for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    return _verdict(graded["resolved"], shares, problems, done)


def _failures(tests: dict[str, Any], kind: str) -> list[str]:
    return list(tests.get(kind, {}).get("failure", ()))


def _share(tests: dict[str, Any], kind: str) -> float:
    if kind not in tests:
        return 0.0
    good, bad = len(tests[kind]["success"]), len(tests[kind]["failure"])
    return good / (good + bad) if good + bad else 1.0


def _verdict(resolved: bool, shares: dict[str, float], problems: list[str], done: ExecResult) -> Verdict:
    reward = float(resolved)
    rewards = {"reward": reward} | {kind.lower(): share for kind, share in shares.items()}
    problems_text = "".join(f"unexpected outcome: {problem}\n" for problem in problems[:100])
    return Verdict(
        reward=reward, rewards=rewards, output=f"{problems_text}{done.stdout}\n--- stderr ---\n{done.stderr}"
    )


async def _run(task: Task, instance: Instance, sandbox: ApptainerSandbox, command: str) -> ExecResult:
    env = dict(instance.env or {})
    home, workdir = f"{home_of(sandbox.spec)}/", f"{instance.workdir.rstrip('/')}/"
    if home.startswith(workdir):  # the patch can write to the home directory
        env = {"HOME": f"{OWN_FILES}/home", **env}
    if sandbox.spec.network != "host":
        # Scripts reinstall the checkout. If there is no network, pip must not try to download a build backend.
        env = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", **env}
    # Merge both streams, and use a non-login shell, as SWE-bench's harness does.
    return await sandbox.exec(
        f"unset BASH_ENV; rm -rf {OWN_FILES}/home; mkdir -p {OWN_FILES}/home; exec {command} 2>&1",
        cwd=instance.workdir,
        env=env,
        timeout_s=task.verifier_timeout_s,
        output_limit=MAX_LOG_BYTES,
    )


def _with_exit_status(eval_script: str) -> str:
    """Adds the output of the test command's exit status to an ``eval_script``. Version 5 of the package compares the
    status with the log."""
    if not eval_script or MARKERS[2] in eval_script:
        return eval_script
    lines = eval_script.split("\n")
    end = next((number for number, line in enumerate(lines) if MARKERS[1] in line), None)
    if end is None:
        return eval_script
    report = f'echo "{MARKERS[2]}: $SWEBENCH_TEST_EXIT_CODE"'
    return "\n".join([*lines[:end], "SWEBENCH_TEST_EXIT_CODE=$?", lines[end], report, *lines[end + 1 :]])


def _place_tests(instance: Instance) -> list[str]:
    """Returns shell lines that restore the test files, regardless of the agent's patch."""
    lines = [
        f"cd {shlex.quote(instance.workdir)}",
        f"git config --global --add safe.directory {shlex.quote(instance.workdir)}",
    ]
    activate = "/opt/miniconda3/bin/activate"
    lines.insert(0, f"if [ -f {activate} ]; then source {activate} && conda activate testbed; fi")
    if instance.bug_patch:  # the agent's checkout did not contain the failing tests
        files = [shlex.quote(name) for name in _files_of(instance.FAIL_TO_PASS)]
        return [*lines, f"git checkout {START_REF} -- {' '.join(files)}"]
    names = list(dict.fromkeys(re.findall(r"^diff --git a/.*? b/(.*)$", instance.test_patch, re.MULTILINE)))
    for name in map(shlex.quote, names):
        lines.append(f"rm -rf -- {name}; git checkout {START_REF} -- {name} 2>/dev/null")
    return [*lines, f"git apply -v --whitespace=nowarn {OWN_FILES}/test.patch"] if instance.test_patch else lines


def _script(instance: Instance) -> str:
    """Returns the script that the dataset's own harness would run for the line's commands."""
    files = re.findall(r"^diff --git a/.*? b/(.*\.py)$", instance.test_patch, re.MULTILINE)
    files = files or _files_of(instance.FAIL_TO_PASS + instance.PASS_TO_PASS)
    command = instance.commands
    # Ignore the values of options, such as "-W ignore::DeprecationWarning" in SWE-rebench's commands, which are not
    # tests.
    arguments = re.sub(r"\s-([Wcpkmo]\s*\S+|\S+)", " ", command)
    alone = "pytest" in command and not re.search(r"\s\S*(\.py|::)|\s\S*test\S*/", arguments)
    if instance.test_cmd and alone and "\n" not in command:
        command = " ".join([command, *map(shlex.quote, files)])
    lines = ["#!/bin/bash", "set -uxo pipefail", *_place_tests(instance), f": '{MARKERS[0]}'", command]
    return _with_exit_status("\n".join([*lines, f": '{MARKERS[1]}'"]) + "\n")


async def _run_named(task: Task, instance: Instance, sandbox: ApptainerSandbox) -> Verdict:
    wanted = [*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS]
    arguments = ["-p", "no:cacheprovider", "-rA", "--tb=short", *named_tests.selection(wanted)]
    run = f'"$python" {OWN_FILES}/named_tests.py --record {OWN_FILES}/outcomes.json {shlex.join(arguments)}'
    find = "python=$(command -v python || command -v python3)"
    script = "\n".join(["#!/bin/bash", *_place_tests(instance), find, f"exec {run}"])
    recorder = Path(named_tests.__file__).read_text()
    await _upload(sandbox, {"eval.sh": script, "test.patch": instance.test_patch, "named_tests.py": recorder})
    done = await _run(task, instance, sandbox, f"bash {OWN_FILES}/eval.sh")
    if (verdict := _unfinished_verdict(task, done)) is not None:
        return verdict
    read = await sandbox.exec(["cat", f"{OWN_FILES}/outcomes.json"], cwd="/", timeout_s=60, output_limit=MAX_LOG_BYTES)
    try:
        report = parse_json(read.stdout_bytes)
        outcomes = {str(test): str(outcome) for test, outcome in report.items()}
    except (ValueError, AttributeError):
        outcomes = {}
    problems, shares = judge(instance, outcomes)
    return _verdict(not problems, shares, problems, done)


def judge(instance: Instance, outcomes: dict[str, str]) -> tuple[list[str], dict[str, float]]:
    """Returns the problems that prevent a reward, and for each list of tests the fraction with the expected outcome.

    As in SWE-bench, ``FAIL_TO_PASS`` tests must pass, and ``PASS_TO_PASS`` tests must pass or be skipped.
    """
    problems: list[str] = []
    shares: dict[str, float] = {}
    for kind, good in (("FAIL_TO_PASS", {"passed"}), ("PASS_TO_PASS", {"passed", "skipped"})):
        bad = []
        for entry in getattr(instance, kind):
            exact = outcomes.get(entry)
            matching = [exact] if exact else [o for test, o in outcomes.items() if named_tests.matches(entry, test)]
            if not matching or not good.issuperset(matching):
                bad.append(f"{kind}: {entry}: {', '.join(sorted(set(matching) - good)) or 'not run'}")
        total = len(getattr(instance, kind))
        shares[kind] = 1 - len(bad) / total if total else 1.0
        problems += bad
    return problems, shares
