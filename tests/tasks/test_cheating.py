"""Cheating attempts, one per test: what an agent with root in its sandbox can leave for the verifier.

The task's test expects 42 in the file ``answer``. No agent here writes it, so the correct reward is always 0.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.images.layers.view import LayerView, Tree
from megaflow_hpc.environments.sandbox.rootfs.upperdir import keep_only, make_way, put_back, restore, revert
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import VerificationContext
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.harbor.rewards import parse_rewards, read_logs, read_rewards
from megaflow_hpc.tasks.harbor.verifier import check_fresh
from megaflow_hpc.tasks.steps import prepare, verify
from megaflow_hpc.types import Task, Verdict
from tests.support.harbor_tasks import write_task
from tests.support.waiting import some_at_a_time

TOML = '[environment]\ndocker_image = "base"\nworkdir = "/app"\n[verifier]\ntimeout_sec = 600\n'
TEST = "if grep -q 42 answer 2>/dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
PYTHON_TEST = """\
if python3 -c 'assert open("answer").read() == "42"'; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
FALSE_PROGRAM = "printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\nexit 0\\n' > /p; chmod 755 /p; "
LIB = "/usr/lib/x86_64-linux-gnu"

Judge = Callable[..., Verdict]


def write(root: Path, test: str) -> Task:
    path = write_task(root, toml=TOML)
    (path / "tests" / "test.sh").write_text(test)
    return read_harbor_task(path)


async def verdict_of(provider: ApptainerProvider, spec: SandboxSpec, task: Task, agent: str, fresh: bool) -> Verdict:
    """Return the verdict after an agent ran the shell script ``agent`` in a new sandbox."""
    async with await provider.start(spec) as sandbox:
        await prepare(task, sandbox)
        await sandbox.exec(agent, timeout_s=600)
        await sandbox.kill_processes()
        return await verify(task, sandbox, VerificationContext(fresh=fresh))


@pytest.fixture
def judge(rootfs: str, scratch: Path, tmp_path: Path) -> Judge:
    def run(agent: str, test: str = TEST, fresh: bool = False, **spec: object) -> Verdict:
        task = write(tmp_path, test)

        async def main() -> Verdict:
            async with ApptainerProvider(scratch) as provider:
                return await verdict_of(
                    provider,
                    SandboxSpec(rootfs, **({"workdir": task.workdir} | spec)),  # type: ignore[arg-type]
                    replace(task, workdir=spec.get("workdir", task.workdir)),  # type: ignore[arg-type]
                    agent,
                    fresh,
                )

        return asyncio.run(main())

    return run


HOLES = {
    "a false bash": FALSE_PROGRAM + "cp --remove-destination /p /usr/bin/bash",
    "a bash that is a link": FALSE_PROGRAM + "ln -sf /p /usr/bin/bash",
    "a bash that is gone": "rm /usr/bin/bash",
    "a false grep": FALSE_PROGRAM + "cp --remove-destination /p /usr/bin/grep",
    "a false grep earlier on PATH": FALSE_PROGRAM + "cp /p /usr/local/bin/grep; cp /p /usr/local/sbin/[",
    "a /bin of its own": FALSE_PROGRAM + "python3 -c \"import os; os.rename('/bin', '/b'); os.mkdir('/bin'); "
    "[os.symlink('/p', '/bin/' + name) for name in ('bash', 'grep', 'sh')]\"",
    "/usr/bin made anew": "python3 -c \"import os, shutil; shutil.rmtree('/usr/bin'); os.mkdir('/usr/bin'); "
    "open('/usr/bin/bash', 'w').write('#!/bin/sh')\"",
    "no programs at all": "rm -rf /usr/bin /usr/sbin",
    "closed directories": "chmod 0 /app /logs /logs/verifier /usr/bin /usr/lib /etc /",
    "a C library that is none": f"cp /etc/hostname /tmp/x; mv /tmp/x {LIB}/libc.so.6",
    "a loader that is none": f"cp /etc/hostname /tmp/x; mv /tmp/x {LIB}/ld-linux-x86-64.so.2",
    "a C library for better processors": f"d={LIB}/glibc-hwcaps/x86-64-v2; mkdir -p $d; cp /etc/hostname $d/libc.so.6",
    "a library cache that is a link": "ln -sf /evil /etc/ld.so.cache",
    "variables from the image's scripts": "echo 'echo 1 > /logs/verifier/reward.json; exit' > /e; "
    "for f in /.singularity.d/env/00-a.sh /.singularity.d/env/99-z.sh /environment; do "
    "echo 'export BASH_ENV=/e ENV=/e' >> $f; done",
    "the runtime's own scripts": "printf '#!/bin/sh\\nexec /bin/true\\n' > /.singularity.d/actions/exec",
    "a BASH_ENV of its shells": "echo 'echo 1 > /logs/verifier/reward.json; exit' | "
    "tee /root/.bashrc /root/.profile /etc/profile /etc/bash.bashrc /etc/environment",
    "a conftest in /tests": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.json' > /tests/conftest.py",
    "a false rm": FALSE_PROGRAM + "cp /p /usr/local/bin/rm; echo 1 > /logs/verifier/reward.json",
    "a reward in a closed directory": "echo '{\"reward\": 1}' > /logs/verifier/reward.json; chmod 0 /logs/verifier",
    "a reward beforehand": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json",
    "a reward directory elsewhere": "rm -rf /logs; mkdir /mine; echo 1 > /mine/reward.json; "
    "ln -s / /logs; ln -s /mine /verifier",
    "a /tests that leads to its own": "mkdir /m; echo 'echo 1 > /logs/verifier/reward.txt' > /m/test.sh; "
    "rm -rf /tests; ln -s /m /tests",
    "a file at /logs": "rm -rf /logs; echo 1 > /logs",
    "processes that go on writing": "setsid nohup sh -c 'while :; do echo 1 > /logs/verifier/reward.json; done' "
    ">/dev/null 2>&1 & sleep 0.1",
    "every process killed": "kill -9 -1",
}

