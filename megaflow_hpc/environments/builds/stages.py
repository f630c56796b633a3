"""Builds one Dockerfile. Each step that changes files adds a layer or reuses a stored one.

The key of a step is a hash of its inputs: the image below it, its arguments, variables, user and network, and the files
that it copies. A step that has already been built, even for another task, is therefore not executed again. ``COPY``,
``ADD`` and ``WORKDIR`` start no process in the image. Each ``RUN`` runs in a separate sandbox over the layers below.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import posixpath
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from megaflow_hpc.environments.builds.accounts import account, owner
from megaflow_hpc.environments.builds.placing import Mode, Placement, Placer
from megaflow_hpc.environments.builds.script import run_text
from megaflow_hpc.environments.builds.workspace import BuildWorkspace, Listings
from megaflow_hpc.environments.images.dockerfile.context import ArchivedAttributes, lay_out
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.dockerfile.steps import Copy, Env, RunStep, Stage, Workdir
from megaflow_hpc.environments.images.layered import LayeredImage
from megaflow_hpc.environments.images.layers.blob import LayerFacts, Packer
from megaflow_hpc.environments.images.layers.view import LayerView
from megaflow_hpc.environments.images.store import LayerStore
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import RefusedMember

KEY_VERSION = "megaflow-step-3"
KEY_LENGTH = 40
_SHOWN_LINES = 15
_SHOWN_CHARACTERS = 4000

LayerStep = Copy | RunStep | Workdir
"""A Dockerfile step that may change files."""


class StageBuilds:
    """Builds the last stage of a Dockerfile and the stages that it depends on.

    Args:
        bases: Maps the names in ``dockerfile.bases`` to images.
        spec: Template for the sandboxes of ``RUN`` steps.
        say: Called with a progress message for each executed step.
    """

    def __init__(
        self,
        dockerfile: Dockerfile,
        bases: Mapping[str, LayeredImage],
        layers: LayerStore,
        listings: Listings,
        workspace: BuildWorkspace,
        spec: SandboxSpec,
        say: Callable[[str], None],
    ) -> None:
        self._dockerfile = dockerfile
        self._images = dict(bases)
        self._layers = layers
        self._listings = listings
        self._workspace = workspace
        self._spec = spec
        self._say = say
        self._said_pretends_owners = False

    async def build(self) -> LayeredImage:
        """Builds the last stage, stores its layers and returns its image.

        Raises:
            ConfigError: A source cannot be copied, or a user is missing.
            SiteError: A step failed. The message includes its last output.
        """
        for line, name in self._dockerfile.unset:
            self._say_difference(line, f"${name} is treated as unset, even if the base image sets it")
        for line, name, _ in self._dockerfile.ignored:
            if name == "VOLUME":
                self._say_difference(line, "a volume's directory is an ordinary directory")
        for stage in self._dockerfile.needed:
            self._images[stage.name] = await self._stage(stage)
        last = self._dockerfile.last
        image = self._images[last.name]
        settings = "".join(f"{line}\n" for line in last.exports)
        workdir = image.workdir
        if last.workdir:
            workdir = posixpath.normpath(posixpath.join(image.workdir or "/", last.workdir))
        return replace(image, settings=image.settings + settings, workdir=workdir, user=last.user or image.user)

    async def _stage(self, stage: Stage) -> LayeredImage:
        image = self._images[stage.base]
        exports: list[str] = []
        for step in stage.steps:
            if isinstance(step, Env):
                exports.append(step.text)
                continue
            try:
                layer = await self._step(image, absolute(step, image.workdir or "/", image.user), exports)
            except (ConfigError, OSError, RefusedMember) as error:
                raise ConfigError(f"{self._dockerfile.path}:{step.line}: {error}") from error
            if layer is not None:
                image = image.over([layer])
        return image

    # --- steps --------------------------------------------------------------------------------------------------

    async def _step(self, image: LayeredImage, step: LayerStep, exports: Sequence[str]) -> LayerFacts | None:
        """Returns the layer of a step, executing the step unless the layer is stored. Returns ``None`` if the step
        changes no files."""
        key = step_key(self._dockerfile, self._images, self._spec.network, image, step, exports)
        with suppress(KeyError):
            return self._layers.step(key)
        with self._layers.making(key) as directory:
            with suppress(KeyError):  # Another process has built it in the meantime.
                return self._layers.step(key)
            file = directory / "layer"
            facts = await self._make(image, step, exports, file)
            layer = self._layers.add(file, facts) if facts.inodes else None
            self._layers.record_step(key, layer, f"{self._dockerfile.path.name}:{step.line}")
            return layer

    async def _make(self, image: LayeredImage, step: LayerStep, exports: Sequence[str], file: Path) -> LayerFacts:
        """Executes a step and writes its layer to ``file``."""
        self._say(f"{self._dockerfile.path}:{step.line}: {_title(step)}")
        if isinstance(step, RunStep):
            for difference in _mount_differences(step):
                self._say_difference(step.line, difference)
            return await self._run(image, step, exports, file)
        if isinstance(step, Copy):
            return await self._copy(image, step, file)
        return await asyncio.to_thread(self._make_directory, image, step, file)

    def _say_difference(self, line: int, difference: str) -> None:
        self._say(f"{self._dockerfile.path}:{line}: differs from Docker: {difference}")

    def _make_directory(self, image: LayeredImage, step: Workdir, file: Path) -> LayerFacts:
        view = self._listings.view(image)
        user = account(view, step.user)
        existing = view.entry(view.resolve(step.path))
        with Packer(file) as packer:
            if existing is None or not existing.is_directory:
                Placer(packer, view).directory(step.path, (user.uid, user.gid))
        return packer.facts()

    async def _copy(self, image: LayeredImage, step: Copy, file: Path) -> LayerFacts:
        view = await asyncio.to_thread(self._listings.view, image)
        if step.mode:
            Mode(step.mode)  # Raises before anything is copied.
        how = Placement(
            step.target,
            step.into,
            owner(view, step.owner) if step.owner else None,
            step.mode,
            own_owner=step.origin is not None,
            replaces=step.extract,
        )
        if step.origin is None:
            return await asyncio.to_thread(_place, self._dockerfile, step, how, view, file)
        await self._workspace.open()
        items = self._workspace.new_path("items")
        await self._copy_out(step, items)
        facts = await self._workspace.placed(image, items, asdict(how), file)
        await asyncio.to_thread(remove_tree, items)
        return facts

    async def _copy_out(self, step: Copy, items: Path) -> None:
        assert step.origin is not None
        try:
            await self._workspace.copy_out(self._images[step.origin], step.sources, items)
        except SiteError as error:
            raise SiteError(f"{self._dockerfile.path}:{step.line}: --from={step.origin}: {error}") from error

    async def _run(self, image: LayeredImage, step: RunStep, exports: Sequence[str], file: Path) -> LayerFacts:
        view = await asyncio.to_thread(self._listings.view, image)
        user = account(view, step.user)
        make_temporary = bool(user.uid) and not all(_is_shared(view, path) for path in ("tmp", "var/tmp"))
        if make_temporary:
            self._say_difference(step.line, "/tmp and /var/tmp are made writable for every user")
        home = "HOME" not in variables_of([image.settings, *exports])
        await self._workspace.open()
        if self._workspace.pretends_owners and not self._said_pretends_owners:
            self._said_pretends_owners = True
            self._say_difference(
                step.line, "no subordinate ids here (/etc/subuid): root owns every file while steps run"
            )
        numbers = await self._lay_out_mounts(step)
        async with await self._workspace.start(image, self._spec, view) as sandbox:
            text = run_text(step, exports, numbers, user, home=home, temporary_directories=make_temporary)
            await self._execute(sandbox, step.line, text)
            facts, changed_hosts = await self._workspace.layer_of(sandbox, file)
        if changed_hosts:
            self._say_difference(step.line, "/etc/hosts was changed, which is read-only there")
        for number in filter(None, numbers):
            await asyncio.to_thread(remove_tree, self._workspace.items / str(number))
        return facts

    async def _lay_out_mounts(self, step: RunStep) -> list[int]:
        """Copies the files of a step's mounts. Returns the directory number of each mount, or 0 for a mount without
        files."""
        numbers = []
        for number, mount in enumerate(step.mounts, 1):
            if mount.copy is None:
                numbers.append(0)
                continue
            numbers.append(number)
            items = self._workspace.items / str(number)
            if mount.copy.origin is None:
                await asyncio.to_thread(_lay_out, self._dockerfile, mount.copy, items)
            else:
                await self._copy_out(mount.copy, items)
        return numbers

    async def _execute(self, sandbox: ApptainerSandbox, line: int, text: str) -> None:
        result = await sandbox.exec(text, cwd="/")
        if not result.exit_code:
            return
        lines = [*result.stdout.splitlines()[-_SHOWN_LINES:], *result.stderr.splitlines()[-_SHOWN_LINES:]]
        lines.append(f"{self._dockerfile.path.name}:{line}: exit status {result.exit_code}")
        if self._spec.network == "none":
            lines.append("build steps have no network; set environment.build_network: host to use the host's")
        output = "".join(each if each.isprintable() or each in "\n\t" else "?" for each in "\n".join(lines))
        shown = "\n".join(f"  {each}" for each in output[-_SHOWN_CHARACTERS:].split("\n"))
        raise SiteError(f"{self._dockerfile.path}: the build failed at line {line}\n{shown}")


def _is_shared(view: LayerView, path: str) -> bool:
    """Returns whether a directory is world-writable and sticky, as ``/tmp`` usually is."""
    entry = view.entry(view.resolve(path))
    return entry is not None and entry.attributes.mode & 0o1777 == 0o1777


def _mount_differences(step: RunStep) -> list[str]:
    """Describes how a step's mounts differ from Docker's."""
    differences = []
    if any(mount.kind == "cache" for mount in step.mounts):
        differences.append("a cache mount is empty in every step")
    if any(mount.kind == "bind" and not mount.writable for mount in step.mounts):
        differences.append("a bind mount is a copy; what is written to it is lost, and does not fail")
    return differences


def step_key(
    dockerfile: Dockerfile,
    images: Mapping[str, LayeredImage],
    network: str,
    image: LayeredImage,
    step: LayerStep,
    exports: Sequence[str],
) -> str:
    """Returns the key of a step, which is a hash of its inputs.

    Args:
        images: All base images and completed stages, by name.
        network: Network of the steps.
        image: The image that the step changes.
        exports: Shell lines of the preceding ``ENV`` instructions.
    """
    content = asdict(step)
    del content["line"]
    digest = hashlib.sha256(f"{KEY_VERSION}\0{_identity(image)}\0{type(step).__name__}\0".encode())
    copies: list[Copy] = [step] if isinstance(step, Copy) else []
    if isinstance(step, RunStep):
        copies = [mount.copy for mount in step.mounts if mount.copy]
        before = [image.settings, *exports] if image.settings else list(exports)
        content |= {"exports before": before, "network": network}
    digest.update(json.dumps(content, sort_keys=True, default=str).encode("utf-8", "surrogateescape"))
    for copy in copies:
        if copy.origin is None:
            dockerfile.context.feed(digest.update, copy.sources)
        else:
            digest.update(f"\0{_identity(images[copy.origin])}".encode())
    return digest.hexdigest()[:KEY_LENGTH]


def _identity(image: LayeredImage) -> str:
    """Hashes an image's base and layers. Images with equal hashes have equal files."""
    text = "\0".join([image.base.identity if image.base else "", *(layer.digest for layer in image.layers)])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def variables_of(texts: Iterable[str]) -> set[str]:
    """Returns the names of variables that are set by lines such as ``export NAME=VALUE …``."""
    return {word.partition("=")[0] for text in texts for word in shlex.split(text) if "=" in word}


