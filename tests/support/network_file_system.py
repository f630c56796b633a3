"""A directory that several hosts share: on GlusterFS if it is installed, else the same directory for all."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.support.host_namespaces import Host
from tests.support.waiting import until

PORT = 24007
SERVER = """\
volume posix
  type storage/posix
  option directory {brick}
end-volume
volume locks
  type features/locks
  subvolumes posix
end-volume
volume threads
  type performance/io-threads
  subvolumes locks
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.listen-port {port}
  option auth.addr.threads.allow *
  subvolumes threads
end-volume
"""
CLIENT = """\
volume shared
  type protocol/client
  option transport-type tcp
  option remote-host {address}
  option remote-port {port}
  option remote-subvolume threads
  option ping-timeout 10
end-volume
"""


class Shared:
    """A directory shared by all hosts."""

    def __init__(self, folder: Path, hosts: dict[str, Host]) -> None:
        self.path, self._folder, self._hosts = folder / "shared", folder, hosts
        self.path.mkdir()
        self.path.chmod(0o1777)
        self.kind = "a directory that all hosts see"
        self._server: subprocess.Popen[bytes] | None = None
        if shutil.which("glusterfsd"):
            self.kind = "GlusterFS, served by login"
            self._serve()
        for name in hosts:
            self.mount(name)

    def _serve(self) -> None:
        brick, login = self._folder / "brick", self._hosts["login"]
        brick.mkdir()
        brick.chmod(0o1777)
        (self._folder / "server.vol").write_text(SERVER.format(brick=brick, port=PORT))
        (self._folder / "client.vol").write_text(CLIENT.format(address=login.address, port=PORT))
        words = ["glusterfsd", "--no-daemon"]
        for option, name in (("-f", "server.vol"), ("-l", "server.log"), ("-p", "server.pid")):
            words += [option, str(self._folder / name)]
        self._server = subprocess.Popen([*login.within, *words], stdin=subprocess.DEVNULL)
        until(lambda: self._listens(login), "GlusterFS is served", 20)

    def _listens(self, login: Host) -> bool:
        words = [*login.within, "bash", "-c", f"</dev/tcp/{login.address}/{PORT}"]
        return subprocess.run(words, capture_output=True).returncode == 0

    def mount(self, name: str) -> None:
        """Mount the directory on a host that was switched on."""
        if self._server:
            self._hosts[name].run(f"glusterfs -f {self._folder}/client.vol -l {self._folder}/{name}.log {self.path}")
            self._hosts[name].run(f"stat -f -c %T {self.path} | grep -q fuse")
