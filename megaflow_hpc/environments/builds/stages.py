"""One Dockerfile's build: every step that changes files makes a layer over those before it, or is found made already.

What a step makes is known by what goes into it: the image it starts from, its words, variables, user and network, and
the content of what it copies. So a step that any task has made before is not made again. ``COPY``, ``ADD`` and
``WORKDIR`` start nothing; ``RUN`` runs in a sandbox of its own over the layers below it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import posixpath
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.builds.accounts import account, owner
from megaflow_hpc.environments.builds.listings import Listings
from megaflow_hpc.environments.builds.placing import Mode, Placement, Placer
from megaflow_hpc.environments.builds.script import run_text
from megaflow_hpc.environments.builds.workspace import BuildWorkspace
from megaflow_hpc.environments.images.dockerfile.archive import Known
from megaflow_hpc.environments.images.dockerfile.context import lay_out
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.dockerfile.steps import Copy, Env, RunStep, Stage, Step, Workdir
from megaflow_hpc.environments.images.layer_store import LayerStore
from megaflow_hpc.environments.images.layered import LayeredImage
from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.environments.images.layers.packing import Packer
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.tar import RefusedMember

KEY_VERSION = "megaflow-step-3"
KEY_LENGTH = 40
_SHOWN_LINES = 15
_SHOWN_CHARACTERS = 4000


class StageBuilds:
    """Builds the stages of one Dockerfile that its last one needs.

    Args:
        bases: image name → image, of those that it starts or copies from.
        spec: of the sandboxes that steps run in.
        say: gets one line for each step that is made.
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
        self._pretended = False
        """It was said that files have no owners here but root."""

    async def build(self) -> LayeredImage:
        """Returns the image of the last stage; its layers are in the store.

        Raises:
            ConfigError: a source that cannot be copied, a user that is not there.
            SiteError: a step that failed, with what it printed at last.
        """
        for line, name in self._dockerfile.unset:
            self._differs(line, f"${name} counts as unset, whatever the base image sets")
        for line, name, _ in self._dockerfile.ignored:
            if name == "VOLUME":
                self._differs(line, "a volume's directory is one like any other")
        for stage in self._dockerfile.needed:
            self._images[stage.name] = await self._stage(stage)
        last = self._dockerfile.last
        image = self._images[last.name]
        settings = "".join(f"{line}\n" for line in last.exports)
        workdir = (
            posixpath.normpath(posixpath.join(image.workdir or "/", last.workdir)) if last.workdir else image.workdir
        )
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
            image = image.over([layer] if layer else [])
        return image

    # --- steps --------------------------------------------------------------------------------------------------

    async def _step(
        self, image: LayeredImage, step: Copy | RunStep | Workdir, exports: Sequence[str]
    ) -> LayerFacts | None:
        key = step_key(self._dockerfile, self._images, self._spec.network, image, step, exports)

        async def make(file: Path) -> LayerFacts:
            self._say(f"{self._dockerfile.path}:{step.line}: {_title(step)}")
            for note in differences(step):
                self._differs(step.line, note)
            if isinstance(step, RunStep):
                return await self._run(image, step, exports, file)
            if isinstance(step, Copy):
                return await self._copy(image, step, file)
            return await asyncio.to_thread(self._make_directory, image, step, file)

        return await self._once(key, f"{self._dockerfile.path.name}:{step.line}", make)

    def _differs(self, line: int, note: str) -> None:
        self._say(f"{self._dockerfile.path}:{line}: other than in Docker: {note}")

    async def _once(self, key: str, source: str, make: Callable[[Path], Awaitable[LayerFacts]]) -> LayerFacts | None:
        """The layer of ``key``, which ``make(file)`` writes where nobody has yet; ``None``: it changes nothing."""
        if known := self._layers.step(key):
            return known[0]
        with self._layers.making(key) as place:
            if known := self._layers.step(key):
                return known[0]
            facts = await make(place / "layer")
            layer = self._layers.add(place / "layer", facts) if facts.inodes else None
            self._layers.note_step(key, layer, source)
            return layer

    def _make_directory(self, image: LayeredImage, step: Workdir, file: Path) -> LayerFacts:
        view = self._listings.view(image)
        who = account(view, step.user)
        found = view.entry(view.resolve(step.path))
        with Packer(file) as packer:
            if found is None or not found.is_directory:
                Placer(packer, view).directory(step.path, (who.uid, who.gid))
        return packer.facts()

    async def _copy(self, image: LayeredImage, step: Copy, file: Path) -> LayerFacts:
        view = await asyncio.to_thread(self._listings.view, image)
        if step.mode:
            Mode(step.mode)  # refused before anything is copied
        how = Placement(
            step.target,
            step.into,
            owner(view, step.owner) if step.owner else None,
            step.mode,
            own_owner=step.origin is not None,
            replaces=step.extract,
        )
        items = file.with_name("items")
        if step.origin is None:
            return await asyncio.to_thread(_placed, self._dockerfile, step, items, how, view, file)
        await self._workspace.open()
        items = self._workspace.place("items")
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
        who = account(view, step.user)
        places = [view.entry(view.resolve(path)) for path in ("tmp", "var/tmp")]
        room = any(found is None or found.attributes.mode & 0o1777 != 0o1777 for found in places)
        if room and who.uid:
            self._differs(step.line, "/tmp and /var/tmp are made for everybody to write to")
        home = "HOME" not in variables_of([image.settings, *exports])
        await self._workspace.open()
        if self._workspace.pretends and not self._pretended:
            self._pretended = True
            self._differs(step.line, "no subordinate ids here (/etc/subuid): while steps run, every file is root's")
        numbers = []
        for number, mount in enumerate(step.mounts, 1):
            numbers.append(number if mount.copy else 0)
            if mount.copy:
                items = self._workspace.items / str(number)
                if mount.copy.origin is None:
                    await asyncio.to_thread(_lay_out, self._dockerfile, mount.copy, items)
                else:
                    await self._copy_out(mount.copy, items)
        async with await self._workspace.start(image, self._spec, view) as sandbox:
            text = run_text(step, exports, numbers, who, home=home, room=room and bool(who.uid))
            await self._carry_out(sandbox, step.line, text)
            facts, wrote_hosts = await self._workspace.layer_of(sandbox, file)
        if wrote_hosts:
            self._differs(step.line, "/etc/hosts was changed, which is read-only there")
        for number in filter(None, numbers):
            await asyncio.to_thread(remove_tree, self._workspace.items / str(number))
        return facts

    async def _carry_out(self, sandbox: ApptainerSandbox, line: int, text: str) -> None:
        result = await sandbox.exec(text, cwd="/")
        if not result.exit_code:
            return
        lines = [*result.stdout.splitlines()[-_SHOWN_LINES:], *result.stderr.splitlines()[-_SHOWN_LINES:]]
        lines += [f"{self._dockerfile.path.name}:{line}: exit status {result.exit_code}"]
        if self._spec.network == "none":
            lines += ["steps have no network here; environment.build_network: host gives them the host's"]
        text = "".join(each if each.isprintable() or each in "\n\t" else "?" for each in "\n".join(lines))
        shown = "\n".join(f"  {each}" for each in text[-_SHOWN_CHARACTERS:].split("\n"))
        raise SiteError(f"{self._dockerfile.path}: the build failed at line {line}\n{shown}")