def absolute(step: LayerStep, workdir: str, user: str) -> LayerStep:
    """Resolves a step's paths against ``workdir``. A step without a user gets ``user``."""
    if isinstance(step, Workdir):
        return replace(step, path=posixpath.join(workdir, step.path), user=step.user or user or None)
    if isinstance(step, Copy):
        return replace(step, target=posixpath.join(workdir, step.target))
    mounts = []
    for mount in step.mounts:
        target = posixpath.join(workdir, mount.target)
        copy = replace(mount.copy, target=target) if mount.copy else None
        mounts.append(replace(mount, target=target, copy=copy))
    return replace(step, workdir=posixpath.join(workdir, step.workdir), mounts=mounts, user=step.user or user or None)


def _title(step: LayerStep) -> str:
    if isinstance(step, Workdir):
        return f"WORKDIR {step.path}"
    if isinstance(step, Copy):
        return f"COPY {' '.join([*step.sources, *step.texts, step.target])[:80]}"
    words = " ".join(step.argv[2:] if step.argv[1:2] == ["-c"] else step.argv)
    return f"RUN {words.splitlines()[0][:80] if words.split() else words}"


def _place(dockerfile: Dockerfile, step: Copy, how: Placement, view: LayerView, file: Path) -> LayerFacts:
    """Writes files from the build context to ``file`` as a layer."""
    items = file.with_name("items")
    try:
        archived = _lay_out(dockerfile, step, items)
        with Packer(file) as packer:
            Placer(packer, view).place(items, replace(how, archived=archived))
    finally:
        remove_tree(items)
    return packer.facts()


def _lay_out(dockerfile: Dockerfile, copy: Copy, items: Path) -> ArchivedAttributes:
    """Copies here-documents and files from the build context to ``items/<number>/<name>``."""
    items.mkdir()
    archived = lay_out(dockerfile.context, copy.sources, items, extract=copy.extract, exclude=copy.exclude)
    for number, (name, content) in enumerate(copy.texts.items()):
        target = items / f"text{number}" / (name if copy.into else os.path.basename(copy.target) or name)
        target.parent.mkdir()
        target.write_text(content, encoding="utf-8", errors="surrogateescape")
        target.chmod(0o644)
    return archived
