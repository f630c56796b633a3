r"""Tasks written as a Python class: ``tasks: [package.module:Class]``.

::

    class CountFiles:
        image = "base"                                # required; mapped by environment.images
        workdir = "/app"

        def instruction(self):                        # or a text
            return "How many files are in /app? Write the number into /app/answer."

        async def setup(self, sandbox):               # optional; before the agent
            await sandbox.exec("touch a b c")

        async def score(self, sandbox):               # after the agent: a number, or numbers by name
            answer = await sandbox.read("answer")     # None if there is no such file
            return float(answer == b"3\n")

        async def solve(self, sandbox):               # optional; run by the oracle agent
            await sandbox.exec("echo 3 > answer")

``score`` may have further parameters: ``messages`` (the agent's conversation), ``roles`` (the latest conversation of
each role of a team), ``patch`` (the agent's changes to the checkout in ``workdir``), ``artifacts`` (name → bytes),
``task`` (:class:`~megaflow_hpc.types.Task`) and ``judge``
(:class:`~megaflow_hpc.tasks.judging.Judge`).

``setup``, ``score`` and ``solve`` may also be synchronous methods. They then run in a thread, in which the sandbox's
methods block. A class defines one task, whose id is ``id`` or, by default, the
class name. A class with a class method ``instances`` that returns ``{name: keyword arguments}`` defines one task per
name. Within a rollout, ``setup`` and ``score`` are called on the same instance.

The code runs in the worker. It is imported from the campaign file's directory or from the interpreter's path. If
``setup`` raises an exception, the rollout fails with kind ``user``, and the error names the file and line. If ``score``
raises an exception, the reward is 0 and the verdict has an error, because the agent may have caused the exception. If a
judge is down, ``score`` is called again, whatever it returned or raised.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from pydantic import ValidationError

from megaflow_hpc.config.reading import explain
from megaflow_hpc.config.services import ServiceConfig, check_services
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.environments.images.sources import ImageRequest
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, ModelServiceError, SandboxError, UserCodeError
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.formats import TASK_ID, Refuse, TaskFormat, VerificationContext, raise_error
from megaflow_hpc.tasks.judged_layer import JudgedLayer
from megaflow_hpc.tasks.judging import Blocking, Judge, rubric_files
from megaflow_hpc.tasks.services import check_ports
from megaflow_hpc.types import ExecResult, Limits, Service, Task, Verdict, checked_rewards

SETTINGS: Mapping[str, tuple[type, ...]] = {
    "image": (str,),
    "workdir": (str,),
    "user": (str, int),
    "env": (dict,),
    "network": (str,),
    "timeout_s": (int, float),
    "score_timeout_s": (int, float),
    "memory_mb": (int,),
    "cpus": (int, float),
    "disk_mb": (int,),
    "processes": (int,),
    "services": (dict,),
}
"""Maps each class or instance attribute to its accepted types. Only ``image`` is required."""

IN_SANDBOX = frozenset(SETTINGS) - {"image", "timeout_s", "score_timeout_s"}
"""Settings that apply only to tasks with a sandbox."""
MAX_ERROR_CHARS = 2_000
"""Maximum length in characters of an exception's text from a task's code. Limited because the text may quote what an
agent wrote."""
NONE = "none"
"""Value of ``image`` that declares a task without a sandbox."""
EXTRAS = frozenset({"messages", "roles", "patch", "artifacts", "task", "judge"})
"""Optional parameters of ``score``, in addition to the sandbox."""

_instances: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Maps each sandbox to its task instance, so that ``score`` sees the attributes that ``setup`` set on ``self``."""


class ClassSource(msgspec.Struct, frozen=True):
    """Location of a task's class, stored as a plain mapping in ``task.metadata["python"]``."""

    name: str = msgspec.field(name="class")
    """Import path, ``package.module:Class``."""
    base: str
    """Directory to search for the module before the interpreter's path."""
    arguments: dict[str, Any]
    """Keyword arguments for the class's constructor."""
    file: str = ""
    """Source file of the class. Empty if unknown."""
    judged: bool = False
    """True if ``score`` has the parameter ``judge``."""
    rubrics: list[str] = []
    """Rubrics that were read while importing the class. They must not change during a run, because workers read them at
    different times."""
    teamed: bool = False
    """True if ``score`` needs a team's roles, i.e. if it has a parameter ``roles`` without a default."""


