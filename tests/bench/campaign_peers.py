"""Whole campaigns of rollouts with a model, beside what a user would take in place of this package.

The same tasks, scripted answers and slots: a conversation of six turns that writes a file, then a test that reads it.

- Harbor with its Singularity environment; an agent of a few lines stands for those that it would install in each
  sandbox from the network.
- mini-swe-agent's batch runner with its Singularity environment. It verifies nothing.
- verifiers' Apptainer runtime, driven by a loop of a few lines: it starts, converses, tests and stops.

All get what spares them work: Harbor an unpacked image in which all that it installs at each start is there already,
verifiers Apptainer's own unpacking where users cannot mount a SIF. The engine answers at once, so what is left is what
a rollout costs beside its model. A figure is that of the whole command, from its start to its end, with the processor
time of all its processes and of the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.address import free_port
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.child import die_with_parent
from tests.bench.figures import Figure
from tests.bench.gateway_peers import environment
from tests.support.harbor_tasks import write_solved_task
from tests.support.places import ROOT

Note = Callable[[str], None]
PACKAGES = ("mini-swe-agent>=2.4,<3", "datasets", "verifiers>=0.4,<0.5")
SERVER = ("fastapi", "uvicorn")
"""What Harbor installs in every sandbox before it can run a command there."""
LIMIT_S = 1800.0
PLACE = "/app"
COMMANDS = (
    "ls -la /",
    "cat /etc/os-release",
    f"mkdir -p {PLACE} && echo 41 > {PLACE}/answer",
    f"cat {PLACE}/answer",
    f"echo 42 > {PLACE}/answer && cat {PLACE}/answer",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)
TEST = f"grep -q 42 {PLACE}/answer"

_ASK = """
import asyncio, json, re, urllib.request
ENGINE, TURNS = %(engine)r, %(turns)d
def ask(messages):
    body = json.dumps({"model": "scripted", "messages": messages}).encode()
    request = urllib.request.Request(ENGINE + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
async def converse(instruction, execute):
    messages = [{"role": "user", "content": instruction}]
    for _ in range(TURNS):
        answer = await asyncio.to_thread(ask, messages)
        command = re.search("```mswea_bash_command\\n(.*?)\\n```", answer, re.DOTALL)[1]
        output = await execute(command)
        if (output or "").startswith("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"):
            return
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": output or ""}]
"""

_HARBOR = """
from harbor.agents.base import BaseAgent
class Chat(BaseAgent):
    @staticmethod
    def name():
        return "chat"
    def version(self):
        return "1"
    async def setup(self, environment):
        pass
    async def run(self, instruction, environment, context):
        async def execute(command):
            done = await environment.exec(command)
            return (done.stdout or "") + (done.stderr or "")
        await converse(instruction, execute)
"""

_VERIFIERS = """
import sys
from verifiers.v1.runtimes.apptainer import ApptainerConfig, ApptainerRuntime
IMAGE, PLACE, TEST, COUNT, SLOTS = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
async def rollout(number):
    runtime = ApptainerRuntime(ApptainerConfig(image=IMAGE, workdir=PLACE))
    try:
        await runtime.start()
        async def execute(command):
            done = await runtime.run(["sh", "-c", command], {})
            return done.stdout + done.stderr
        await converse("Task %d: write 42 into the file answer." % number, execute)
        return (await runtime.run(["sh", "-c", TEST], {})).exit_code == 0
    finally:
        await runtime.stop()
async def main():
    numbers, solved = iter(range(COUNT)), []
    async def slot():
        for number in numbers:
            solved.append(await rollout(number))
    await asyncio.gather(*(slot() for _ in range(SLOTS)))
    print(json.dumps({"solved": sum(solved)}))
asyncio.run(main())
"""

_MEASURED = """
import json, os, resource, sys, time
sys.path.insert(0, sys.argv.pop(1))
from megaflow_hpc.host.child import adopt_orphans
adopt_orphans()
began = time.monotonic()
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
ended = None
while ended is None:
    pid, status = os.wait()
    if pid == child:
        ended, wall = os.waitstatus_to_exitcode(status), time.monotonic() - began
deadline = time.monotonic() + 10
while time.monotonic() < deadline:
    try:
        if os.waitpid(-1, os.WNOHANG) == (0, 0):
            time.sleep(0.05)
    except ChildProcessError:
        break
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"status": ended, "wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime}), file=sys.stderr)
"""
"""Runs a command and says what it took, with the processes whose parents ended before them."""


@dataclass(frozen=True)
class Campaign:
    """What everybody runs."""

    folder: Path
    image: Path
    tasks: int
    slots: int
    engine: str
    """Its address; an engine of the campaign's own has none."""


@dataclass(frozen=True)
class Outcome:
    """What a whole campaign took."""

    version: str
    wall_s: float
    cpu_s: float
    solved: int


class LeftOut(SiteError):
    """It cannot run here; says why."""


def measure(folder: Path, image: Path, note: Note, arguments: argparse.Namespace) -> list[Figure]:
    """Rollouts an hour and core-seconds of a rollout, ours and every peer's that runs here; ``note`` names the others
    and why not."""
    count, slots = arguments.tasks, arguments.slots
    script = folder / "answers.yaml"
    turns = [f"THOUGHT: I go on.\n\n```mswea_bash_command\n{command}\n```" for command in COMMANDS]
    script.write_text(yaml.safe_dump({"default": turns}))
    ours = _ours(Campaign(folder / "ours", image, count, slots, ""), script)
    note(f"ours: {ours.solved} of {count} solved in {ours.wall_s:.1f} s, {ours.cpu_s:.1f} s of processor time")
    shape = f"{count} rollouts of {len(COMMANDS)} turns, {slots} slots"
    figures = [
        Figure(f"rollouts an hour, {shape}", "1/h", 3600 * count / ours.wall_s, count, None, None, "higher"),
        Figure("core-seconds a rollout", "s", ours.cpu_s / count, count),
    ]
    for name, peer in PEERS.items():
        try:
            with _engine(script) as (address, engine):
                found = peer(Campaign(folder / peer.__name__.strip("_"), image, count, slots, address), note)
                engine.terminate()
                _, _, used = os.wait4(engine.pid, 0)
        except (LeftOut, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            note(f"{name}: left out: {str(error).strip()[-600:]}")
            continue
        cpu_s = found.cpu_s + used.ru_utime + used.ru_stime
        note(f"{name}: {found.solved} of {count} solved in {found.wall_s:.1f} s, {cpu_s:.1f} s of processor time")
        if found.solved < count:
            note(f"{name}: left out: it did not solve all")
            continue
        figures[0] = figures[0].beside(name, found.version, round(3600 * count / found.wall_s, 1))
        figures[1] = figures[1].beside(name, found.version, round(cpu_s / count, 3))
    return figures


def _ours(campaign: Campaign, script: Path) -> Outcome:
    from megaflow_hpc.resources import __version__

    _write_tasks(campaign, "base")
    description = {
        "name": "peers",
        "tasks": "tasks/*",
        "agent": "mini-swe-agent",
        "model": {"engine": "scripted", "script": str(script)},
        "environment": {"network": "none", "images": {"base": str(campaign.image)}},
        "slurm": {"pods": {"ranks_per_node": 2, "slots_per_rank": campaign.slots}},
    }
    (campaign.folder / "campaign.yaml").write_text(yaml.safe_dump(description))
    command = [sys.executable, "-m", "megaflow_hpc", "run", "campaign.yaml", "--launcher", "local", "--json"]
    output, wall_s, cpu_s = run_measured(command, campaign.folder, {"PYTHONPATH": str(ROOT)})
    summary = json.loads(output)
    return Outcome(__version__, wall_s, cpu_s, round(sum(p["solved"] for p in summary["policies"].values())))


# --- peers ------------------------------------------------------------------------------------------------------------


def _harbor(campaign: Campaign, note: Note) -> Outcome:
    note("Harbor: its environment, and an image that lacks nothing of what it installs")
    made = subprocess.run(["bash", str(ROOT / "launchers" / "harbor-env.sh")], capture_output=True, text=True)
    if made.returncode:
        raise LeftOut(f"launchers/harbor-env.sh: {made.stderr}")
    python = Path(made.stdout.strip().splitlines()[-1])
    image = campaign.folder / "prepared.sif"  # a directory under this name is taken for an image, and needs no FUSE
    _prepare_for_harbor(image, _rootfs(campaign.image))
    _write_tasks(campaign, str(image))
    (campaign.folder / "chat.py").write_text(_program(campaign) + _HARBOR)
    command = [str(python.parent / "harbor"), "run", "-p", "tasks", "-a", "chat:Chat", "--env", "singularity"]
    command += ["-n", str(campaign.slots), "-o", "jobs", "--job-name", "peer", "--yes", "-q"]
    _, wall_s, cpu_s = run_measured(command, campaign.folder, {"PYTHONPATH": str(campaign.folder)})
    results = [json.loads(path.read_text()) for path in (campaign.folder / "jobs" / "peer").glob("*/result.json")]
    solved = [r for r in results if ((r.get("verifier_result") or {}).get("rewards") or {}).get("reward") == 1]
    if not solved:
        said = [(r.get("exception_info") or {}).get("exception_message", "") for r in results]
        raise LeftOut(f"no rollout ended well: {said[:1]}")
    return Outcome(_version(python, "harbor"), wall_s, cpu_s, len(solved))


def _prepare_for_harbor(image: Path, rootfs: Path) -> None:
    """A copy of the image with the server's packages, its work directory, and stand-ins for tmux and asciinema."""
    image.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", "--reflink=auto", str(rootfs), str(image)], check=True, stderr=subprocess.DEVNULL)
    place = image / "opt" / "harbor-server"
    for directory in (image, image / "opt", image / "usr/bin", image / "usr/local/bin"):
        directory.chmod(0o755)
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python3").symlink_to("/usr/bin/python3")
    (place / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    version = (image / "usr/bin/python3").readlink().name.removeprefix("python")
    packages = place / "lib" / f"python{version}" / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
    done = subprocess.run(
        [*pip, "--target", str(packages), "--python-version", version, *SERVER], capture_output=True, text=True
    )
    if done.returncode:
        raise LeftOut(f"pip: {done.stderr}")
    for name in ("tmux", "asciinema"):
        stand_in = image / "usr/local/bin" / name
        stand_in.write_text("#!/bin/sh\nexit 0\n")
        stand_in.chmod(0o755)
    (image / "usr/bin/apt-get").unlink(missing_ok=True)  # it would be asked for news before every start
    (image / PLACE.strip("/")).mkdir(exist_ok=True)


def _mini_swe_agent(campaign: Campaign, note: Note) -> Outcome:
    python = _python(note)
    (campaign.folder / "data").mkdir(parents=True)
    lines = [
        json.dumps(
            {"instance_id": f"t{number}", "problem_statement": f"Task t{number}: write 42 into the file answer."}
        )
        for number in range(campaign.tasks)
    ]
    (campaign.folder / "data" / "test.jsonl").write_text("\n".join(lines) + "\n")
    # By its full name the environment takes one image for all; by its short one only what Docker Hub has.
    own = {
        "agent": {"cost_limit": 0},
        "environment": {
            "environment_class": "minisweagent.environments.singularity.SingularityEnvironment",
            "image": str(campaign.image),
            "global_args": ["--silent"],  # a warning of Apptainer's before it would hide the word that ends a rollout
        },
        "model": {
            "model_name": "openai/scripted",
            "model_class": "litellm_textbased",
            "cost_tracking": "ignore_errors",
            "model_kwargs": {"api_base": f"{campaign.engine}/v1", "api_key": "none"},
        },
    }
    (campaign.folder / "own.yaml").write_text(yaml.safe_dump(own))
    command = [str(python.parent / "mini-extra"), "swebench", "--subset", "data", "--split", "test", "-o", "out"]
    command += ["-w", str(campaign.slots), "-c", "swebench_backticks.yaml", "-c", "environment.cwd=/", "-c", "own.yaml"]
    quiet = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": "config", "HF_HUB_OFFLINE": "1"}
    _, wall_s, cpu_s = run_measured(command, campaign.folder, {**quiet, "HF_HOME": str(campaign.folder / "hf")})
    ended = [json.loads(path.read_text())["info"] for path in (campaign.folder / "out").glob("*/*.traj.json")]
    solved = [info for info in ended if info.get("exit_status") == "Submitted"]
    if not solved:
        raise LeftOut(f"no rollout ended well: {ended[:1]}")
    return Outcome(_version(python, "mini-swe-agent"), wall_s, cpu_s, len(solved))


def _verifiers(campaign: Campaign, note: Note) -> Outcome:
    python = _python(note)
    campaign.folder.mkdir(parents=True)
    (campaign.folder / "drive.py").write_text(_program(campaign) + _VERIFIERS)
    command = [str(python), "drive.py", str(campaign.image), PLACE, TEST, str(campaign.tasks), str(campaign.slots)]
    mounts = os.access("/dev/fuse", os.R_OK | os.W_OK)
    more = {} if mounts else {"APPTAINER_UNSQUASH": "true"}
    if not mounts:
        note("verifiers: users cannot mount a SIF here (/dev/fuse is closed), so Apptainer unpacks it at each start")
    output, wall_s, cpu_s = run_measured(command, campaign.folder, more)
    return Outcome(_version(python, "verifiers"), wall_s, cpu_s, json.loads(output.splitlines()[-1])["solved"])


PEERS: Mapping[str, Callable[[Campaign, Note], Outcome]] = {
    "Harbor, Singularity environment": _harbor,
    "mini-swe-agent's batch runner, nothing verified": _mini_swe_agent,
    "verifiers' Apptainer runtime": _verifiers,
}


def _python(note: Note) -> Path:
    place = environment(note, "campaign-peers", PACKAGES)
    if place is None:
        raise LeftOut("its packages cannot be installed")
    return place / "bin" / "python"


def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _program(campaign: Campaign) -> str:
    return _ASK % {"engine": campaign.engine, "turns": 2 * len(COMMANDS)}


def _rootfs(image: Path) -> Path:
    """The image as a directory on this node, where our own sandboxes have it."""
    import asyncio

    async def stage() -> str:
        async with ApptainerProvider() as provider:
            return await provider.stage(str(image))

    return Path(asyncio.run(stage()))


# --- what is run ------------------------------------------------------------------------------------------------------


def _write_tasks(campaign: Campaign, image: str) -> None:
    for number in range(campaign.tasks):
        task = write_solved_task(campaign.folder / "tasks", f"t{number}", test=TEST)
        toml = task / "task.toml"
        toml.write_text(toml.read_text().replace('docker_image = "base"', f'docker_image = "{image}"'))
        shutil.rmtree(task / "environment")
        (task / "environment").mkdir()


@contextmanager
def _engine(script: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A scripted engine on the loopback: its address and its process."""
    port = free_port()
    command = [sys.executable, "-m", "megaflow_hpc.model.engines.scripted", "--script", str(script)]
    engine = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=die_with_parent,
    )
    try:
        assert engine.stdout is not None
        if not engine.stdout.readline():
            raise LeftOut("the scripted engine did not start")
        yield f"http://127.0.0.1:{port}", engine
    finally:
        engine.kill()
        engine.wait()


def run_measured(command: Sequence[str], folder: Path, more: Mapping[str, str]) -> tuple[str, float, float]:
    """Runs a command to its end in ``folder``: what it printed, its seconds, its processor time."""
    bin_ = folder / "bin"
    bin_.mkdir(parents=True, exist_ok=True)
    (bin_ / "singularity").symlink_to(find_apptainer())
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SLURM_"))}
    environ |= {"PATH": f"{bin_}{os.pathsep}{environ.get('PATH', os.defpath)}", "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir(exist_ok=True)
    environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", **more}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(ROOT), *command],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    *said, last = done.stderr.strip().splitlines() or [""]
    took = json.loads(last) if last.startswith('{"status"') else {"status": done.returncode}
    if took["status"]:
        words = " ".join([*said, done.stdout][-12:])
        raise LeftOut(f"{shlex.join(command[:3])} … ended with {took['status']}: {words}")
    return done.stdout, took["wall_s"], took["cpu_s"]
