"""Calls of the package that run Apptainer and interpret its answer.

A scene runs with the real Apptainer when it is recorded, and with recorded answers in a contract test. It receives an
empty directory and returns each case's result: a message, or a value as text.
"""

from __future__ import annotations

import io
import lzma
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from megaflow_hpc.cli import doctor
from megaflow_hpc.environments.builds.workspace import unpack_sif
from megaflow_hpc.environments.images import apptainer_client, sif
from megaflow_hpc.environments.images.image_file import working_directory
from megaflow_hpc.environments.images.layers.view import of_sif
from megaflow_hpc.environments.sandbox import probe
from megaflow_hpc.environments.sandbox.commands.container import Container
from megaflow_hpc.environments.sandbox.launcher import start_apptainer
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.apptainer import clean_environment, find_apptainer, version
from megaflow_hpc.model.engines import launch
from megaflow_hpc.model.engines.process import cause
from megaflow_hpc.tasks.releases.image import _python_of
from tests.support.namespaces import CLOSED, mount_overlay

Results = dict[str, str]
RECORDED = Path(__file__).with_name("recorded")
IMAGE = RECORDED / "image.sif.xz"
"""The SIF of the scene ``build``, compressed."""
REGISTRY = "registry.example.org/lab/x:1"
OTHER_MACHINE = {"x86_64": b"\xb7\x00", "aarch64": b"\x3e\x00"}
"""Machine → machine field of an ELF program for another machine."""
FUSE = os.environ.get("MEGAFLOW_FUSE") or "/dev/fuse"
"""FUSE device for the scene ``fuse-overlayfs``."""
S390X = b"11"
"""Architecture of a SIF for another machine."""


@dataclass(frozen=True)
class Scene:
    """A function, and the shell command that restricts the node on which it is recorded.

    ``before`` receives the scene's directory as its argument. If it is ``None``, the node is not restricted.
    """

    run: Callable[[Path], Results]
    before: Callable[[Path], str] | None = None


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Returns the message of the error that a call raises, or its result as text."""
    try:
        return str(call(*arguments, **options))
    except MegaflowError as error:
        return str(error)


def in_process(request: dict[str, Any], environment: Mapping[str, str], *_: Any) -> tuple[int, str]:
    """Runs a call of Apptainer's Python client in this process instead of a child."""
    from spython.main import Client

    output, cwd, handler = io.StringIO(), Path.cwd(), signal.getsignal(signal.SIGTERM)
    try:
        with (
            mock.patch.object(Client, "_run_command", Client._run_command),
            mock.patch.dict(os.environ, environment, clear=True),
            redirect_stdout(output),
        ):
            return apptainer_client.serve(request), output.getvalue()
    finally:
        os.chdir(cwd)
        signal.signal(signal.SIGTERM, handler)


def client(folder: Path, verb: Callable[..., None], *arguments: Any, **options: Any) -> str:
    """Returns the outcome of a build or pull."""
    (folder / "tmp").mkdir(exist_ok=True)
    with (
        mock.patch.object(apptainer_client, "_run", in_process),
        mock.patch.object(tempfile, "tempdir", str(folder / "tmp")),
    ):
        return outcome(verb, find_apptainer(), *arguments, **options)


def tree(folder: Path) -> Path:
    """Creates the files of an image that has only busybox."""
    root = folder / "tree"
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "root"):
        (root / name).mkdir(parents=True)
    busybox = Path(os.environ.get("MEGAFLOW_TEST_BASE_SIF", "/nowhere")).with_name("busybox")
    if busybox.exists():  # replayed scenes run no program
        shutil.copy2(busybox, root / "bin" / "busybox")
    for name in ("sh", "sleep", "true"):
        (root / "bin" / name).symlink_to("busybox")
    return root


def image(folder: Path) -> Path:
    """Returns the image of the scene ``build``."""
    path = folder / "image.sif"
    path.write_bytes(lzma.decompress(IMAGE.read_bytes()))
    return path


def versions(folder: Path) -> Results:
    apptainer = find_apptainer()
    return {
        "version": version(apptainer),
        "setuid": str(probe.is_setuid(apptainer)),
        "unknown option": probe._failure_of([apptainer, "-q", "exec", "--no-such-option", "/", "true"]),
    }


LABELLED = "Bootstrap: scratch\n%files\n  marker /marker\n%labels\n  megaflow.workdir /srv\n"


