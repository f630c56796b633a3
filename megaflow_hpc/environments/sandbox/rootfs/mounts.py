"""One mounted image for all sandboxes of a job on a node, without rights: squashfs by FUSE in a namespace of its own.

::

    SCRATCH/mounts/<job>-<key>/   one image of one job
      guard       locked while the mount is made, joined or ended
      lock        held shared by every process that uses the mount
      holder      identity of squashfuse_ll, which lives in its own user and mount namespace
      root/       the mount point, seen in that namespace only

In the holder's user namespace the caller is root, so the image's files, owned by uid 0 in the squashfs, belong to the
caller as in an unpacked image: a sandbox can own what it finds. Sandboxes enter the two namespaces and put a kernel
overlay over the mount. ``fusermount`` is not needed.

Who uses a mount holds a directory of it open, and squashfuse_ll ends by itself a minute after the last was closed: the
kernel counts for us, whoever is killed. A job's processes end with the job, holders too; so no mount is shared between
jobs, but the pages of the image that were read are, by the kernel's page cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megaflow_hpc.environments.sandbox.argv import namespace_root, namespace_user
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import clean_environment
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.locks import lock_descriptor, lock_file
from megaflow_hpc.host.process import Identity

IDLE_S = 60
"""A mount that nobody uses ends after this."""
READY_S = 30.0


class Mounted:
    """A mount in use by this process, until :meth:`release` or its end."""

    def __init__(self, holder: Identity, root: str, descriptors: tuple[int, ...]) -> None:
        self.holder = holder
        self.root = root
        """Where the image's files are, in the holder's mount namespace."""
        self._descriptors = descriptors

    @property
    def path(self) -> str:
        """The same place as seen from outside."""
        return f"/proc/{self.holder.pid}/root{self.root}"

    def alive(self) -> bool:
        """Whether the mount still answers."""
        try:
            os.listdir(self.path)
        except OSError:
            return False
        return self.holder.alive()

    def argv_prefix(self, layers: Sequence[str], layer: str, merged: str, spec: SandboxSpec) -> list[str]:
        """Returns the argv prefix of a container's command line: into the namespaces, and there an overlay at
        ``merged``.

        Args:
            layers: directories that lie over the mount, the topmost first.
            layer: directory of the writable layer; ``upper`` and ``work`` are made in it.
            merged: an empty directory to mount on; the mount is seen by the container alone.
            spec: says who to be from there on.
        """
        if overlay.odd(layer, merged):
            raise SandboxError(f"{layer}: a sandbox takes no path with ',', ':' or '\\'; set MEGAFLOW_SCRATCH")
        overlay.prepare([*layers, self.path], layer, merged)
        words = ["nsenter", "--preserve-credentials", "-U", "-m", "-t", str(self.holder.pid), "--"]
        words += ["unshare", "--mount", "--propagation", "private", "--"]
        words += ["/bin/sh", "-c", f'{overlay.MOUNT}exec "$@"', "sh"]
        words += overlay.arguments([*layers, self.root], layer, merged)
        # A user namespace of the sandbox's own, also for its root: the kernel bounds processes by namespace.
        return [*words, *namespace_root(spec), *namespace_user(spec)]

    def release(self) -> None:
        """Ends the use. Idempotent."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()


def mount(sif: str, offset: int, key: str, scratch: str | os.PathLike[str]) -> Mounted:
    """Mounts the squashfs at ``offset`` of ``sif``, or joins the mount that there is. Blocks while it comes up.

    Args:
        key: names the image's contents.

    Raises:
        SandboxError: with squashfuse's own reason.
    """
    job = os.environ.get("SLURM_JOB_ID", "0")
    home = Path(scratch, "mounts", f"{job}-{key}")
    with _locked(home) as lock:
        holder = _holder(home)
        if holder is None or not _answers(holder, home):
            if holder is not None:
                holder.kill()
            holder = _start(sif, offset, home)
        opened = os.open(_outside(holder, home), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        kept = os.dup(lock)
        os.set_inheritable(kept, False)
        lock_descriptor(kept, shared=True)
    return Mounted(holder, str(home / "root"), (opened, kept))


@contextmanager
def _locked(home: Path) -> Iterator[int]:
    """The lock of a mount's directory, exclusively: made anew should the directory be swept away meanwhile."""
    while True:
        (home / "root").mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            descriptor = lock_file(home / "guard")
            break
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield lock
    finally:
        os.close(lock)
        os.close(descriptor)


def _start(sif: str, offset: int, home: Path) -> Identity:
    tools = {name: shutil.which(name) for name in ("unshare", "squashfuse_ll")}
    for name, found in tools.items():
        if found is None:
            raise SandboxError(f"{sif}: cannot be mounted: {name} is not on PATH")
    argv = [str(tools["unshare"]), "--user", "--map-root-user", "--mount", "--propagation", "private", "--"]
    argv += [str(tools["squashfuse_ll"]), "-f", "-o", f"offset={offset},timeout={IDLE_S}"]
    with open(home / "log", "wb") as log:
        process = subprocess.Popen(
            [*argv, os.path.realpath(sif), str(home / "root")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=clean_environment(),
            cwd="/",
            start_new_session=True,
        )
    holder = Identity.of(process.pid)
    deadline = time.monotonic() + READY_S
    while holder is not None and process.poll() is None:
        if _answers(holder, home):
            (home / "holder").write_text(f"{holder}\n")
            _reap(process)
            return holder
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            break
        time.sleep(0.005)
    said = (home / "log").read_text(errors="replace").strip().splitlines()[-1:] or [f"no answer in {READY_S:g} s"]
    raise SandboxError(f"{sif}: cannot be mounted: {said[0]}")


def _reap(process: subprocess.Popen[bytes]) -> None:
    """The holder outlives this call by far; its end must leave no zombie."""
    threading.Thread(target=process.wait, name="image mount", daemon=True).start()


def _holder(home: Path) -> Identity | None:
    try:
        found = Identity.parse((home / "holder").read_text(errors="replace").strip())
    except OSError:
        return None
    return found if found is not None and found.alive() else None


def _outside(holder: Identity, home: Path) -> str:
    return f"/proc/{holder.pid}/root{home}/root"


def _answers(holder: Identity, home: Path) -> bool:
    """Whether the holder's mount is there (its mount point is another file system) and can be read."""
    try:
        place = _outside(holder, home)
        return os.stat(place).st_dev != os.stat(home).st_dev and bool(os.listdir(place))
    except OSError:
        return False


def sweep_mounts(scratch: str | os.PathLike[str]) -> int:
    """Ends the mounts that no process uses and removes their directories; returns how many."""
    ended = 0
    try:
        homes = [
            Path(entry.path) for entry in os.scandir(Path(scratch, "mounts")) if entry.is_dir(follow_symlinks=False)
        ]
    except OSError:
        return 0
    for home in homes:
        with suppress(OSError), _locked(home) as lock:
            lock_descriptor(lock, timeout_s=0)
            holder = _holder(home)
            if holder is not None:
                holder.kill()
                while holder.alive():
                    time.sleep(0.002)
            remove_tree(home)
            ended += 1
    return ended
