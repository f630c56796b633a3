"""Program that runs in a template container and creates sandboxes with ``clone``, each in its own namespaces.

The helper Python (``helper_python.py``) runs this file in the template, so the file imports no other module of this
package. Standard input is a socket to the host. A request consists of fields separated by zero bytes, with four
descriptors: the sandbox's standard input, output and error, and a pipe. One byte on the pipe signals that the limits
are set. The reply is the request's number and a pidfd.

A sandbox gets the mounts, flags, capabilities and environment that Apptainer gives a container. The files of the image
and its layers are untrusted. Paths below its root are therefore resolved inside that root (openat2), before any of its
programs run. The template's own tree is unmounted before the first program starts.
"""

import _signal  # type: ignore[import-not-found]  # ``signal`` imports modules that are missing here
import _socket
import ctypes
import fcntl
import os
import sys

_X86 = os.uname().machine == "x86_64"
_CLONE, _PIVOT_ROOT, _CAPSET = (56, 155, 126) if _X86 else (220, 41, 91)
_CLOSE_RANGE, _OPENAT2 = 436, 437
_PIDFD = 0x1000
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_NO_MAGICLINKS, _IN_ROOT = 2, 16
_PDEATHSIG, _CAPBSET_DROP, _CAP_AMBIENT, _AMBIENT_RAISE = 1, 24, 47, 2
_CAPABILITY_VERSION = 0x20080522
_SIOCSIFFLAGS, _UP_AND_RUNNING = 0x8914, 0x41

_DEVICES = ("null", "zero", "random", "urandom", "tty")
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "/dev/pts/ptmx",
}
_FILE_SYSTEMS = (
    ("shm", "tmpfs", _NOSUID | _NODEV, "mode=1777"),
    ("mqueue", "mqueue", _NOSUID | _NODEV, None),
    ("pts", "devpts", _NOSUID | _NOEXEC, "newinstance,ptmxmode=0666,mode=0620"),
)

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    text = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    done = _libc.mount(text[0], text[1], text[2], ctypes.c_ulong(flags), text[3])
    _checked(done, f"mount of {kind or source or 'flags'}")


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _PathInRoot:
    """Context manager that opens a path below ``root`` and yields its ``/proc`` path. Symlinks cannot lead outside
    ``root``."""

    def __init__(self, root: int, path: str) -> None:
        how = _How(os.O_PATH | os.O_CLOEXEC, 0, _IN_ROOT | _NO_MAGICLINKS)
        name = os.fsencode(path.lstrip("/") or ".")
        self._descriptor = _checked(_libc.syscall(_OPENAT2, root, name, ctypes.byref(how), ctypes.sizeof(how)), path)

    def __enter__(self) -> str:
        return f"/proc/self/fd/{self._descriptor}"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _bind(root: int, source: str, target: str, flags: int = 0, *, deep: bool = False) -> None:
    with _PathInRoot(root, target) as path:
        _mount(source, path, None, _BIND | (_REC if deep else 0))
    if flags:
        with _PathInRoot(root, target) as path:
            _mount(None, path, None, _BIND | _REMOUNT | flags)