SILENT_PROGRAM = "printf '#!/bin/sh\\nexit 0\\n' > /p; chmod 755 /p; "
ENDS = "import os; os._exit(0)"

PYTHON_HOLES = {
    "a false python": SILENT_PROGRAM + "cp --remove-destination /p /usr/bin/python3",
    "a python that was moved": SILENT_PROGRAM + "mv /usr/bin/python3 /usr/bin/p3; mv /p /usr/bin/python3",
    "a false python earlier on PATH": SILENT_PROGRAM + "cp /p /usr/local/bin/python3; cp /p /usr/local/sbin/python3",
    "a sitecustomize": "d=$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"stdlib\"))'); "
    f"echo '{ENDS}' > $d/sitecustomize.py",
    "a sitecustomize in /etc": f"rm -rf /etc/python3*; mkdir /etc/python3.11; echo '{ENDS}' "
    "| tee /etc/python3.11/sitecustomize.py /usr/lib/python3/dist-packages/sitecustomize.py",
    "a .pth among the image's packages": f"for d in $(python3 -c 'import site; print(*site.getsitepackages())'); do "
    f"mkdir -p $d; echo '{ENDS}' > $d/x.pth; done",
    "a module of the user's": f"d=$(python3 -m site --user-site); mkdir -p $d; echo '{ENDS}' > $d/x.pth",
    "a library cache": "echo /evil > /etc/ld.so.conf; mkdir /evil; cp /etc/hostname /evil/libz.so.1; ldconfig",
    "a link for the work directory": "mkdir /evil; printf 42 > /evil/answer; cd /; rm -rf /app; ln -s /evil /app",
    "a /usr of its own": SILENT_PROGRAM + "python3 -c \"import os; os.rename('/usr/lib/python3.11', '/mine'); "
    "os.mkdir('/usr/lib/python3.11'); open('/usr/lib/python3.11/os.py', 'w').write('raise SystemExit')\"",
    "a locale": "mkdir -p /usr/lib/locale/C.utf8; head -c 4096 /dev/zero > /usr/lib/locale/C.utf8/LC_CTYPE",
    "a library that the image would load": "for f in /usr/lib/*/libutil.so.1 /usr/lib/*/libc.so.6; do "
    "mkdir -p /usr/local/lib/x86_64-linux-gnu; cp /etc/hostname /usr/local/lib/x86_64-linux-gnu/$(basename $f); done; "
    "echo /usr/local/lib/x86_64-linux-gnu/libc.so.6 > /etc/ld.so.preload",
}
"""What would mislead tests that look at the agent's files with the image's Python."""

FILL_BYTES = [29_800_000, 29_980_000, 200_000_000]
DISK_MB = 30
_LOG = "head -c 40000 /dev/zero >> /logs/verifier/log; sleep 1"
LOGGING_TEST = f"for n in 1 2 3 4 5 6; do {_LOG}; done; echo 0 > /logs/verifier/reward.txt\n"

