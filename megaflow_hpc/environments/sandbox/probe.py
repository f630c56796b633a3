"""Tests the capabilities of this node's Apptainer, kernel and scratch.

The probe starts a container from the host's own ``/usr`` with every option that sandboxes use. Only if that fails does
it try each option alone. It takes about a third of a second. The result is cached per node in ``SCRATCH/site.json``
until the node reboots or Apptainer changes.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments.sandbox.launcher import exec_argv, launcher, namespace_root
from megaflow_hpc.environments.sandbox.network import Way, how_to_listen
from megaflow_hpc.environments.sandbox.processes import NPROC_KERNEL, kernel_version
from megaflow_hpc.environments.sandbox.rootfs import overlay as overlays
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import (
    clean_environment,
    explained,
    find_apptainer,
    version,
)
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import boot_id, node_name

FORMAT = 6
CACHE = "site.json"
PROBE_S = 20.0
"""Timeout in seconds for each container of the probe."""

OverlayBy = Literal["kernel", "fuse-overlayfs", ""]


@dataclass(frozen=True)
class Site:
    """Capabilities of a node. A field that holds a reason is empty if the capability is available."""

    apptainer: str
    version: str
    setuid: bool
    """True if a setuid program starts containers. Otherwise Apptainer uses user namespaces."""
    container: str
    """Reason why no container can start."""
    overlay: str
    """Reason why scratch cannot hold the writable layer of an overlay. If set, sandboxes are copies of their images."""
    overlay_by: OverlayBy
    copy: str
    """Reason why a sandbox cannot be a copy of its image. Tested only if overlays are unavailable."""
    private_network: str
    """Reason why network ``none`` is unavailable."""
    gateway: str
    """Reason why network ``gateway`` is unavailable."""
    gateway_by: Way
    """Way in which a helper creates a listener in a private network (network.py)."""
    user_namespaces: str
    kernel: str
    processes: str
    """Reason why the kernel cannot limit the number of processes."""
    calls: str
    """Reason why system calls of sandboxes cannot be filtered (launcher.py)."""

    def refuses(self, network: str) -> str:
        """Returns why a sandbox with this network mode cannot start on this node, or an empty string if it can."""
        if self.container:
            return f"containers do not start: {self.container}"
        if self.overlay and self.copy:
            return f"no writable layer: {self.overlay}; and no copy of an image: {self.copy}"
        if network == "none":
            return self.private_network
        return self.gateway if network == "gateway" else ""


def probe(scratch: str | os.PathLike[str], apptainer: str | None = None) -> Site:
    """Tests the capabilities of this node. Removes all files and containers of the test.

    Args:
        scratch: Directory of writable layers.

    Raises:
        SiteError: Apptainer is missing, or scratch is not writable.
    """
    apptainer = apptainer or find_apptainer()
    namespaces = _failure_of(["unshare", "--user", "--map-root-user", "--mount", "true"])
    setuid = is_setuid(apptainer)
    try:
        temporary = tempfile.mkdtemp(prefix="probe-", dir=scratch)
    except OSError as error:
        raise SiteError(f"{scratch}: not writable ({error.strerror}); set MEGAFLOW_SCRATCH") from error
    overlay_by: OverlayBy = ""
    try:
        container, overlay, copy, network = _try_containers(apptainer, temporary)
        if not overlay:
            overlay_by = "kernel" if overlays.works(temporary) else "fuse-overlayfs"
    finally:
        remove_tree(temporary)
    gateway_by: Way = ""
    gateway = network
    if not gateway:
        gateway_by, gateway = how_to_listen(namespaces)
    release, processes = os.uname().release, ""
    if kernel_version() < NPROC_KERNEL:
        processes = f"Linux {release} counts all processes of the user; 5.14 is needed"
    return Site(
        apptainer=apptainer,
        version=version(apptainer),
        setuid=setuid,
        container=container,
        overlay=overlay,
        overlay_by=overlay_by,
        copy=copy,
        private_network=network,
        gateway=gateway,
        gateway_by=gateway_by,
        user_namespaces=namespaces,
        kernel=release,
        processes=processes,
        calls=_unfiltered(namespaces),
    )


def cached(scratch: str | os.PathLike[str], apptainer: str | None = None) -> Site:
    """Returns the cached result of :func:`probe`. The probe runs once per node and boot."""
    apptainer = apptainer or find_apptainer()
    cache = Path(scratch) / CACHE
    stamp = _stamp(apptainer)
    try:
        kept = json.loads(cache.read_text())
        if kept["stamp"] == stamp:
            return Site(**kept["site"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, incomplete, or from another boot or version
    site = probe(scratch, apptainer)
    write_atomic(cache, json.dumps({"stamp": stamp, "site": asdict(site)}))
    return site


def require(networks: Iterable[str], scratch: str | os.PathLike[str], provided: bool = False) -> None:
    """Checks that a campaign's sandboxes can start at this site, before anything is queued.

    Args:
        provided: True if Apptainer may be missing on this machine, because the jobs' ``setup`` provides it.

    Raises:
        SiteError: A sandbox cannot start. The message gives the network, the reason and the remedy.
    """
    try:
        apptainer = find_apptainer()
    except SiteError as error:
        if provided:
            return
        raise SiteError(f"{error}, or write slurm.check: false if only the nodes of the jobs have it") from None
    wanted = sorted(set(networks))
    site = cached(scratch, apptainer)
    if any(site.refuses(network) for network in wanted):  # the site may have followed the remedy since
        (Path(scratch) / CACHE).unlink(missing_ok=True)
        site = cached(scratch, apptainer)
    for network in wanted:
        if reason := site.refuses(network):
            others = [name for name in ("gateway", "none", "host") if not site.refuses(name)]
            remedy = f"use environment.network {' or '.join(others)}" if others else "ask the site"
            raise SiteError(
                f"network {network!r} of a sandbox is unavailable on {node_name()}: {reason}; {remedy}, or write "
                "slurm.check: false if the nodes of the jobs can do more than this one (megaflow-hpc doctor)"
            )


def _stamp(apptainer: str) -> list[object]:
    try:
        boot = boot_id()
    except OSError:
        boot = ""
    return [FORMAT, boot, apptainer, os.stat(apptainer).st_mtime_ns, os.access("/dev/fuse", os.R_OK | os.W_OK)]


def is_setuid(apptainer: str) -> bool:
    """Returns whether this Apptainer has a starter with the setuid bit (``apptainer buildcfg`` names its directory)."""
    try:
        done = subprocess.run(
            [apptainer, "buildcfg"],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    settings = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    for base in (settings.get("LIBEXECDIR"), settings.get("PREFIX")):
        for name in ("apptainer", "singularity"):
            starter = Path(base or "/nowhere", name, "bin", "starter-suid")
            try:
                status = starter.stat()
            except OSError:
                continue
            if status.st_mode & stat.S_ISUID and status.st_uid == 0:
                return True
    return False


def _unfiltered(namespaces: str) -> str:
    """Returns the reason why system calls of sandboxes are not filtered, or an empty string if they are."""
    if namespaces:
        return f"no user namespaces, without which a filter would break setuid Apptainer: {namespaces}"
    if launcher(filtered=True).holds_filter():
        return ""
    return f"the kernel supports no filter, or its system calls are unknown for {os.uname().machine}"


# --- containers of the probe ----------------------------------------------------------------------------------------


def _try_containers(apptainer: str, where: str) -> tuple[str, str, str, str]:
    """Tests a container, an overlay on scratch, a copy of the image and a private network. Returns the reason why each
    of them fails."""
    root = Path(where, "root")
    binds = _host_image(root)
    control = Path(where, "control")
    control.mkdir()

    def start(writes: Literal["overlay", "copy", ""], network: Literal["none", "host"]) -> str:
        layer = Path(where, f"layer-{writes}-{network}")
        layer.mkdir()
        spec = SandboxSpec(str(root), binds=tuple(binds), network=network)
        argv = exec_argv(
            apptainer,
            spec,
            str(root),
            overlay=str(layer) if writes == "overlay" else None,
            control=str(control),
            command=["/bin/sh", "-c", "echo x > /probe" if writes else ":"],
        )
        if not writes:
            argv.remove("--writable")
        prefix = namespace_root(spec)
        return launcher(filtered=bool(prefix)).call(lambda: _failure_of([*prefix, *argv], where))

    if not start("overlay", "none"):
        return "", "", "", ""
    container = start("", "host")
    if container:
        return container, container, container, container
    overlay = start("overlay", "host")
    return "", overlay, overlay and start("copy", "host"), start("", "none")


def _host_image(root: Path) -> list[str]:
    """Creates an image of empty directories. Returns the binds that add the host's programs to it."""
    for name in ("dev", "proc", "sys", "tmp", "etc", "root", ".megaflow"):
        (root / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    binds = []
    for name in ("usr", "bin", "lib", "lib64", "lib32"):
        host = Path("/", name)
        if host.is_symlink():
            (root / name).symlink_to(os.readlink(host))
        elif host.is_dir():
            (root / name).mkdir()
            binds.append(f"{host}:{host}:ro")
    return binds


def _failure_of(argv: Sequence[str], temporary: str | None = None) -> str:
    """Returns the reason why a program failed, or an empty string if it succeeded."""
    try:
        done = subprocess.run(
            argv,
            env=clean_environment(temporary),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_S,
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else explained(done.stderr + done.stdout)