def _mount_all(root: int, binds: list[str]) -> None:
    """Mounts a container's file systems other than its root."""
    with _PathInRoot(root, "dev") as path:
        _mount("tmpfs", path, "tmpfs", _NOSUID, "mode=755")
    with _PathInRoot(root, "dev") as path:
        for name in _DEVICES:
            os.close(os.open(f"{path}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            _mount(f"/dev/{name}", f"{path}/{name}", None, _BIND)
        for name, target in _LINKS.items():
            os.symlink(target, f"{path}/{name}")
        for name, kind, flags, options in _FILE_SYSTEMS:
            os.mkdir(f"{path}/{name}")
            _mount(kind, f"{path}/{name}", kind, flags, options)
    with _PathInRoot(root, "proc") as path:
        _mount("proc", path, "proc", _NOSUID | _NODEV)
    _bind(root, "/sys", "sys", deep=True)
    try:
        _bind(root, "/etc/resolv.conf", "etc/resolv.conf")
    except OSError:
        pass  # the image or the node has no such file
    for entry in binds:
        source, _, rest = entry.partition(":")
        target, _, mode = rest.partition(":")
        _bind(root, source, target or source, _NOSUID | _NODEV | (_RDONLY if mode == "ro" else 0))


def _enter(directory: str, options: str, merged: str, network: str, limits: str, binds: list[str]) -> None:
    """Makes this process root of its new namespaces, and the overlay its root directory."""
    for name, text in (("setgroups", "deny"), ("uid_map", "0 0 1"), ("gid_map", "0 0 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _mount(None, "/", None, _REC | _PRIVATE)
    if os.listdir("/host-shm"):  # the scratch directory is in memory
        _mount("/host-shm", "/dev/shm", None, _BIND)
    os.chdir(directory)
    _mount("overlay", merged, "overlay", _NOSUID | _NODEV, options)
    root = os.open(merged, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    _mount_all(root, binds)
    os.fchdir(root)
    _checked(_libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the template's root")
    os.chdir("/")
    for limit in limits.split(" "):
        name, _, number = limit.partition("=")
        with open(f"/proc/sys/user/{name}", "w") as file:
            file.write(number)
    if network != "host":
        any_socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
        request = b"lo".ljust(16, b"\0") + _UP_AND_RUNNING.to_bytes(2, sys.byteorder) + bytes(22)
        fcntl.ioctl(any_socket.fileno(), _SIOCSIFFLAGS, request)


def _keep(capabilities: list[int]) -> None:
    """Permanently drops all capabilities except ``capabilities``."""
    for number in range(64):
        if number not in capabilities and _libc.prctl(_CAPBSET_DROP, number, 0, 0, 0):
            break  # the kernel does not have this capability
    mask = sum(1 << number for number in capabilities)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    _checked(_libc.syscall(_CAPSET, header, data), "capset")
    for number in capabilities:
        _checked(_libc.prctl(_CAP_AMBIENT, _AMBIENT_RAISE, number, 0, 0), "ambient capability")


def _become(fields: list[str], given: list[int]) -> None:
    """Turns the new process into the runner. Never returns. Writes errors to standard error."""
    try:
        _libc.prctl(_PDEATHSIG, int(_signal.SIGKILL), 0, 0, 0)
        os.setsid()
        if os.read(given[3], 1):
            for number in range(3):
                os.dup2(given[number], number)
            network, directory, options, merged, capabilities, limits, words, count, *rest = fields
            _enter(directory, options, merged, network, limits, rest[: int(count)])
            _keep([int(number) for number in capabilities.split(",")])
            for name in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGCHLD):
                _signal.signal(name, _signal.SIG_DFL)
            os.umask(0o022)
            _checked(_libc.syscall(_CLOSE_RANGE, 3, 0xFFFFFFFF, 0), "close_range")
            argv = words.split(" ")
            os.execve(argv[0], argv, dict(entry.split("=", 1) for entry in rest[int(count) :]))
    except BaseException as error:
        os.write(2, f"FATAL: {error}\n".encode("utf-8", "surrogateescape"))
    finally:
        os._exit(1)


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main() -> None:
    """Serves requests until the host closes the socket."""
    host = _socket.socket(fileno=os.dup(0))
    _signal.signal(_signal.SIGCHLD, _reap)
    host.sendmsg([b"ready"])
    while True:
        data, ancillary, _, _ = host.recvmsg(65536, _socket.CMSG_SPACE(16))
        if not data:
            return
        packed = b"".join(part for _, _, part in ancillary)
        given = [int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
        number, *fields = os.fsdecode(data).split("\0")
        own = _NEWNS | _NEWIPC | _NEWUSER | _NEWPID | (0 if fields[0] == "host" else _NEWNET)
        pidfd = ctypes.c_int(-1)  # opened here because the process may exit and be reaped before a later call
        pid = _libc.syscall(_CLONE, own | _PIDFD | int(_signal.SIGCHLD), 0, ctypes.byref(pidfd), 0, 0)
        if pid == 0:
            _become(fields, given)
        answer = number if pid > 0 else f"{number}\0{os.strerror(ctypes.get_errno())}"
        passed = []
        if pid > 0:
            passed = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, pidfd.value.to_bytes(4, sys.byteorder))]
            given.append(pidfd.value)
        host.sendmsg([answer.encode()], passed)
        for descriptor in given:
            os.close(descriptor)


if __name__ == "__main__":
    main()
