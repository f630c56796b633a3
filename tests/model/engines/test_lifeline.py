"""A killed engine leaves no processes and no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from megaflow_hpc.host.process import Identity, children
from tests.support.torch_ranks import engine_python
from tests.support.waiting import until

ENGINE = """\
import mmap, os, sys, time
for path in sys.argv[1:]:
    with open(path, "w+b") as file:
        file.truncate(4096)
        kept = mmap.mmap(file.fileno(), 4096)
        globals()[path] = kept
print(os.getpid(), flush=True)
time.sleep(600)
"""


EARLY = """\
import os, signal, subprocess, sys
from megaflow_hpc.model.engines import lifeline
class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, stdout=subprocess.PIPE, **options)
        self.stdout.readline()  # the engine has mapped its files
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
os._exit(lifeline.main(sys.argv[1:]))
"""
"""A lifeline that is signalled before it has polled."""


def naps(pid: int) -> int:
    """Number of times a process has gone to sleep. One more means that it has handled what woke it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.parametrize("how", ["the server ends", "SIGTERM to the lifeline", "SIGKILL to the engine"])
def test_shared_memory_of_a_killed_engine_is_given_back(how: str, tmp_path: Path) -> None:
    names = [Path(f"/dev/shm/{kind}{uuid.uuid4().hex[:12]}") for kind in ("psm_", "sem.mp-", "other_")]
    stranger = Path(f"/dev/shm/psm_{uuid.uuid4().hex[:12]}")
    stranger.touch()
    command = [sys.executable, "-c", ENGINE, *map(str, names)]
    lifeline = subprocess.Popen(
        [sys.executable, "-m", "megaflow_hpc.model.engines.lifeline", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert lifeline.stdin is not None
    assert lifeline.stdout is not None
    try:
        engine = int(lifeline.stdout.readline())
        assert all(name.exists() for name in names)
        if how == "SIGKILL to the engine":  # a killed process has no mappings, so the lifeline must have polled before
            before = naps(lifeline.pid)
            lifeline.send_signal(signal.SIGCHLD)
            while naps(lifeline.pid) == before:
                time.sleep(0.01)
            os.kill(engine, signal.SIGKILL)
        elif how == "the server ends":
            lifeline.stdin.close()
        else:
            lifeline.terminate()
        lifeline.wait(30)
        assert [name.exists() for name in (*names, stranger)] == [False, False, True, True]
    finally:
        lifeline.kill()
        lifeline.wait()
        for name in (*names, stranger):
            name.unlink(missing_ok=True)


FAMILY = """\
import os, subprocess, sys, time
import setproctitle
setproctitle.setproctitle("VLLM::EngineCore")
if len(sys.argv) > 2:
    command = [sys.executable, __file__, sys.argv[1], *sys.argv[3:]]
    subprocess.Popen(command, start_new_session=sys.argv[2] == "apart")
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
"""An engine whose children, as vLLM's EngineCore, notice neither their parent's end nor that of their input. All rename
themselves, as vLLM's processes do."""


def test_no_process_of_an_engine_survives_a_sigkill_of_everything_above_it(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    lines = tmp_path / "pids"
    engine = [str(engine_python()), str(tmp_path / "family.py"), str(lines), "apart", "together"]
    server = (
        "import subprocess, sys; "
        "one = subprocess.Popen([sys.executable, '-m', 'megaflow_hpc.model.engines.lifeline', *sys.argv[1:]], "
        "stdin=subprocess.PIPE, start_new_session=True); print(one.pid, flush=True); one.wait()"
    )
    above = subprocess.Popen([sys.executable, "-c", server, *engine], stdout=subprocess.PIPE, text=True)
    assert above.stdout is not None
    lifeline = Identity.of(int(above.stdout.readline()))
    assert lifeline is not None
    until(lambda: lines.exists() and len(lines.read_text().split()) == 3, "three processes of the engine")
    family = [Identity.of(int(pid)) for pid in lines.read_text().split()]
    below = [*family, *map(Identity.of, children(lifeline.pid))]
    above.send_signal(signal.SIGSTOP)  # nothing above the engine has time to stop it
    lifeline.kill()
    above.kill()
    above.wait()
    try:
        until(lambda: not [one for one in below if one and one.alive()], "the engine and its guardian have ended", 20)
    finally:
        for one in below:
            if one:
                one.kill()


def test_shared_memory_is_given_back_if_the_signal_comes_before_the_first_poll() -> None:
    name = Path(f"/dev/shm/psm_{uuid.uuid4().hex[:12]}")
    command = [sys.executable, "-c", EARLY, sys.executable, "-c", ENGINE, str(name)]
    try:
        done = subprocess.run(command, stdin=subprocess.PIPE, timeout=60, check=False)
        assert done.returncode == 128 + signal.SIGTERM
        assert not name.exists()
    finally:
        name.unlink(missing_ok=True)
