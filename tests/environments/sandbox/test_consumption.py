"""Resources used by a sandbox over all its containers, compared with what its commands measure themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from megaflow_hpc.environments import ApptainerSandbox
from megaflow_hpc.environments.sandbox.limits import usage
from megaflow_hpc.environments.sandbox.limits.usage import MemoryPeak
from tests.support.sandboxes import Start
from tests.support.waiting import until_async

BURN = """
import json, resource, sys, time
held, until = b'x' * int(sys.argv[1]), float(sys.argv[2])
while time.process_time() < until: pass
print(json.dumps([time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6]))
"""


async def burn(sandbox: ApptainerSandbox, size: int, cpu_s: float) -> tuple[float, float]:
    """Returns CPU seconds and peak resident MB of a command, as measured by itself."""
    done = await sandbox.exec(["python3", "-c", BURN, str(size), str(cpu_s)], timeout_s=120)
    assert done.exit_code == 0, done.stderr
    used, held = json.loads(done.stdout)
    return used, held


@pytest.mark.parametrize("limits", [{}, {"memory_mb": 2000, "disk_mb": 2000, "cpu_s": 100}], ids=["free", "limited"])
async def test_cpu_time_and_the_most_memory_are_those_of_its_commands(start: Start, limits: dict[str, int]) -> None:
    sandbox = await start(**limits)
    used, held = await burn(sandbox, 100_000_000, 1.2)
    found = sandbox.consumption()
    assert used - 0.05 <= found.cpu_s <= used + 1
    assert 100 <= found.memory_peak_mb <= held + 30


async def test_what_short_commands_of_several_containers_used_is_added_up(start: Start) -> None:
    """Each ends before the watchdog looks again. The count of a limit restarts with each container."""
    sandbox = await start(cpu_s=100)
    used = [(await burn(sandbox, 1000, 0.25))[0]]
    await sandbox.kill_processes()
    used.append((await burn(sandbox, 1000, 0.25))[0])
    before = sandbox.consumption().cpu_s
    assert before >= sum(used) - 0.05
    assert (await sandbox.exec("kill -9 -1; sleep 60")).exit_code == 137
    used.append((await burn(sandbox, 1000, 0.25))[0])
    assert sum(used) - 0.1 <= sandbox.consumption().cpu_s <= sum(used) + 2


async def test_written_bytes_are_measured_only_with_a_limit(start: Start) -> None:
    limited, free = await start(disk_mb=1000), await start()
    for sandbox in (limited, free):
        await sandbox.exec("head -c 20000000 /dev/urandom > /var/big")

    def measured() -> bool:
        limited._watch.poke()
        return (limited.consumption().disk_peak_mb or 0) >= 20

    await until_async(measured, "the file is measured")
    await limited.exec("rm /var/big")
    await start.close()
    assert 20 <= (limited.consumption().disk_peak_mb or 0) <= 60
    assert free.consumption().disk_peak_mb is None


def test_memory_is_measured_exactly_only_where_it_may_be_a_new_peak() -> None:
    measured: list[int] = []

    def holds(size: int) -> Callable[[], int]:
        def exact() -> int:
            measured.append(size)
            return size

        return exact

    peak = MemoryPeak()
    for bound, held in ((500, 300), (50_000_000, 30_000_000), (50_100_000, 30_100_000), (30_000_000, 29_000_000)):
        peak.add(bound, holds(held))
    assert (measured, peak.bytes) == ([30_000_000], 30_000_000)
    peak.add(80_000_000, holds(20_000_000))  # shared pages raise the upper bound
    peak.add(60_000_000, holds(55_000_000))
    assert (measured[1:], peak.bytes) == ([20_000_000, 55_000_000], 55_000_000)


def test_descriptors_are_counted_while_measuring_them_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring 130,000 descriptors on a busy node took seconds, so the next measurement was due after minutes."""
    descriptors, sample = usage.Descriptors(), usage.UsageSample(pids=[os.getpid()], cpu_s=1.0)
    monkeypatch.setattr(usage, "MAX_SHARE_OF_TIME", 1e-9)
    descriptors.poll(os.getpid(), sample, 100.0, urgent=False)
    before = descriptors.held.count
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
    sample.cpu_s = 2.0
    descriptors.poll(os.getpid(), sample, 101.0, urgent=False)
    assert descriptors.held.count == before, "not yet"
    descriptors.poll(os.getpid(), sample, 105.0, urgent=False)
    for descriptor in opened:
        os.close(descriptor)
    assert descriptors.held.count >= before + 50