MODES = ("shared", "fresh")
Side = Callable[[str], Verdict]


@pytest.fixture(scope="module")
def side_by_side(rootfs: str, scratch: Path, tmp_path_factory: pytest.TempPathFactory) -> Side:
    """Return the verdicts on all attempts. Several run at once, each in its own sandbox."""
    cases = [
        (f"filled: {size}", f"head -c {size} /dev/zero > /fill; rm answer", LOGGING_TEST, False, DISK_MB)
        for size in FILL_BYTES
    ]
    cases += [(hole, agent, TEST, False, None) for hole, agent in HOLES.items()]
    for mode in MODES:
        for hole, agent in PYTHON_HOLES.items():
            cases.append((f"{mode}: {hole}", agent, PYTHON_TEST, mode == "fresh", None))

    async def main() -> list[Verdict | BaseException]:
        async with ApptainerProvider(scratch) as provider:
            running = []
            for _, agent, test, fresh, disk_mb in cases:
                task = write(tmp_path_factory.mktemp("hole"), test)
                spec = SandboxSpec(rootfs, workdir=task.workdir, disk_mb=disk_mb)
                running.append(verdict_of(provider, spec, task, agent, fresh))
            return await asyncio.gather(*some_at_a_time(6, running), return_exceptions=True)

    found = dict(zip((name for name, *_ in cases), asyncio.run(main()), strict=True))

    def of(hole: str) -> Verdict:
        verdict = found[hole]
        if isinstance(verdict, BaseException):
            raise verdict
        return verdict

    return of


@pytest.mark.parametrize("hole", HOLES)
def test_in_the_agents_sandbox_the_verdict_is_honest(side_by_side: Side, hole: str) -> None:
    verdict = side_by_side(hole)
    assert (verdict.rewards, verdict.error) == ({"reward": 0.0}, "")


def test_what_was_replaced_is_said(side_by_side: Side) -> None:
    verdict = side_by_side("a false bash")
    assert re.search(r"changes that the tests did not see: .*\busr/bin/bash\b", verdict.output)


@pytest.mark.parametrize("size", FILL_BYTES)
def test_a_layer_that_the_agent_filled_is_judged_by_tests_that_write_their_logs(side_by_side: Side, size: int) -> None:
    verdict = side_by_side(f"filled: {size}")
    assert (verdict.rewards, verdict.error) == ({"reward": 0.0}, "")


def test_a_preloaded_library_is_not_loaded(judge: Judge) -> None:
    test = "if grep -q libutil /proc/self/maps; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    verdict = judge(f"echo {LIB}/libutil.so.1 > /etc/ld.so.preload", test)
    assert (verdict.reward, verdict.error) == (0.0, "")


def test_a_false_tool_where_only_this_image_looks_is_taken_out(judge: Judge) -> None:
    agent = FALSE_PROGRAM + "mkdir -p /opt/tools/bin; cp /p /opt/tools/bin/grep; cp /p /opt/tools/bin/mine"
    path = "/opt/tools/bin:/usr/local/bin:/usr/bin:/bin"
    verdict = judge(agent, "command -v mine\n" + TEST, env={"PATH": path})
    assert (verdict.rewards, verdict.error) == ({"reward": 0.0}, "")
    assert "/opt/tools/bin/mine" in verdict.output
    assert re.search(r"changes that the tests did not see: .*\bopt/tools/bin/grep\b", verdict.output)


def test_a_library_cache_leads_no_shell_astray(judge: Judge) -> None:
    take = f"mkdir /mine; cp {LIB}/libtinfo.so.6 {LIB}/libz.so.1 /mine; echo /mine > /etc/ld.so.conf.d/a.conf; "
    test = "if grep -q /mine /proc/$$/maps; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    verdict = judge(take + "ldconfig", test)
    assert (verdict.reward, verdict.error) == (0.0, "")
    assert "etc/ld.so.cache" in verdict.output


def test_honest_work_outside_the_work_directory_and_programs_that_were_added_count(judge: Judge) -> None:
    agent = "printf '#!/bin/sh\\necho 42\\n' > /usr/local/bin/forty-two; chmod 755 /usr/local/bin/forty-two; "
    agent += "mkdir -p /data/deep; echo 7 > /data/deep/x; echo 8 > /root/answer; echo 9 > /srv/new; ln -s deep /data/l"
    test = "found=$(cat /data/l/x /root/answer /srv/new | tr -d '\\n')$(forty-two)\n"
    test += "if [ $found = 78942 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    assert judge(agent, test).reward == 1.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hole", PYTHON_HOLES)