def differences(step: Copy | RunStep | Workdir) -> list[str]:
    """Returns what a step that is made finds otherwise than in Docker, where it may matter to what it makes."""
    mounts = step.mounts if isinstance(step, RunStep) else []
    said = []
    if any(mount.kind == "cache" for mount in mounts):
        said.append("a cache mount is empty in every step")
    if any(mount.kind == "bind" and not mount.writable for mount in mounts):
        said.append("a bind mount is a copy; what is written to it is lost, and does not fail")
    return said


def step_key(
    dockerfile: Dockerfile,
    images: Mapping[str, LayeredImage],
    network: str,
    image: LayeredImage,
    step: Copy | RunStep | Workdir,
    exports: Sequence[str],
) -> str:
    """Returns what a step is known by: a hash of all that goes into it.

    Args:
        images: those that the build starts or copies from, and its stages so far.
        network: of the steps.
        image: what is below the step.
        exports: lines of ``ENV`` before it.
    """
    content = asdict(step)
    del content["line"]
    digest = hashlib.sha256(f"{KEY_VERSION}\0{identity(image)}\0{type(step).__name__}\0".encode())
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
            digest.update(f"\0{identity(images[copy.origin])}".encode())
    return digest.hexdigest()[:KEY_LENGTH]


def identity(image: LayeredImage) -> str:
    """Returns what stands for an image's files: its base, and its layers by their digests."""
    text = "\0".join([image.base.identity if image.base else "", *(layer.digest for layer in image.layers)])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def variables_of(texts: Iterable[str]) -> set[str]:
    """Returns the names of what lines of ``export NAME=VALUE …`` set."""
    return {word.partition("=")[0] for text in texts for word in shlex.split(text) if "=" in word}


def absolute(step: Copy | RunStep | Workdir, home: str, user: str) -> Copy | RunStep | Workdir:
    """The step with its relative paths from the base image's own directory, and its user where none was named."""
    if isinstance(step, Workdir):
        return replace(step, path=posixpath.join(home, step.path), user=step.user or user or None)
    if isinstance(step, Copy):
        return replace(step, target=posixpath.join(home, step.target))
    mounts = [replace(mount, target=posixpath.join(home, mount.target)) for mount in step.mounts]
    copies = [mount.copy and replace(mount.copy, target=mount.target) for mount in mounts]
    mounts = [replace(mount, copy=copy) for mount, copy in zip(mounts, copies, strict=True)]
    return replace(step, workdir=posixpath.join(home, step.workdir), mounts=mounts, user=step.user or user or None)


def _title(step: Step) -> str:
    if isinstance(step, RunStep):
        words = " ".join(step.argv[2:] if step.argv[1:2] == ["-c"] else step.argv)
        return f"RUN {words.splitlines()[0][:80] if words.split() else words}"
    if isinstance(step, Copy):
        return f"COPY {' '.join([*step.sources, *step.texts, step.target])[:80]}"
    return f"WORKDIR {step.path}" if isinstance(step, Workdir) else ""


def _placed(dockerfile: Dockerfile, step: Copy, items: Path, how: Placement, view: Any, file: Path) -> LayerFacts:
    try:
        known = _lay_out(dockerfile, step, items)
        with Packer(file) as packer:
            Placer(packer, view).place(items, replace(how, known=known))
    finally:
        remove_tree(items)
    return packer.facts()


def _lay_out(dockerfile: Dockerfile, copy: Copy, place: Path) -> Known:
    place.mkdir()
    sources, context = copy.sources, dockerfile.context
    known = lay_out(context, sources, place, extract=copy.extract, parents=copy.parents, exclude=copy.exclude)
    for number, (name, content) in enumerate(copy.texts.items()):
        target = place / f"text{number}" / (name if copy.into else os.path.basename(copy.target) or name)
        target.parent.mkdir()
        target.write_text(content, encoding="utf-8", errors="surrogateescape")
        target.chmod(0o644)
    return known