def looks_like_class(source: str) -> bool:
    """Returns whether a campaign's source has the form ``package.module:Class`` and is not a path."""
    module, colon, name = source.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def read_python_tasks(
    source: str,
    base: str | os.PathLike[str],
    wanted: Callable[[str], bool] = lambda _: True,
    refuse: Refuse = raise_error,
) -> list[Task]:
    """Reads the tasks that a class defines.

    Args:
        source: ``package.module:Class``.
        base: Directory to search for the module before the interpreter's own path.
        wanted: Returns whether the campaign uses the task with this id.
        refuse: Called for each wanted instance that is invalid. By default, raises the error.

    Raises:
        ConfigError: The class is invalid. The message names its file and line, the problem and the expected value.
    """
    cls = _load(source, str(Path(base).absolute()))
    where = f"{source} ({_place(cls)})"
    made: Any = {_name(cls): {}}
    if hasattr(cls, "instances"):
        made = guarded(cls.instances, f"{where}: instances", ConfigError)
        if not isinstance(made, Mapping) or not all(isinstance(value, Mapping) for value in made.values()):
            raise ConfigError(f"{where}: instances returned {made!r:.80}: expected {{name: {{keyword: value}}}}")
    tasks = []
    for name, keywords in made.items():
        try:
            tasks.append(_task(cls, str(name), dict(keywords), source, str(base), where))
        except ConfigError as error:
            if wanted(str(name)):
                refuse(error)
    return tasks


def _task(cls: type, name: str, keywords: dict[str, Any], source: str, base: str, where: str) -> Task:
    if not TASK_ID.fullmatch(name):
        raise ConfigError(f"{where}: task id {name!r}: expected letters, digits, '.', '_' and '-'")
    task = guarded(lambda: cls(**keywords), f"{where}: {name}", ConfigError)
    if not callable(getattr(task, "score", None)):
        raise ConfigError(f"{where}: has no 'score(self, sandbox)'; a task needs it for its reward")
    instruction: Any = getattr(task, "instruction", None)
    if callable(instruction):
        instruction = guarded(instruction, f"{where}: instruction", ConfigError)
    if not isinstance(instruction, str) or not instruction.strip():
        raise ConfigError(f"{where}: instruction is {instruction!r:.80}: expected a text, or a method that returns one")
    values: dict[str, Any] = {}
    for key, kinds in SETTINGS.items():
        value = getattr(task, key, None)
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{where}: {key} is {value!r:.80}: expected {expected}")
        values[key] = value
    if not values["image"]:
        raise ConfigError(f"{where}: image is missing; name an image, and map it in environment.images of the campaign")
    user = values["user"]
    if values["image"] == NONE and (
        given := [key for key in SETTINGS if key in IN_SANDBOX and values[key] is not None]
    ):
        raise ConfigError(f"{where}: {given[0]}: a task with image {NONE!r} has no sandbox; leave {given[0]} out")
    wanted, roles = extras_of(task.score), inspect.signature(task.score).parameters.get("roles")
    is_judged = "judge" in wanted
    teamed = roles is not None and roles.default is inspect.Parameter.empty
    rubrics = [str(path) for path in rubric_files()] if is_judged else []
    class_source = ClassSource(source, base, keywords, _file(cls), is_judged, rubrics, teamed)
    made = Task(
        id=name,
        instruction=instruction,
        image="" if values["image"] == NONE else values["image"],
        path=source,
        kind="python",
        workdir=values["workdir"],
        user=None if user is None else str(user),
        env=values["env"] or {},
        agent_timeout_s=float(values["timeout_s"] or 900),
        verifier_timeout_s=float(values["score_timeout_s"] or 600),
        limits=Limits(values["memory_mb"], values["cpus"], values["disk_mb"], values["processes"] or 512),
        network=values["network"],
        services=_services(name, values["services"] or {}, where),
        metadata={"python": msgspec.to_builtins(class_source)},
    )
    SandboxSpec(made.image or NONE, made.env, made.workdir, network=made.network or "none").check()
    return made


def _services(task_id: str, sections: Mapping[str, Any], where: str) -> tuple[Service, ...]:
    """Returns the services of a task. Takes the same keys as ``services`` in a campaign file."""
    parsed: dict[str, ServiceConfig] = {}
    for name, section in sections.items():
        try:
            parsed[str(name)] = ServiceConfig.model_validate(section)
        except ValidationError as error:
            raise ConfigError(explain(error, f"{where}: services.{name}", None, ServiceConfig)) from None
        if parsed[str(name)].per != "rollout":
            raise ConfigError(
                f"{where}: services.{name}.per: only services of the campaign file are shared; move it there"
            )
    try:
        check_services(parsed)
    except ValueError as error:
        raise ConfigError(f"{where}: services: {error}") from None
    services = tuple(section.service(name) for name, section in parsed.items())
    check_ports(task_id, services)
    return services