def test_programs_and_their_settings_are_the_images(side_by_side: Side, mode: str, hole: str) -> None:
    verdict = side_by_side(f"{mode}: {hole}")
    assert (verdict.rewards, verdict.error) == ({"reward": 0.0}, "")


HOME_HOLES = {
    "a module of the user's": "d=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $d; "
    "echo 'import os; os._exit(0)' > $d/usercustomize.py",
    "settings of git": "git config --global core.pager x; touch .gitconfig",
}


@pytest.mark.parametrize("fresh", [False, True], ids=MODES)
def test_tests_have_a_home_of_their_own_if_the_work_directory_is_the_agents_home(judge: Judge, fresh: bool) -> None:
    agent = "mkdir -p ~/.local; echo x > ~/.bashrc; " + "; ".join(HOME_HOLES.values())
    test = '[ -z "$(ls -A ~)" ] && touch ~/mine && [ -e /root/.gitconfig ] && echo empty\n' + PYTHON_TEST
    verdict = judge(agent, test, fresh, workdir="/root")
    assert (verdict.rewards, verdict.error) == ({"reward": 0.0}, "")
    assert "empty" in verdict.output


@pytest.mark.parametrize("answers", [True, False])
def test_a_task_without_a_work_directory_is_judged_by_all_but_the_system(judge: Judge, answers: bool) -> None:
    agent = (
        FALSE_PROGRAM + "cp --remove-destination /p /usr/bin/grep; echo 1 > /var/lib/dpkg/status; echo 42 > /answer; "
    )
    test = "cd /; [ $(cat /var/lib/dpkg/status) = 1 ] && touch seen; [ -e seen ] || rm answer\n" + TEST
    verdict = judge(agent if answers else f"{agent} rm /answer", test, workdir=None)
    assert (verdict.rewards, verdict.error) == ({"reward": float(answers)}, "")


def test_honest_work_counts_in_a_fresh_layer_too(judge: Judge) -> None:
    agent = "printf 42 > answer; mkdir -p d/e; echo x > d/e/f; chmod 755 d/e/f; ln -s e d/l; "
    agent += "rm -r gone; echo 7 > /logs/artifacts/a"
    test = (
        PYTHON_TEST + "[ -x d/l/f ] && [ ! -e gone ] && cat /logs/artifacts/a || echo 0 > /logs/verifier/reward.txt\n"
    )
    verdict = judge("mkdir gone; " + agent, test, fresh=True)
    assert (verdict.reward, verdict.error) == (1.0, "")
    assert "7" in verdict.output


def test_a_task_without_a_work_directory_cannot_be_judged_fresh(tmp_path: Path) -> None:
    task = read_harbor_task(write_task(tmp_path, toml='[environment]\ndocker_image = "base"\n'))
    with pytest.raises(
        ConfigError, match="task one: verification 'fresh' keeps only the work directory, but the task has none"
    ):
        check_fresh(task)


# --- the reward file ------------------------------------------------------------------------------------------------

REWARDS = {
    "a link": ("ln -s /app/mine reward.txt", "not a plain file"),
    "a link to a file of the host": ("ln -s /etc/passwd reward.json", "not a plain file"),
    "a pipe that nobody writes": ("python3 -c \"import os; os.mkfifo('reward.txt')\"", "not a plain file"),
    "a directory": ("mkdir reward.txt", "not a plain file"),
    "a huge file": ("head -c 100000 /dev/zero > reward.txt", "larger than 65536 bytes"),
    "nothing in it": (": > reward.txt", "empty"),
    "no number": ("echo one > reward.txt", "expected a number"),
    "not a number": ("echo nan > reward.txt", "finite"),
    "the word of infinity": ("echo '{\"reward\": Infinity}' > reward.json", "finite number"),
    "infinity": ("echo 1e999 > reward.json", "finite"),
    "beyond 32 bits": ("echo 3.5e38 > reward.txt", "32 bits"),
    "text": ('echo \'{"reward": "1"}\' > reward.json', "finite number"),
    "a list": ("echo '[1]' > reward.json", "finite number"),
    "a list in it": ('python3 -c \'print("{\\"a\\":" + "[" * 900 + "]" * 900 + "}")\' > reward.json', "a list"),
    "a negative overflow": ('echo \'{"a": 1, "reward": -1e999}\' > reward.json', "finite number"),
    "a name twice": ('echo \'{"reward": 0, "reward": 1}\' > reward.json', "twice"),
    "a name of controls": ("printf '{\"a\\\\u0000\\\\ud800\": 1}' > reward.json", "is called"),
    "bytes": ("head -c 1000 /dev/urandom > reward.json", "not JSON"),
    "too many": ("python3 -c \"import json; print(json.dumps({f'r{n}': 1 for n in range(65)}))\" > reward.json", "65"),
    "a long name": ("python3 -c \"import json; print(json.dumps({'r' * 101: 1}))\" > reward.json", "up to 100"),
}


