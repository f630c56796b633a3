"""Two users of one Slurm side by side: ``python -m tests.lab.two_users``, by root.

An ordinary user's lab has one user, so this is no test of pytest's; where root calls launchers/test it follows the
suite. It makes three throwaway accounts (two that share a group, and a stranger), a lab of root's for the two, and has
each run a campaign on the same nodes at the same time. While both are at work each tries what it can reach of the
other; afterwards every rollout must be in its owner's file once and nothing may be left of either. Then one offers an
engine pool to the group, and the other runs a campaign with it. Prints a line for each finding and ends with 1 if one
is not as it should be.

Needs what launchers/setup gives (Slurm, Apptainer on PATH, ``MEGAFLOW_TEST_BASE_SIF``), readable by every user.
"""

from __future__ import annotations

import grp
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.trajectories import open_trajectories
from tests.support.accounts import GROUP, Account, intrude, tell
from tests.support.harbor_tasks import write_solved_task
from tests.support.places import ROOT
from tests.support.scripted import SOLVE
from tests.support.waiting import eventually

ALICE, BOB, STRANGER = "mfa", "mfb", "mfc"
PODS = {
    "partition": "cpu", "nodes": 2, "ranks_per_node": 2, "cpus_per_rank": 1, "slots_per_rank": 2, "mem": "1G",
    "time": 10, "nodelist": "cpu[1-2]",
}  # fmt: skip


class Findings:
    def __init__(self) -> None:
        self.bad = 0

    def say(self, what: str, good: bool, seen: object = "") -> None:
        self.bad += not good
        print(f"{'ok  ' if good else 'FAIL'} {what}{f': {seen}' if seen != '' else ''}", flush=True)