def _load(source: str, base: str) -> Any:
    module_name, _, name = source.partition(":")
    if base not in sys.path:
        sys.path.insert(0, base)
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except AttributeError:
        raise ConfigError(f"{source}: module {module_name} has no class {name}; correct the name") from None
    except Exception as error:
        location = "" if isinstance(error, ModuleNotFoundError) else f" at {origin(error)}"
        raise ConfigError(
            f"{source}: cannot be imported{location}: {error!r}; the module must be in {base} or on PYTHONPATH"
        ) from error
    if not inspect.isclass(cls):
        raise ConfigError(f"{source}: {name} is {type(cls).__name__}; expected a class")
    return cls


def _name(cls: Any) -> str:
    return str(getattr(cls, "id", None) or cls.__name__)


def _file(cls: Any) -> str:
    try:
        path = inspect.getsourcefile(cls)
    except TypeError:
        return ""
    return os.path.abspath(path) if path else ""


def _place(cls: Any) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return "no source"


# --- in the worker --------------------------------------------------------------------------------------------------


async def prepare(task: Task, sandbox: ApptainerSandbox) -> bool:
    """Runs ``setup`` and kills the processes that it started. Returns whether the class has a ``setup``.

    Raises:
        UserCodeError: ``setup`` raised an exception.
    """
    instance = _instance(task, sandbox)
    if hasattr(instance, "setup"):
        await call(task, instance.setup, sandbox, task.agent_timeout_s)
        await sandbox.end_processes()
    return hasattr(instance, "setup")


async def solve(task: Task, sandbox: ApptainerSandbox) -> ExecResult:
    """Runs the class's ``solve`` for the oracle agent.

    Raises:
        ConfigError: The class has no ``solve``.
        UserCodeError: ``solve`` raised an exception.
    """
    instance = _instance(task, sandbox)
    if not hasattr(instance, "solve"):
        raise ConfigError(f"task {task.id}: {task.path} has no 'solve(self, sandbox)'; the oracle agent needs one")
    await call(task, instance.solve, sandbox, task.agent_timeout_s)
    return ExecResult(0)


async def verify(task: Task, sandbox: ApptainerSandbox, context: VerificationContext | None = None) -> Verdict:
    """Runs ``score`` after killing all of the agent's processes.

    Raises:
        UserCodeError: ``score`` raised an exception, or returned an invalid reward.
        SandboxError: The sandbox was lost. The call can be retried.
        ModelServiceError: Raised by ``score``. The call can be retried.
    """
    context = context or VerificationContext()
    if task.image:
        await _start_judged(task, sandbox, context)
    instance = _instance(task, sandbox)
    del _instances[sandbox]
    try:
        async with _judge(task, context) if "judge" in extras_of(instance.score) else nullcontext() as judge:
            extras: dict[str, Callable[[], Any]] = {
                "roles": context.roles,
                "messages": context.messages,
                "patch": partial(_text, context),
                "artifacts": partial(_files, context),
            }
            more = {name: get() for name, get in extras.items() if name in extras_of(instance.score)}
            more |= {"task": task} if "task" in extras_of(instance.score) else {}
            more |= {"judge": judge} if judge else {}
            score = await call(task, instance.score, sandbox, task.verifier_timeout_s, **more)
    except (SandboxError, ModelServiceError):
        _instances[sandbox] = instance
        raise
    return Verdict.of(named_rewards(task, instance.score, score))


def _text(context: VerificationContext) -> str:
    return context.patch.data.decode("utf-8", "replace") if context.patch else ""


def _files(context: VerificationContext) -> dict[str, bytes]:
    """Returns the stored files and the patch. The patch is added because a campaign stores it only after the
    verdict."""
    patch = {artifact.name: artifact.data for artifact in checkout.to_artifacts(context.patch)}
    return {**context.artifacts(), **patch}


def named_rewards(task: Task, method: Callable[..., Any], score: Any) -> dict[str, float]:
    """Checks a score and returns it as rewards by name.

    Raises:
        UserCodeError: The score is neither a finite number nor a mapping from names to finite numbers, or a trajectory
            cannot store it.
    """
    try:
        rewards = checked_rewards(score if isinstance(score, Mapping) else {"reward": score})
    except ValueError as error:
        raise UserCodeError(
            f"{code_of(method)}: score of task {task.id} returned {score!r:.80}; expected a finite number, "
            f"or finite numbers by name ({error})"
        ) from None
    if not rewards:
        raise UserCodeError(f"{code_of(method)}: score of task {task.id} returned no reward; expected a number")
    return rewards


async def _start_judged(task: Task, sandbox: ApptainerSandbox, context: VerificationContext) -> None:
    layer = JudgedLayer(sandbox, context, [] if context.as_left else [task.workdir or "/"], {})
    if context.fresh or context.as_left:
        await layer.start_when_used()
    else:
        await layer.start(sandbox.spec)