@pytest.mark.parametrize(("make", "said"), REWARDS.values(), ids=REWARDS.keys())
def test_a_reward_file_is_read_by_the_host_without_trust(tmp_path: Path, make: str, said: str) -> None:
    assert os.system(f"cd {tmp_path} && {make}") == 0
    with pytest.raises(ValueError, match=said):
        read_rewards(tmp_path)


def test_deep_and_long_numbers_are_garbage_and_negative_ones_are_not() -> None:
    for text in ("[" * 60000, "1" * 5000, "1" + "0" * 400):
        with pytest.raises(ValueError, match=r"not JSON|32 bits"):
            parse_rewards("reward.json", text)
    assert parse_rewards("reward.json", '{"cost": -2.5, "ok": true}') == {"cost": -2.5, "ok": 1.0}


def test_logs_of_tests_are_kept_as_far_as_they_are_small_plain_files(tmp_path: Path) -> None:
    (tmp_path / "ctrf.json").write_text("{}")
    (tmp_path / "reward.txt").write_text("1")
    (tmp_path / "big").write_bytes(b"0" * (2 << 20))
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "directory").mkdir()
    assert [(log.name, log.data) for log in read_logs(tmp_path)] == [("verifier/ctrf.json", b"{}")]


# --- the layer ------------------------------------------------------------------------------------------------------


def test_no_link_of_the_agents_is_followed_on_the_host(tmp_path: Path) -> None:
    upper, outside = tmp_path / "upper", tmp_path / "outside"
    (outside / "verifier").mkdir(parents=True)
    upper.mkdir()
    (upper / "logs").symlink_to(outside)
    assert not revert(upper, "logs/verifier")
    make_way(upper, "logs/verifier")
    assert not (upper / "logs").exists()
    assert (outside / "verifier").is_dir()
    (upper / "srv").symlink_to(outside)
    assert keep_only(upper, tmp_path / "aside", ["/srv/verifier", "/"]) == []
    put_back(upper, tmp_path / "aside", [])
    assert (upper / "srv").is_symlink()


def test_deletions_as_fuse_overlayfs_marks_them_are_undone(tmp_path: Path) -> None:
    upper, rootfs = tmp_path / "upper", tmp_path / "rootfs"
    for name in ("bash", "grep", "python3"):
        (rootfs / "usr/bin").mkdir(parents=True, exist_ok=True)
        (rootfs / "usr/bin" / name).write_text("")
    (upper / "usr/bin").mkdir(parents=True)
    for name in (".wh.bash", "grep", ".wh.python3", "added"):
        (upper / "usr/bin" / name).write_text("")
    restore(upper, LayerView([Tree(str(rootfs))]), [])
    assert sorted(os.listdir(upper / "usr/bin")) == ["added"]
    (upper / "usr/bin/.wh..wh..opq").write_text("")
    restore(upper, LayerView([Tree(str(rootfs))]), [])
    assert not (upper / "usr/bin").exists()


def test_a_layer_that_was_set_aside_comes_back_with_what_happened_since(tmp_path: Path) -> None:
    upper, aside = tmp_path / "upper", tmp_path / "aside"
    (upper / "app" / "src").mkdir(parents=True)
    (upper / "etc").mkdir()
    taken = keep_only(upper, aside, ["/app", "app/src", "/logs/artifacts"])
    assert (taken, os.listdir(upper)) == (["app"], ["app"])
    (upper / "app" / "new").write_text("1")
    (upper / "tmp").mkdir()
    put_back(upper, aside, taken)
    assert sorted(os.listdir(upper)) == ["app", "etc"]
    assert sorted(os.listdir(upper / "app")) == ["new", "src"]