def until(condition: Any, what: str, timeout_s: float = 180, said: Any = str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if why := said():
            raise SystemExit(f"error: {what}: {why}")
        if time.monotonic() > deadline:
            raise SystemExit(f"error: {what}: not within {timeout_s:.0f} s")
        time.sleep(0.5)
    return found


@contextmanager
def site() -> Iterator[tuple[Path, Account, Account, Account]]:
    """Accounts and lab, and their end."""
    folder = Path(tempfile.mkdtemp(prefix="megaflow-two.", dir="/srv"))
    folder.chmod(0o755)
    subprocess.run(["groupadd", "--force", GROUP], check=True)
    lab = folder / "lab"
    accounts: list[Account] = []
    launcher = [sys.executable, str(ROOT / "launchers" / "lab.py")]
    try:
        accounts += (Account(name, lab, shared=name != STRANGER) for name in (ALICE, BOB, STRANGER))
        subprocess.run([*launcher, "start", "--dir", str(lab), "--users", f"{ALICE},{BOB}"], check=True)
        shared = folder / "shared"
        shared.mkdir()
        os.chown(shared, 0, grp.getgrnam(GROUP).gr_gid)
        shared.chmod(0o3775)  # as a group's project directory is: new files are the group's
        yield shared, accounts[0], accounts[1], accounts[2]
    finally:
        subprocess.run([*launcher, "stop", "--dir", str(lab)], check=False)
        for account in accounts:
            account.remove()
        subprocess.run(["groupdel", GROUP], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def campaign(account: Account, name: str, tasks: int, **fields: Any) -> Path:
    for number in range(tasks):
        write_solved_task(account.home / name / "tasks", f"task{number}", solution="sleep 3; echo 42 > answer")
    image = os.environ["MEGAFLOW_TEST_BASE_SIF"]
    content = {
        "name": name,
        "tasks": "tasks/*",
        "agent": "oracle",
        "environment": {"images": {"base": image}},
        **fields,
    }
    content.setdefault("slurm", {})["pods"] = PODS
    return account.write(f"{name}/campaign.yaml", yaml.safe_dump(content))


def side_by_side(say: Findings, shared: Path, alice: Account, bob: Account, stranger: Account, tasks: int) -> Path:
    """Two campaigns at once; the second one's run directory, which is open to the group."""
    runs = {alice: alice.home / "run", bob: shared / "run"}
    files = {alice: campaign(alice, "alone", tasks), bob: campaign(bob, "open", tasks, share="group")}
    working = {
        u: u.start(sys.executable, "-m", "megaflow_hpc", "run", files[u], "--run-dir", runs[u], "--json") for u in runs
    }

    def at_work(account: Account) -> bool:
        if not (runs[account] / "run.json").exists():
            return False
        return json.loads(account.cli("status", runs[account], "--json")[1])["rollouts"]["running"] > 0

    def ended() -> str:
        return "".join(process.communicate()[1] for process in working.values() if process.poll() is not None)

    until(lambda: all(at_work(account) for account in runs), "both campaigns run rollouts", said=ended)
    there = {account.name: len(account.processes()) for account in runs}
    print(f"     both at work, with so many processes: {there}", flush=True)
    jobs = alice.call("squeue", "-h", "-u", BOB, "-o", "%A")[1].split()
    alice.call("scancel", *jobs)
    after = alice.call("squeue", "-h", "-u", BOB, "-o", "%A")[1].split()
    say.say(f"{ALICE}'s scancel of {BOB}'s jobs changes nothing", bool(jobs) and jobs == after, f"{len(after)} jobs")
    told = tell(alice, runs[alice])
    print(f"     {BOB} tries of {ALICE}'s: { {what: len(each) for what, each in told.items()} }", flush=True)
    found = intrude(bob, told)
    say.say(f"{BOB} reaches nothing of {ALICE}'s run, processes, scratch and ports", not found, found or "")
    told = tell(bob, runs[bob])
    found = intrude(alice, told)
    reached = {what: how for what, how in found.items() if not what.startswith(str(runs[bob])) or how == "written"}
    say.say(f"{ALICE} of {BOB}'s shared run but its files", not reached, reached or "")
    say.say(f"{ALICE} reads {BOB}'s shared files while it runs", any(how == "read" for how in found.values()))
    found = intrude(stranger, told)
    say.say(f"{STRANGER}, who is not in the group, reaches nothing of the shared run", not found, found or "")
    status, out, err = alice.cli("status", runs[bob], "--json")
    say.say(f"{ALICE} asks for the status of {BOB}'s run", status == 0, json.loads(out)["rollouts"] if out else err)
    for account, process in working.items():
        out, err = process.communicate(timeout=400)
        with open_trajectories(str(runs[account])) as store:
            rows = sorted((row.id, row.status, row.reward) for row in store)
        expected = sorted((f"task{n}/oracle/0", "completed", 1.0) for n in range(tasks))
        good = process.returncode == 0 and rows == expected
        say.say(f"{account.name}: every rollout once, solved", good, len(rows) if good else f"{rows} {err[-400:]}")
    pods = alice.call("sacct", "-a", "-n", "-X", "-P", "-o", "User,NodeList,Start,End,AllocNodes")[1].splitlines()
    spans = sorted(line.split("|")[:4] for line in pods if line.endswith("|2"))  # the gather jobs have one node
    good = len(spans) == 2 and spans[0][1] == spans[1][1] and max(s[2] for s in spans) < min(s[3] for s in spans)
    say.say("both pods had the same nodes at the same time", good, spans)
    return runs[bob]


def as_a_member(say: Findings, run: Path, bob: Account, alice: Account, stranger: Account) -> None:
    """A finished run that is shared, read by another of the group."""
    read = "from megaflow_hpc import open_trajectories as o; import sys; s = o(sys.argv[1]); print(len(s), s[0].reward)"
    for target in (run, run / "trajectories.h5"):
        status, out, err = alice.call(sys.executable, "-c", read, target)
        say.say(f"{ALICE} reads {target.name} of {BOB}", status == 0, out.strip() or err[-300:])
    for words in (
        ("show", run, "task0/oracle/0"),
        ("status", run),
        ("validate", run / "trajectories.h5"),
        ("export", run, "--format", "jsonl", "-o", alice.home / "out"),
    ):
        status, out, err = alice.cli(*words)
        say.say(f"{ALICE}: megaflow-hpc {words[0]}", status == 0, err.strip()[-300:] if status else "")
    for words in (("gather", run, "--rebuild"), ("cancel", run), ("resume", run), ("scale", run, "--pods", "3")):
        status, _, err = alice.cli(*words)
        good = status != 0 and "Traceback" not in err
        say.say(f"{ALICE}: megaflow-hpc {words[0]} is refused in a line", good, err.strip()[-200:])
    status, _, err = stranger.cli("status", run)
    good = status == 2 and "Traceback" not in err
    say.say(f"{STRANGER}: megaflow-hpc status is refused in a line", good, err.strip()[-200:])


def pooled(say: Findings, shared: Path, alice: Account, bob: Account, stranger: Account) -> None:
    """An engine pool of one, asked by the other's campaign."""
    alice.write("pool/answers.yaml", yaml.safe_dump({"default": SOLVE}))
    model = {"engine": "scripted", "script": "answers.yaml", "gpus": 0}
    content = {
        "name": "pool",
        "model": model,
        "share": "group",
        "slurm": {"servers": {"partition": "gpu", "time": 20}},
    }
    file = alice.write("pool/campaign.yaml", yaml.safe_dump(content))
    pool = shared / "pool"
    status, _, err = alice.cli("submit", file, "--run-dir", pool)
    say.say(f"{ALICE} submits an engine pool", status == 0, err.strip()[-200:] if status else "")
    until(lambda: list((pool / "pool" / "servers").glob("*.json")), "the pool's server answers")
    told = tell(alice, pool)
    found = intrude(stranger, told)
    say.say(f"{STRANGER} reaches nothing of the pool", not found, found or "")
    found = intrude(bob, told)
    outside = {what: how for what, how in found.items() if not what.startswith(f"{pool}/pool/")}
    say.say(f"{BOB} reads the pool's public part and nothing else", bool(found) and not outside, outside or "")
    file = campaign(
        bob,
        "guest",
        3,
        agent={"name": "mini-swe-agent", "max_turns": 4},
        model={"engine": "pool", "path": str(pool)},
        samples=2,
    )
    status, _, err = bob.cli("run", file, "--run-dir", bob.home / "guest-run", "--json")
    rows: list[Any] = []
    if status == 0:
        with open_trajectories(str(bob.home / "guest-run")) as store:
            rows = [(row.id, row.status, row.reward, len(row.turns)) for row in store]
    good = len(rows) == 6 and {row[1:] for row in rows} == {("completed", 1.0, 2)}
    say.say(
        f"{BOB}'s campaign is answered by {ALICE}'s pool",
        good,
        f"{len(rows)} solved, two turns each" if good else f"{rows} {err[-600:]}",
    )
    status, _, err = alice.cli("cancel", pool)
    say.say(f"{ALICE} ends the pool", status == 0, err.strip()[-200:] if status else "")


def main() -> int:
    if os.getuid() != 0:
        print(
            "error: only root makes users, and a lab for them; as yourself: "
            "python -m pytest tests/campaign/test_shared_runs.py",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made is removed
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    say = Findings()
    with site() as (shared, alice, bob, stranger):
        run = side_by_side(say, shared, alice, bob, stranger, tasks)
        as_a_member(say, run, bob, alice, stranger)
        pooled(say, shared, alice, bob, stranger)
        os.environ["SLURM_CONF"] = alice.environment["SLURM_CONF"]
        until(
            lambda: not subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout,
            "every job has left",
        )
        for account in (alice, bob, stranger):
            eventually(lambda account=account: not account.left(), 20, every_s=1)
            left = account.left()
            say.say(f"nothing is left of {account.name} on the nodes", not left, left or "")
    print(f"{say.bad} findings are not as they should be" if say.bad else "all is as it should be")
    return bool(say.bad)


if __name__ == "__main__":
    raise SystemExit(main())