def builds(folder: Path) -> Results:
    tree(folder)
    texts = {
        "success": LABELLED,
        "failing post": "Bootstrap: localimage\nFrom: tree\n%post\n  echo out of luck >&2\n  exit 7\n",
        "missing base": "Bootstrap: localimage\nFrom: /nonexistent.sif\n",
        "unknown bootstrap": "Bootstrap: nothing-of-that-name\nFrom: x\n",
        "missing file": "Bootstrap: scratch\n%files\n  absent /absent\n",
        "no header": "%post\n  true\n",
    }
    (folder / "marker").write_text("x\n")
    results = {}
    for name, text in texts.items():
        definition = folder / f"{name.replace(' ', '-')}.def"
        definition.write_text(text)
        options = ("--fakeroot", *apptainer_client.SIF_OPTIONS)
        target = folder / f"{definition.stem}.sif"
        if name != "success":
            target.write_text("an older image")
        results[name] = client(folder, apptainer_client.build, target, str(definition), *options, cwd=folder)
    built = folder / "success.sif"
    results["unpacked"] = client(
        folder, apptainer_client.build, folder / "unpacked", str(built), "--fix-perms", sandbox=True
    )
    results["unknown option"] = client(folder, apptainer_client.build, folder / "x.sif", str(built), "--no-such-option")
    results["older image"] = (folder / "failing-post.sif").read_text()
    return results | left(folder)


def left(folder: Path) -> Results:
    """Returns the temporary files that builds and pulls have left, and the images."""
    patterns = ("tmp/*", "megaflow-*", "x.sif")
    return {"left": " ".join(str(path) for pattern in patterns for path in folder.glob(pattern))}


def no_space(folder: Path) -> Results:
    root = tree(folder)
    (root / "random").write_bytes(os.urandom(1 << 20))
    (folder / "full").mkdir(exist_ok=True)
    return {"no space": client(folder, apptainer_client.build, folder / "full" / "x.sif", str(root))}


def full_disk(folder: Path) -> str:
    (folder / "full").mkdir()
    return f"mount -t tmpfs -o size=200k tmpfs {folder}/full"


def pulls(folder: Path) -> Results:
    target = folder / "x.sif"
    results = {
        "docker": client(folder, apptainer_client.build, target, f"docker://{REGISTRY}"),
        "oras": client(folder, apptainer_client.pull, target, f"oras://{REGISTRY}"),
        "oras over HTTP": client(folder, apptainer_client.pull, target, f"oras://{REGISTRY}", plain_http=True),
        "library": client(folder, apptainer_client.pull, target, "library://lab/x:1"),
    }
    return results | left(folder)


def files(folder: Path) -> Results:
    """Files of a SIF by ``unsquashfs``, and labels by Apptainer itself, which the package reads from the SIF."""
    path = image(folder)
    cut = folder / "cut.sif"
    cut.write_bytes(path.read_bytes()[:-2000])
    partition = sif.system_partition(path)
    damaged = folder / "damaged.sif"
    content = bytearray(path.read_bytes())
    content[partition.offset + 96 : partition.offset + partition.size] = b"\xff" * (partition.size - 96)
    damaged.write_bytes(content)
    inspected = subprocess.run([find_apptainer(), "inspect", "--json", str(path)], capture_output=True, check=False)
    return {
        "inode count": str(partition.inodes),
        "bytes": str(sif.unpacked_bytes(path, partition)),
        "names": " ".join(sorted(of_sif(str(path)).names(""))),
        "workdir": str(working_directory(str(path))),
        "inspect": inspected.stdout.decode(),
        "truncated": outcome(sif.system_partition, cut),
        "damaged": outcome(of_sif, str(damaged)),
        "damaged unpacked": str(sif.unpack(damaged, folder / "out", partition)),
        "damaged base": outcome(unpack_sif, str(damaged), (), folder / "out"),
    }


def probes(folder: Path) -> Results:
    """Results of the probe of a node, and how ``doctor`` reports them."""
    scratch = folder / "m"
    scratch.mkdir(exist_ok=True)
    site = probe.probe(scratch, find_apptainer())
    names = ("setuid", "container", "overlay", "overlay_by", "copy", "private_network", "gateway", "user_namespaces")
    results = {name: str(getattr(site, name)) for name in names}
    results |= {f"refuses {network}": site.refuses(network) for network in ("none", "gateway", "host")}
    if site.overlay and not site.container:
        results["refuses without copies"] = replace(site, copy="scratch is read-only").refuses("host")
    results = {name: text for name, text in results.items() if text}
    with mock.patch.object(probe, "probe", return_value=site):
        for finding in doctor._apptainer():
            if finding.check in ("containers", "overlay", "network none", "gateway"):
                results[f"doctor: {finding.check}"] = f"{finding.level} {finding.found}; {finding.remedy}"
    return results | {"left": str(os.listdir(scratch))}


def no_network_namespaces(folder: Path) -> str:
    return "echo 0 > /proc/sys/user/max_net_namespaces"


def no_user_namespaces(folder: Path) -> str:
    return "echo 0 > /proc/sys/user/max_user_namespaces"


def no_overlay(folder: Path) -> str:
    return f"{CLOSED} && {mount_overlay(folder)}"


def only_fuse(folder: Path) -> str:
    return f"mount --bind {FUSE} /dev/fuse && {mount_overlay(folder)}"