def extras_of(score: Callable[..., Any]) -> frozenset[str]:
    """Returns the names in :data:`EXTRAS` that are parameters of a ``score`` method."""
    return EXTRAS & set(inspect.signature(score).parameters)


def _judge(task: Task, context: VerificationContext) -> AbstractAsyncContextManager[Judge]:
    if context.judge is None:
        raise ConfigError(f"task {task.id}: its score asks a judge; name a model with judge: true in models")
    return context.judge()


def _instance(task: Task, sandbox: ApptainerSandbox) -> Any:
    if sandbox not in _instances:
        source = msgspec.convert(task.metadata["python"], ClassSource)
        cls = _load(source.name, source.base)
        _instances[sandbox] = guarded(lambda: cls(**source.arguments), source.name, UserCodeError)
    return _instances[sandbox]


class PythonClassFormat(TaskFormat):
    """Task format of Python classes."""

    claims = staticmethod(looks_like_class)

    def read(
        self,
        source: str,
        base: str | os.PathLike[str],
        dockerfiles: Dockerfiles,
        wanted: Callable[[str], bool],
        refuse: Refuse,
    ) -> list[Task]:
        return read_python_tasks(source, base, wanted, refuse)

    def images(self, task: Task) -> list[ImageRequest]:
        return super().images(task) if task.image else []

    def asks_judge(self, task: Task) -> bool:
        return msgspec.convert(task.metadata["python"], ClassSource).judged

    def files(self, task: Task) -> list[str]:
        source = msgspec.convert(task.metadata["python"], ClassSource)
        return [*([source.file] if source.file else []), *source.rubrics]

    prepare = staticmethod(prepare)
    solve = staticmethod(solve)

    async def verify(
        self, step: Task, sandbox: ApptainerSandbox, context: VerificationContext, *, stay: bool
    ) -> Verdict:
        return await verify(step, sandbox, context)


FORMAT: TaskFormat = PythonClassFormat()


# --- calls of user code -----------------------------------------------------------------------------------------------


async def call(
    task: Task, method: Callable[..., Any], sandbox: ApptainerSandbox | None, timeout_s: float, /, **more: Any
) -> Any:
    """Calls a method of a task with its sandbox, in the event loop or in a thread.

    Args:
        timeout_s: Time limit of the call in seconds.
        more: Further keyword arguments for the method.

    Raises:
        UserCodeError: The method timed out, or raised an exception other than the ones below.
        SandboxError: The sandbox was lost.
        ModelServiceError: Raised by the method.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            if inspect.iscoroutinefunction(method):
                return await method(*([] if sandbox is None else [sandbox]), **more)
            # After a timeout, the thread continues until it next uses the sandbox, which is closed by then.
            loop = asyncio.get_running_loop()
            plain = {name: Blocking(value, loop) if isinstance(value, Judge) else value for name, value in more.items()}
            first = [] if sandbox is None else [Blocking(sandbox, loop)]
            result = await _in_thread(lambda: method(*first, **plain), task.id)
            return await result if inspect.isawaitable(result) else result
    except (SandboxError, ModelServiceError):
        raise
    except (Exception, SystemExit) as error:
        if limit.expired():
            raise UserCodeError(
                f"{code_of(method)}: {method.__name__} of task {task.id} ran longer than its {timeout_s:g} s"
            ) from None
        what = f"{method.__name__} of task {task.id}"
        raise UserCodeError(f"{origin(error)}: {what} raised {error!r:.{MAX_ERROR_CHARS}}") from error


async def _in_thread(call: Callable[[], Any], name: str) -> Any:
    """Runs ``call`` in a new thread. A call that never returns thus occupies no thread of the loop's pool."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # a call cannot be interrupted

    def body() -> None:
        try:
            done.set_result(call())
        except (StopIteration, KeyboardInterrupt, GeneratorExit) as error:  # asyncio's future cannot hold these
            done.set_exception(RuntimeError(repr(error)).with_traceback(error.__traceback__))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=body, name=f"task-{name}", daemon=True).start()
    return await asyncio.wrap_future(done)


def guarded(call: Callable[[], Any], what: str, kind: type[ConfigError] | type[UserCodeError]) -> Any:
    """Returns the result of ``call``. Converts exceptions to errors of type ``kind`` that name ``what`` and the
    line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise kind(f"{what} raised {error!r} at {origin(error)}") from error


def origin(error: BaseException) -> str:
    """Returns ``file:line`` of the innermost frame in user code, as opposed to a library."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    library = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)), "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    frame = (frames or traceback.extract_tb(error.__traceback__))[-1]
    return f"{frame.filename}:{frame.lineno}"


def code_of(method: Callable[..., Any]) -> str:
    """Returns ``file:line`` of a method's definition."""
    code = getattr(method, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(method)
