"""Prepares a sandbox's writable layer for the tests, and restores it for the agent afterwards. All task formats use it.

``fresh`` keeps the agent's changes at given paths. ``shared`` also keeps files that the agent added outside the system
directories. ``as-left`` keeps every change. See :mod:`~megaflow_hpc.environments.sandbox.rootfs.upperdir` for the
rules.

Programs read settings from the home directory, so the tests must not see the agent's changes to it. Usually, the tests
get the image's home directory. If a kept path includes the home directory, as with the working directory ``/root``,
they get an empty home directory instead.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaflow_hpc.environments.sandbox.rootfs import upperdir
from megaflow_hpc.environments.sandbox.rootfs.upperdir import PROGRAM_DIRS, KeepRules, Sifted
from megaflow_hpc.environments.sandbox.rootfs.writable import LayerPaths
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import environment
from megaflow_hpc.tasks.formats import VerificationContext

EMPTY_HOME = "/.megaflow-home"
"""Home directory for the tests, if the agent's changes in the usual home directory are kept."""
_LOADED = ("PATH", "HOME", "BASE", "ENV")
"""Suffixes of environment variables whose values are paths from which programs load code or settings (``PYTHONPATH``,
``CARGO_HOME``, ``PYTHONUSERBASE``, ``BASH_ENV``)."""
_NOT_LOADED = ("PATH", "HOME")
"""Variables with a suffix in :data:`_LOADED` to which separate rules apply."""
_MAX_NAMED = 50


class JudgedLayer:
    """The writable layer of a sandbox during verification.

    Args:
        kept: Absolute paths where the agent's changes are kept. ``/`` if the task has no working directory.
        env: Environment variables for the tests. They override those of the spec.
        prepare: Called with the layer's paths once the layer is ready for the tests.
    """

    def __init__(
        self,
        sandbox: ApptainerSandbox,
        context: VerificationContext,
        kept: Sequence[str],
        env: Mapping[str, str],
        prepare: Callable[[LayerPaths], None] = lambda _: None,
    ) -> None:
        self._sandbox, self._context, self._prepare = sandbox, context, prepare
        self._kept = _relative(kept)
        self._everywhere = len(self._kept) < len(kept)
        root = {"HOME": "/root"} if sandbox.spec.as_root else {}
        self._given = root | dict(sandbox.spec.env) | dict(env)
        self._variables = {"HOME": home_of(sandbox.spec)} | self._given
        self._sifted = Sifted()

    async def start(self, spec: SandboxSpec) -> None:
        """Starts the tests' container on the layer.

        Raises:
            SandboxError: The container does not start.
        """
        await self._sandbox.restart(self.spec(spec), self.enter)
        assumed = self._depends()
        shown = (os.fsdecode(entry).partition("=") for entry in environment(self._sandbox.pid or 0))
        self._variables |= {name: value for name, _, value in shown} | self._given
        if self._depends() != assumed:  # the image sets PATH or HOME itself, so restart with its values
            await self._sandbox.restart(self.spec(spec), self.enter)

    async def start_when_used(self) -> None:
        """Kills all processes, so that the next command starts the tests' container."""
        self._sandbox.spec = self.spec(self._sandbox.spec)
        await self._sandbox.end_processes(self.enter)

    def spec(self, spec: SandboxSpec) -> SandboxSpec:
        """Returns the spec of the tests' container, with an empty home directory if the usual one is in a kept path."""
        if not self._needs_home():
            return spec
        own = Path(self._sandbox.directory, "tests-home")
        remove_tree(own)
        own.mkdir(mode=0o755)
        return replace(spec, env={**spec.env, "HOME": EMPTY_HOME}, binds=(*spec.binds, f"{own}:{EMPTY_HOME}"))

    def enter(self, paths: LayerPaths) -> None:
        """Prepares the layer for the tests. If an earlier attempt was interrupted, undoes it first."""
        self._put_back(paths)
        if not self._context.as_left:
            self._sifted = upperdir.sift(paths.upper, paths.image, self._rules())
            taken = upperdir.keep_only(paths.upper, _hidden_layer(paths), self._sifted.kept, paths.image)
            _hidden_list(paths).write_text(json.dumps(taken))
        self._prepare(paths)

    def leave(self, paths: LayerPaths) -> None:
        """Restores the agent's layer and the image's own programs. Keeps the tests' changes at the kept paths."""
        self._put_back(paths)
        upperdir.restore(paths.upper, paths.image, self._kept)

    @staticmethod
    def _put_back(paths: LayerPaths) -> None:
        if _hidden_list(paths).exists():
            upperdir.put_back(paths.upper, _hidden_layer(paths), json.loads(_hidden_list(paths).read_text()))
            _hidden_list(paths).unlink()

    @property
    def note(self) -> str:
        """Log line that lists the agent's changes that were hidden from the tests. Empty if none were hidden."""
        names = sorted(name for name in self._sifted.dropped if not name.startswith((".megaflow", "logs/")))
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        return f"\n--- changes that the tests did not see: {' '.join(names[:_MAX_NAMED])}{more} ---\n" if names else ""

    def _depends(self) -> tuple[bool, KeepRules | None]:
        """Returns those settings of the tests' container that depend on environment variables."""
        return self._needs_home(), None if self._context.fresh or self._context.as_left else self._rules()

    def _needs_home(self) -> bool:
        home = self._variables["HOME"].strip("/")
        hidden = f"{home}/." if home else "."
        return any(f"{home}/".startswith(f"{path}/") or path.startswith(hidden) for path in self._kept)

    def _rules(self) -> KeepRules:
        home = self._variables["HOME"].strip("/")
        loaded = (
            value for name, value in self._variables.items() if name.endswith(_LOADED) and name not in _NOT_LOADED
        )
        return KeepRules(
            kept=sorted(set(self._kept)),
            additions=not self._context.fresh,
            everywhere=self._everywhere and not self._context.fresh,
            programs=sorted({*PROGRAM_DIRS, *_relative(self._variables.get("PATH", "").split(":"))}),
            loaded=sorted(set(_relative(":".join(loaded).split(":")))),
            home=home,
        )


def home_of(spec: SandboxSpec) -> str:
    """Returns the default home directory in a sandbox, which the image may override."""
    usual = "/root" if spec.as_root else pwd.getpwuid(os.getuid()).pw_dir
    return spec.env.get("HOME", usual).rstrip("/")


def _hidden_layer(paths: LayerPaths) -> Path:
    return paths.upper.with_name("agent")


def _hidden_list(paths: LayerPaths) -> Path:
    """Returns the path of the file that lists the paths hidden from the tests."""
    return paths.upper.with_name("agent.json")


def _relative(paths: Iterable[str]) -> list[str]:
    """Converts absolute paths to paths relative to the root. Omits relative paths and the root itself."""
    places = (os.path.normpath(path).strip("/") for path in paths if path.startswith("/"))
    return [place for place in places if place]