def sandboxes(folder: Path) -> Results:
    """Containers of sandboxes: standard output, or the reason why they do not start."""
    root = tree(folder)
    (folder / "data").mkdir()
    foreign, empty = folder / "foreign", folder / "empty"
    shutil.copytree(root, foreign, symlinks=True)
    shutil.copytree(root, empty, symlinks=True, ignore=shutil.ignore_patterns("sh"))
    program = foreign / "bin" / "busybox"
    content = program.read_bytes() if program.exists() else b""
    program.write_bytes(content[:18] + OTHER_MACHINE[platform.machine()] + content[20:])
    bind = (f"{folder}/data:/data:ro",)
    specs = {
        "root": SandboxSpec(str(root), network="none"),
        "user": SandboxSpec(str(root), network="none", user="1000"),
        "gateway": SandboxSpec(str(root), network="gateway"),
        "host": SandboxSpec(str(root), network="host", binds=bind),
        "nested": SandboxSpec(str(root), network="none", nested=True),
        "fakeroot": SandboxSpec(str(root), network="none", fakeroot=True),
        "copy": SandboxSpec(str(root), network="none"),
        "without a shell": SandboxSpec(str(empty), network="none"),
        "of another architecture": SandboxSpec(str(foreign), network="none"),
        "missing bind": SandboxSpec(str(root), network="none", binds=("/nonexistent:/data",)),
        "no image": SandboxSpec(str(root), network="none"),
    }
    return {name: sandbox(name, spec, folder / name.replace(" ", "-")) for name, spec in specs.items()}


def sandbox(name: str, spec: SandboxSpec, place: Path) -> str:
    for each in ("control", "layer", "tmp"):
        (place / each).mkdir(parents=True)
    if name in ("copy", "no image"):
        shutil.copytree(spec.image, place / "layer" / "root", symlinks=True)
    rootfs = Rootfs(spec.image, lambda: None, copies=name in ("copy", "no image"))
    words = ("/bin/sh", "-c", "echo started")
    line = rootfs.command_line(
        find_apptainer(), spec, layer=str(place / "layer"), control=str(place / "control"), command=words
    )
    if name == "no image":
        shutil.rmtree(place / "layer" / "root")
    pipe = subprocess.PIPE
    process = start_apptainer(
        line.argv, line.prefix, str(place / "tmp"), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    out, err = process.communicate()
    if not process.returncode:
        return out.decode()
    container = Container(str(place / "control"), lambda _: None)
    container._stderr += err
    return container.last_words()


def engines(folder: Path) -> Results:
    """Engines in images, on a node without FUSE: standard output, or the cause of the failure."""
    root, good, broken, cut = tree(folder), image(folder), folder / "broken.sif", folder / "cut.sif"
    broken.write_text("not a SIF")
    cut.write_bytes(good.read_bytes()[:-2000])
    foreign = folder / "foreign.sif"
    sif_of_another_machine(good, foreign)
    private = folder / "private"
    private.mkdir()

    def engine_in(image: Path, *words: str, gpus: int = 0, without: Iterable[str] = ()) -> str:
        model = {"image": str(image), "path": str(root), "gpus": gpus}
        with mock.patch.object(launch, "FUSE", "/nonexistent"):
            started = launch.in_image(launch.Launch(command=list(words)), model, private)
        command = [word for word in started.command if word not in without]
        environment = {**clean_environment(), **started.env}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return cause(done.stderr, done.returncode) if done.returncode else done.stdout

    return {
        "directory": engine_in(root, "/bin/sh", "-c", "echo started"),
        "gpus": engine_in(root, "/bin/sh", "-c", "echo started", gpus=1),
        "no python": engine_in(root, "python3"),
        "no program in a SIF": engine_in(good, "python3"),
        "no SIF": engine_in(broken, "python3"),
        "truncated": engine_in(cut, "python3"),
        "another architecture": engine_in(foreign, "python3"),
        "no FUSE": engine_in(good, "python3", without=["--unsquash"]),
        "python of an image": outcome(_python_of, find_apptainer(), root),
        "python of a SIF": outcome(_python_of, find_apptainer(), good),
    }


def sif_of_another_machine(source: Path, target: Path) -> None:
    """Changes the architecture that a SIF names, in its header and in the descriptor of its partition."""
    content = bytearray(source.read_bytes())
    ours = bytes(content[45:48])
    for place in (45, content.index(ours, 4096)):
        content[place : place + 2] = S390X
    target.write_bytes(content)


SCENES = {
    "version": Scene(versions),
    "build": Scene(builds),
    "no-space": Scene(no_space, full_disk),
    "no-registry": Scene(pulls, lambda folder: "mount --bind /dev/null /etc/resolv.conf"),
    "files": Scene(files),
    "node": Scene(probes),
    "no-network-namespaces": Scene(probes, no_network_namespaces),
    "no-user-namespaces": Scene(probes, no_user_namespaces),
    "no-overlay": Scene(probes, no_overlay),
    "fuse-overlayfs": Scene(probes, only_fuse),
    "sandbox": Scene(sandboxes),
    "engine": Scene(engines, lambda folder: CLOSED),
}
