"""Runs a Harbor task's tests in a container that the agent cannot have tampered with.

In Harbor's contract, ``tests/`` is mounted at ``/tests``, and ``test.sh`` runs in the working directory and writes the
reward to ``/logs/verifier/reward.json`` or ``reward.txt``. If both files exist, they must agree. Failing tests still
produce a reward. If the verifier writes no reward, the verdict has an error and reward 0. There are three modes
(docs/how-to/tasks.md lists the attacks that each prevents):

- *fresh*: the agent's sandbox, with every process killed and a new container. ``/tests`` and ``/logs/verifier`` are new
  host directories, mounted over anything that the agent created at these paths. Only the agent's changes in the working
  directory and in declared artifacts are kept. No program from the sandbox is used to copy tests in or rewards out.
- *shared*: like *fresh*, but also keeps files that the agent added outside the system directories
  (:mod:`..judged_layer`).
- *separate*, if the task requests it: another sandbox with its own image, which receives only the declared artifacts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast
from urllib.parse import quote, quote_plus

from megaflow_hpc.environments.sandbox.rootfs import upperdir
from megaflow_hpc.environments.sandbox.rootfs.writable import LayerPaths
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, LimitError, SandboxError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.tasks.formats import VerificationContext
from megaflow_hpc.tasks.harbor.artifacts import Collected, carry, collect, entries_of, run_hooks, to_artifacts
from megaflow_hpc.tasks.harbor.data import HarborData, VerifierRules
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.tasks.harbor.rewards import read_logs, read_rewards
from megaflow_hpc.tasks.judged_layer import JudgedLayer
from megaflow_hpc.tasks.sandboxes import network_hint
from megaflow_hpc.types import MAX_NAME_LENGTH, Network, Task, Verdict

_SHELL = (
    'for b in /bin/bash /usr/bin/bash; do [ -x "$b" ] && exec "$b" /tests/test.sh; done; exec /bin/sh /tests/test.sh'
)
"""Shell command that starts bash without using PATH, because PATH may contain directories to which the agent can
write."""


async def verify(task: Task, sandbox: ApptainerSandbox, context: VerificationContext, *, stay: bool) -> Verdict:
    """Collects the artifacts of a task or step and runs its tests. The agent must have ended.

    Args:
        task: The task or step.
        sandbox: The agent's sandbox.
        context: How to verify.
        stay: Whether to restore the agent's container afterwards, without tests and rewards, because the sandbox will
            be reused.

    Raises:
        SandboxError: A sandbox was lost. Errors in tests and rewards are reported in the verdict's ``error`` instead.
        ModelServiceError: A judge that the tests use is down.
        ConfigError: The task cannot be verified in this way.
    """
    data = HarborData.of(task)
    prefix = f"steps/{data.step.name}/" if data.step else ""
    folder = Path(sandbox.directory + ".artifacts")
    try:
        try:
            await run_hooks(task, sandbox)
            collected = await collect(task, sandbox, folder)
        except LimitError as error:  # the agent's programs exceeded a limit; usage is reset for the tests
            collected = [Collected(entry.source, entry.source, error=str(error)) for entry in entries_of(task)]
        artifacts = to_artifacts(collected, prefix)
        if data.verifier.environment:
            verdict = await _judge_elsewhere(task, sandbox, context, collected, stay)
        else:
            if context.fresh:
                check_fresh(task)
            verdict = await _judge(task, sandbox, context, [] if context.as_left else _kept(task), stay=stay)
    finally:
        await asyncio.to_thread(remove_tree, folder, ignore_errors=True)  # the pod's cleanup removes the rest
    logs = [replace(log, name=prefix + log.name) for log in verdict.artifacts]
    return Mask(data.verifier.secrets).verdict(replace(verdict, artifacts=[*artifacts, *logs]))


def check_fresh(task: Task) -> None:
    """Checks that ``fresh`` verification would keep some of the agent's work.

    Raises:
        ConfigError: The task has neither a working directory nor artifacts.
    """
    if os.path.normpath(task.workdir or "/") == "/" and not HarborData.of(task).artifacts:
        raise ConfigError(
            f"task {task.id}: verification 'fresh' keeps only the work directory, but the task has none; set "
            "[environment] workdir in its task.toml, or use 'shared'"
        )


async def _judge_elsewhere(
    task: Task, sandbox: ApptainerSandbox, context: VerificationContext, collected: Sequence[Collected], stay: bool
) -> Verdict:
    environment = HarborData.of(task).verifier_environment(task.id)
    if environment is None or context.start is None:
        raise ConfigError(f"task {task.id}: its verifier needs its own environment, which cannot be started here")

    def restore(paths: LayerPaths) -> None:
        upperdir.restore(paths.upper, paths.image, _kept(task))

    await sandbox.end_processes(restore if stay else None)  # keeps the agent's files for a retry
    other = await context.start(environment)
    try:
        problems = await carry(collected, other)
        there = replace(task, workdir=other.spec.workdir)
        carried = [item.source for item in collected if item.path is not None]
        verdict = await _judge(there, other, replace(context, fresh=False, as_left=True), carried, stay=False)
        return replace(verdict, output="\n".join([verdict.output, *("not carried over: " + one for one in problems)]))
    finally:
        with suppress(OSError):
            await other.stop()


async def _judge(
    task: Task, sandbox: ApptainerSandbox, context: VerificationContext, kept: Sequence[str], *, stay: bool
) -> Verdict:
    data = HarborData.of(task)
    rules = data.verifier
    home = Path(sandbox.directory, "verifier")
    tests, logs = home / "tests", home / "logs"
    sources = [] if rules.bundled else [Path(path) for path in data.tests]
    before = sandbox.spec

    def make_way(paths: LayerPaths) -> None:
        for place in ("tests", "logs/verifier") if sources else ("logs/verifier",):
            upperdir.make_way(paths.upper, place)

    layer = JudgedLayer(sandbox, context, kept, rules.env, make_way)
    try:
        await asyncio.to_thread(_create_directories, home, sources, TaskFiles(task.path))
        binds = [f"{logs}:/logs/verifier", *([f"{tests}:/tests"] if sources else [])]
        await layer.start(_spec(before, rules, context, binds))
        async with _judging(task, sandbox, rules, context) as judge:
            result = await sandbox.exec(
                _command(sources),
                cwd=task.workdir or None,
                env={**rules.env, **judge},
                timeout_s=task.verifier_timeout_s,
            )
        output = result.stdout + (f"\n--- stderr ---\n{result.stderr}" if result.stderr else "")
        output += layer.note
        artifacts = await asyncio.to_thread(read_logs, logs)
        if result.timed_out or result.breach:
            error = result.breach or f"tests/test.sh ran longer than its {task.verifier_timeout_s:g} s"
            return Verdict(output=output, error=error, artifacts=artifacts)
        try:
            rewards = await asyncio.to_thread(read_rewards, logs)
        except ValueError as wrong:
            error = f"{wrong} (tests/test.sh ended with {result.exit_code}){network_hint(output, sandbox.spec.network)}"
            return Verdict(output=output, error=error, artifacts=artifacts)
        return Verdict.of(rewards, output, artifacts)
    finally:
        if stay:
            await sandbox.restart(before, layer.leave)
            await asyncio.to_thread(remove_tree, home)


def _spec(before: SandboxSpec, rules: VerifierRules, context: VerificationContext, binds: Sequence[str]) -> SandboxSpec:
    network = before.network
    if rules.network is not None:
        network = cast(Network, rules.network) if rules.network else context.network or network
    if rules.judge and network == "none":
        network = "gateway"  # only the judges are reachable
    return replace(before, binds=(*before.binds, *binds), network=network, user=rules.user or before.user)


@asynccontextmanager
async def _judging(
    task: Task, sandbox: ApptainerSandbox, rules: VerifierRules, context: VerificationContext
) -> AsyncIterator[dict[str, str]]:
    """Yields the variables with which the tests reach the campaign's judges, if the task requests judges.

    Raises:
        ModelServiceError: A judge was down, so the result of the tests is invalid.
        ConfigError: The campaign has no judges.
    """
    if not rules.judge:
        yield {}
        return
    if context.judge is None:
        raise ConfigError(
            f"task {task.id}: its tests ask a judge ({rules.judge[0]}); name a model with judge: true in models"
        )
    listener = await sandbox.listen() if sandbox.spec.network == "gateway" else None
    async with context.judge(listener) as judge:
        url = judge.endpoint.sandbox_url or judge.base_url
        addresses = {"OPENAI_BASE_URL": url, "ANTHROPIC_BASE_URL": url.removesuffix("/v1")}
        yield {**addresses, "MEGAFLOW_JUDGE": judge.endpoint.model_name, **dict.fromkeys(rules.judge, judge.api_key)}


def _kept(task: Task) -> list[str]:
    return [task.workdir or "/", *(entry.source for entry in entries_of(task))]


def _command(sources: Sequence[Path]) -> list[str]:
    """Returns the command that runs the tests.

    The image's shell runs shell scripts, and tests that are part of a verifier's image. Other scripts are run according
    to their shebang line.
    """
    script = next((path / "test.sh" for path in reversed(sources) if (path / "test.sh").is_file()), None)
    if script is not None and names_interpreter(script):
        return ["/tests/test.sh"]
    return ["/bin/sh", "-c", _SHELL]


def names_interpreter(script: Path) -> bool:
    """Returns whether a script's first line names an interpreter that is not a shell."""
    with open(script, "rb") as file:
        first = file.readline(256)
    words = first[2:].split() if first.startswith(b"#!") else []
    names = [os.path.basename(word) for word in words if not word.startswith(b"-")]
    if names[:1] == [b"env"]:
        names = names[1:]
    return bool(names) and not re.fullmatch(rb"(ba|da|a)?sh", names[0])


def _create_directories(home: Path, sources: Sequence[Path], files: TaskFiles) -> None:
    """Creates ``tests`` and ``logs`` in ``home``, and copies sources to ``tests``. Later sources take precedence."""
    remove_tree(home)
    for directory in (home, home / "tests", home / "logs"):
        directory.mkdir(mode=0o755, parents=True)
        directory.chmod(0o755)  # independent of the umask, because the verifier may run as another user
    try:
        for source in sources:
            files.copy(source, home / "tests")
    except (OSError, shutil.Error) as error:
        raise SandboxError(f"{source}: the tests cannot be copied ({error})") from error
    script = home / "tests" / "test.sh"
    if script.is_file():
        script.chmod(script.stat().st_mode | 0o755)


# --- secrets in results -------------------------------------------------------------------------------------------

MASK = b"[masked]"
MIN_SECRET_LENGTH = 6
"""Minimum length in characters of secrets to mask. Masking shorter values would make test output unreadable."""


class Mask:
    """Masks secrets in bytes, strings and verdicts, verbatim or in encodings that tools use in their output.

    Args:
        values: The secrets to mask.
    """

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values if len(value) >= MIN_SECRET_LENGTH for form in _forms(value)}
        words = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, words))) if words else None

    def data(self, data: bytes) -> bytes:
        """Returns ``data`` with all secrets masked."""
        return self._pattern.sub(MASK, data) if self._pattern else data

    def text(self, text: str) -> str:
        """Returns ``text`` with all secrets masked."""
        return self.data(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def verdict(self, verdict: Verdict) -> Verdict:
        """Returns a verdict with all secrets masked in output, error, reward names and artifacts."""
        if self._pattern is None:
            return verdict
        return replace(
            verdict,
            rewards={self.text(name): value for name, value in verdict.rewards.items()},
            output=self.text(verdict.output),
            error=self.text(verdict.error),
            agent_error=self.text(verdict.agent_error),
            artifacts=[
                replace(artifact, name=self.text(artifact.name)[:MAX_NAME_LENGTH], data=self.data(artifact.data))
                for artifact in verdict.artifacts
            ],
        )


def _forms(value: str) -> Iterator[bytes]:
    raw = value.encode("utf-8", "surrogateescape")
    percent = [quote(raw, safe=safe) for safe in ("", "/", "/:?&=+,;@")] + [quote_plus(raw)]
    lower = [re.sub("%..", lambda match: match[0].lower(), text) for text in percent]
    yield raw
    for text in (*percent, *lower, json.dumps(value)[1:-1], raw.hex(), raw.hex().upper(), repr(value)[1:-1]):
        yield text.encode("utf-8", "surrogatepass")
    for offset in range(3):  # the base64 form depends on the value's byte offset modulo 3
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            encoded = encode(bytes(offset) + raw)
            form = encoded[-(-offset * 8 // 6) : (offset + len(raw)) * 8 // 6]
            if len(form) >= MIN_SECRET_LENGTH:
                yield form
