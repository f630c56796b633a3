"""Common mistakes, and the answer in one line: place, value and remedy."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.cli import main
from megaflow_hpc.environments.sandbox import probe
from tests.support.harbor_tasks import write_solved_task

GOOD = "name: small\ntasks: tasks/*\nagent: [oracle, nop]\nenvironment: {network: none, images: {base: image}}\n"
EMPTY = "c.yaml: is empty; megaflow-hpc init writes a campaign file to begin with"
KEYS = "expected keys such as tasks: and agent:"
NO_TASKS = "contains no Harbor task directory (with task.toml); correct the path"

FILES: dict[str, tuple[str | bytes, str]] = {
    "an empty file": ("", EMPTY),
    "comments alone": ("# to be written\n", EMPTY),
    "a list": ("- a\n- b\n", f"c.yaml: holds a list; {KEYS}"),
    "a text": ("hello\n", f"c.yaml: holds 'hello'; {KEYS}"),
    "a program": (b"\x7fELF" + bytes(300), "c.yaml:1: contains the character 0x7f; expected YAML"),
    "a zero byte": ("name: a\nseed: 1\0\n", "c.yaml:2: contains the character 0x00; expected YAML"),
    "an archive": (
        bytes(range(1, 256)),
        "c.yaml: cannot be read as UTF-8 text (invalid start byte at byte 127); expected YAML in UTF-8",
    ),
    "a tab": (
        "name: a\nenvironment:\n\tnetwork: none\n",
        "c.yaml:3: not valid YAML: found character '\\t'",
    ),
    "an open brace": ("name: a\nagent: {name: nop\n", "c.yaml:3: not valid YAML: expected ',' or '}'"),
    "a key twice": (f"{GOOD}name: other\n", "c.yaml:5: not valid YAML: key 'name' is given twice"),
    "a mistyped key": (f"{GOOD}sampels: 3\n", "c.yaml:5: unknown key 'sampels'; did you mean 'samples'?"),
    "a mistyped key in a section": (
        GOOD.replace("network: none", "netwrok: none"),
        "c.yaml:4: unknown key 'environment.netwrok'; did you mean 'network'?",
    ),
    "a key of another tool": (
        f"{GOOD}replicas: 3\n",
        "c.yaml:5: unknown key 'replicas'; known here: agent,",
    ),
    "words for a number": (f"{GOOD}samples: many\n", "c.yaml:5: samples 'many': expected a whole number of at least 1"),
    "a negative number": (f"{GOOD}samples: -1\n", "c.yaml:5: samples -1: expected a whole number of at least 1"),
    "a fraction": (
        f"{GOOD}samples: 1.5\n",
        "c.yaml:5: samples 1.5: expected a whole number of at least 1",
    ),
    "yes for a number": (
        f"{GOOD}samples: yes\n",
        "c.yaml:5: samples True: a number is expected, and YAML reads yes",
    ),
    "negative pods": (
        f"{GOOD}slurm: {{pods: {{count: -2}}}}\n",
        "c.yaml:5: slurm.pods.count -2: expected a whole number of at least 1",
    ),
    "a time in words": (
        f"{GOOD}slurm: {{pods: {{time: tomorrow}}}}\n",
        "c.yaml:5: slurm.pods.time 'tomorrow': 'tomorrow' is not a time; write minutes (30), HH:MM:SS or D-HH:MM:SS",
    ),
    "no tasks": ("name: a\nagent: nop\n", "c.yaml:1: 'tasks' is missing; add it"),
    "tasks that are not there": (GOOD.replace("tasks/*", "nowhere/*"), f"/nowhere/*: {NO_TASKS}"),
    "a file for tasks": (GOOD.replace("tasks/*", "c.yaml"), f"/c.yaml: {NO_TASKS}"),
    "instances that are not there": (GOOD.replace("tasks/*", "x.jsonl"), "/x.jsonl: no such file; correct the path"),
    "a mistyped agent": (
        GOOD.replace("[oracle, nop]", "orcale"),
        "agent 'orcale' is unknown (did you mean oracle?)",
    ),
    "an agent without its model": (
        GOOD.replace("[oracle, nop]", "mini-swe-agent"),
        "needs a model; add a model:",
    ),
    "a mistyped choice": (
        GOOD.replace("network: none", "network: nonee"),
        "c.yaml:4: environment.network 'nonee': expected 'none', 'gateway' or 'host'; did you mean 'none'?",
    ),
    "an image that is not there": (
        GOOD.replace("base: image", "base: image.sif"),
        "image.sif: no such file; expected a SIF, a .def file, a Dockerfile, a directory or docker://…",
    ),
    "a damaged image": (
        GOOD.replace("base: image", "base: broken.sif"),
        "broken.sif: 40000 bytes, but its header requires",
    ),
    "a text for an image": (
        GOOD.replace("base: image", "base: file"),
        "/file: cannot be read as an image (it has no complete SIF header); build or pull it again",
    ),
    "an image behind a variable that is not set": (
        GOOD.replace("base: image", "base: $NOWHERE/base.sif"),
        "expected a SIF, a .def file, a Dockerfile, a directory or docker://…; it names a variable that is not set: ",
    ),
    "an image without docker://": (
        GOOD.replace("base: image", "base: ubuntu:22.04"),
        "c.yaml:4: base: {here}/ubuntu:22.04: no such file; expected a SIF, a .def file, a Dockerfile, a directory or "
        "docker://…; "
        "did you mean docker://ubuntu:22.04?",
    ),
    "no image": (
        "name: a\ntasks: tasks/*\nagent: nop\n",
        "image 'base', which {here}/tasks/task0/task.toml needs, is not mapped; add 'base': followed by a SIF file",
    ),
    "a script with CRLF": (
        GOOD.replace("tasks/*", "crlf/*"),
        "{here}/crlf/task9/tests/test.sh:1: lines end in CRLF, which no shell reads; convert it: sed -i",
    ),
    "a solution with CRLF": (
        GOOD.replace("tasks/*", "crlf-solution/*"),
        "{here}/crlf-solution/task9/solution/solve.sh:1: lines end in CRLF",
    ),
    "a directory of tasks": (
        GOOD.replace("tasks/*", "tasks"),
        "c.yaml:2: tasks: tasks: not a task, but contains 2; write",
    ),
    "an id that no task has": (
        GOOD.replace("tasks/*", "{path: tasks/*, include: [nosuch]}"),
        "c.yaml:2: tasks: tasks/*: include ['nosuch'] and exclude [] leave no valid task; an example of an id is",
    ),
    "two agents alike": (
        GOOD.replace("[oracle, nop]", "[nop, nop]"),
        "c.yaml:3: agent: agents ['nop', 'nop'] are not distinct, but results are identified by these names; give each "
        "its own name, such as {{as: careful, name: nop}}",
    ),
    "a mistyped class": (
        GOOD.replace("[oracle, nop]", "my_agent:MyAgnt"),
        "c.yaml:3: agent 'my_agent:MyAgnt': {here}/my_agent.py has no MyAgnt; did you mean MyAgent?",
    ),
    "a module that is not there": (
        GOOD.replace("[oracle, nop]", "elsewhere:MyAgent"),
        "put elsewhere.py next to the campaign file, or its directory on PYTHONPATH",
    ),
    "a name of two words": (GOOD.replace("name: small", "name: my campaign"), "c.yaml:1: name 'my campaign': "),
    "an engine without its file": (
        f"{GOOD}model: {{engine: scripted}}\n",
        "c.yaml:5: model: engine scripted needs 'script'; add model.script",
    ),
    "answers that are not there": (
        f"{GOOD}model: {{engine: scripted, script: no.yaml}}\n",
        "c.yaml:5: model.script: 'no.yaml' does not exist (looked for {here}/no.yaml); give an existing path",
    ),
    "an endpoint without http": (
        f"{GOOD}model: {{engine: external, path: m, base_url: llm.site.edu}}\n",
        "c.yaml:5: model.base_url 'llm.site.edu'",
    ),
    "a key that is not there": (
        f"{GOOD}model: {{engine: external, path: m, base_url: 'http://h/v1', api_key_file: nokey}}\n",
        "c.yaml:5: model.api_key_file: 'nokey' does not exist",
    ),
    "a model that is not there": (
        f"{GOOD}model: {{path: /no/model}}\n",
        "c.yaml:5: model.path: '/no/model' does not exist; give an existing path",
    ),
    "a site that nobody knows": (f"{GOOD}site: perlmuter\n", "c.yaml:5: site 'perlmuter': no such profile"),
    "a variable that is not set": (
        f"{GOOD}run_dir: $NOWHERE_AT_ALL/runs\n",
        "c.yaml:5: run_dir '$NOWHERE_AT_ALL/runs': a variable that is not set; export it first",
    ),
    "a colon without a space": (
        GOOD.replace("name: small", "name:small"),
        "c.yaml:2: not valid YAML: mapping values are not allowed here; write a space after each colon",
    ),
    "a key further to the right": (GOOD.replace("name:", "  name:"), "start all keys of one level in the same column"),
}
"""Mistake → the campaign file and the message, in which ``{here}`` is its directory."""

VALUES = {
    "samples: [1]": "samples: expected a whole number of at least 1, found a list",
    "samples: {a: 1}": "samples: expected a whole number of at least 1, found keys",
    "samples:": "samples null: expected a whole number of at least 1, or no such key",
    "samples: 1e99": "samples 1e+99: expected a whole number of at least 1",
    "samples: .inf": "samples inf: expected a whole number of at least 1",
    "samples: '3 of each'": "samples '3 of each': expected a whole number of at least 1",
    "seed: abc": "seed 'abc': expected a whole number of at least 0 and below 2147483648",
    "run_dir: 3": 'run_dir 3: expected text; put it in quotes: "3"',
    "run_dir: [a]": "run_dir: expected text, found a list",
    "agent: {name: nop, max_turns: many}": "agent.max_turns 'many': expected a whole number of at least 1",
    "agent: {name: nop, timeout_s: 30m}": "agent.timeout_s '30m': expected a number above 0; write the number of "
    "seconds alone",
    "agent: {name: nop, args: 3}": "agent.args 3: expected names with their values",
    "model: small": "model 'small': expected keys such as engine: and path:",
    "model: {path: m, gpus: two}": "model.gpus 'two': expected a whole number of at least 0",
    "model: {path: m, gpus: 0.5}": "model.gpus 0.5: expected a whole number of at least 0",
    "model: {path: m, servers: 0}": "model.servers 0: expected a number of servers, or [min, max] such as [1, 4]",
    "model: {path: m, servers: {most: 4}}": "model.servers: expected a number of servers, or [min, max] such as [1, 4]",
    "model: {path: m, servers: [3, 1]}": "model.servers: expected a number of servers, or [min, max] such as [1, 4]",
    "model: {path: m, args: [a]}": "model.args: expected names with their values, found a list",
    "environment: gateway": "environment 'gateway': expected keys such as network: and images:",
    "environment: {nested: perhaps}": "environment.nested 'perhaps': expected true or false",
    "environment: {limits: {cpus: abc}}": "environment.limits.cpus 'abc': expected a number above 0",
    "pool: {a: heavy}": "pool.a 'heavy': expected a number above 0",
    "limits: 3": "limits 3: expected keys such as core_hours: and gpu_hours:",
    "limits: {core_hours: -1}": "limits.core_hours -1: expected a number above 0",
    "slurm: {pods: {mem: 4 GB}}": "mem '4 GB': write a number and its unit, such as 16G, or 0 for all memory of a node",
    "slurm: {setup: 3}": "slurm.setup 3: expected a list",
}
"""Line of a campaign file → message about its value."""

NO_RUN = "not a run directory (no run.json); list run directories with: megaflow-hpc list"
A_FILE = "file: a file, expected a run directory; list run directories with: megaflow-hpc list"
NO_STORE = "expected a trajectories.h5"
NO_H5 = f"file: not an HDF5 file; {NO_STORE}"

WORDS = {
    "rnu good.yaml": "rnu: no such verb; did you mean run?",
    "run": "run: missing: CAMPAIGN; see: megaflow-hpc run --help",
    "run dir": "dir: cannot be read (Is a directory); name a campaign file, which megaflow-hpc init writes",
    "run tasks/task0": "tasks/task0: cannot be read (Is a directory); it is a task: name it in tasks: of a",
    "run {run}": "cannot be read (Is a directory); it is a run: continue it with megaflow-hpc resume {run}",
    "run project": "(Is a directory); name the file in it: project/campaign.yaml",
    "run secret.yaml": "secret.yaml: cannot be read (Permission denied); ask its owner, or: chmod u+r secret.yaml",
    "run good.yaml --ranks 0": "--ranks: 0: give a whole number of at least 1",
    "run good.yaml --launcher loacl": "--launcher: loacl: expected auto, local or slurm; did you mean local?",
    "plan good.yaml --run-dir {run}": "{run}: is a run directory already; continue it with: megaflow-hpc resume {run}",
    "plan good.yaml --max-rollouts 1": "good.yaml:1: 4 rollouts (tasks x policies x samples), expected at most 1",
    "check good.yaml extra": "extra: one argument too many",
    "submit dir --dry-run": "dir: cannot be read (Is a directory); name a campaign file",
    "prove dir": "dir: cannot be read (Is a directory); name a campaign file",
    "prove good.yaml --wait 0": "--wait: 0: give a number above 0",
    "init project": "campaign.yaml: exists already; name another file, or replace it with --force",
    "init nowhere/c.yaml": "nowhere/c.yaml: there is no directory nowhere; create it, or name another file",
    "init --recipe nosuch": "nosuch: no such recipe; the recipes are: ",
    "extend {run} nowhere.yaml": "nowhere.yaml: cannot be read (No such file or directory); correct the path",
    "extend file": A_FILE,
    "scale file --pods 1": A_FILE,
    "gather file": A_FILE,
    "watch file": A_FILE,
    "cancel dir": f"dir: {NO_RUN}",
    "usage dir": f"dir: {NO_RUN}",
    "logs {run} nosuch": "logs: there is no log, because no job of this run has started",
    "diff {run} a b": "no trajectory 'a' among 0",
    "report file": NO_H5,
    "validate file": NO_H5,
    "compact file": NO_H5,
    "anonymise file -o new.h5": NO_H5,
    "training fit good.yaml": "good.yaml: has no section training; add one, or name another file",
    "training skip {run} 3": "its campaign trains nothing; name a run of a campaign with a section training",
    "tasks new task0": "tasks/task0: exists already; choose another name",
    "tasks new 'my task'": "'my task': expected the id of a task: letters, digits, dot, dash and underscore",
    "tasks list file": "file: no Harbor task directory (one with task.toml) there; build some with: megaflow-hpc tasks "
    "build, or begin one with: megaflow-hpc tasks new NAME",
    "tasks validate tasks": "its image 'base' is not at {here}/images/base.sif; name it with --image FILE.sif",
    "tasks validate tasks --image no.sif": "--image: base: {here}/no.sif: no such file; expected a SIF",
    "tasks validate tasks --jobs 0": "--jobs: 0: give a whole number of at least 1",
    "agents new my_agent": "my_agent.py: exists already; choose another name",
    "agents new 3x": "'3x': expected the name of a Python module, such as my_agent",
    "images manifest dir": "dir: cannot be read (Is a directory)",
    "completion fish": "SHELL: fish: expected bash, zsh or tcsh",
    "help rnu": "rnu: no such verb; did you mean run?",
    "janitor extra": "extra: one argument too many",
    "plan nowhere.yaml": "nowhere.yaml: cannot be read (No such file or directory); correct the path",
    "plan dir": "dir: cannot be read (Is a directory); name a campaign file, which megaflow-hpc init writes",
    "plan good.yaml --only nosuch": "good.yaml:2: no rollout matches --only nosuch; ids look like",
    "plan good.yaml --run-dir file": "file: File exists; correct the path",
    "status nowhere": "nowhere: there is no such directory; list run directories with: megaflow-hpc list",
    "status file": A_FILE,
    "status dir": f"dir: {NO_RUN}",
    "resume file": A_FILE,
    "resume {run} --limit gpu_hours=abc": "gpu_hours=abc: expected hours above 0, as gpu_hours=100, or",
    "resume {run} --limit gpus=3": "--limit: gpus=3: expected core_hours, gpu_hours, wall or usd, as wall=24",
    "scale {run}": "scale: no number: give --pods N or --servers N",
    "scale {run} --pods -3": "--pods: -3: give a whole number of at least 0",
    "watch {run} --every 0": "--every: 0: give a number above 0",
    "show {run} nosuch/default/0": "no trajectory 'nosuch/default/0' among 0",
    "show file 0": f"file: not an HDF5 file; {NO_STORE} (see: megaflow-hpc gather RUN)",
    "validate nowhere": f"nowhere: cannot be read (No such file or directory); {NO_STORE}, or a run directory (see: "
    "megaflow-hpc list)",
    "du dir": "dir: not a run directory (no run.json); list run directories with: megaflow-hpc list",
    "export {run} --format jsnl": "format 'jsnl': there are jsonl, parquet, verl, areal, atif, preds",
    "export {run} --format ,": "format ',': there are jsonl, parquet, verl, areal, atif, preds",
    "export {run} --format jsonl --where 'rewrd > 1'": "column 1: no column 'rewrd'; there are: reward",
    "import empty.jsonl -o new.h5": "empty.jsonl: contains no trajectory; expected JSON lines of megaflow-hpc export",
    "import other.jsonl -o new.h5": "other.jsonl:1: not a trajectory of megaflow-hpc (it lacks 'id', 'task_id', ",
    "import dir -o new.h5": "dir: cannot be read; expected JSON lines of megaflow-hpc export",
    "weights publish {run} dir": "no policy has a model; there are: none",
    "weights send {run} dir": "no policy has a model; there are: none",
    "weights receive {run} dir": "no policy has a model; there are: none",
    "tasks validate dir": "dir: no Harbor task directory (one with task.toml) there; build some with:",
    "tasks import file": "file: expected a .jsonl file",
    "images pull ubuntu": "ubuntu: neither an address (docker://…) nor a SIF file; did you mean docker://ubuntu?",
    "images build docker://x --map foo": "--map foo: expected NAME=VALUE",
}
"""Command line → message."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, base_sif: Path) -> Path:
    """Make a directory with a run, a valid campaign file, an irrelevant file and directory, and two JSONL files."""
    folder = tmp_path_factory.mktemp("wrong")
    for number in range(2):
        write_solved_task(folder / "tasks", f"task{number}")
    for name in ("image/bin", "dir", "programs"):
        (folder / name).mkdir(parents=True)
    (folder / "good.yaml").write_text(GOOD)
    (folder / "lost.yaml").write_text(GOOD.replace("tasks/*", "lost/*"))
    (folder / "file").write_text("x")
    (folder / "empty.jsonl").write_text("")
    (folder / "other.jsonl").write_text('{"a": 1}\n')
    (folder / "my_agent.py").write_text("class MyAgent:\n    async def run(self, task, sandbox, model): ...\n")
    (folder / "broken.sif").write_bytes(base_sif.read_bytes()[:40000])
    (folder / "secret.yaml").write_text(GOOD)
    (folder / "secret.yaml").chmod(0)
    (folder / "project").mkdir()
    (folder / "project" / "campaign.yaml").write_text(GOOD)
    for directory, script in (("crlf", "tests/test.sh"), ("crlf-solution", "solution/solve.sh")):
        (write_solved_task(folder / directory, "task9") / script).write_bytes(b"#!/bin/bash\r\nexit 0\r\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder / "programs"))
        patch.setattr(probe, "require", lambda *_, **__: None)  # there is no Apptainer
        run = Campaign.from_yaml(folder / "good.yaml").plan(folder / "run", launcher="local")
    run.gather()
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into that directory. Mistakes must change nothing in it."""
    monkeypatch.chdir(folder)
    return folder


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    [line] = said.err.splitlines()
    assert line.startswith("megaflow-hpc")
    return line


@pytest.mark.parametrize("wrong", FILES)
def test_a_wrong_campaign_file(wrong: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = FILES[wrong]
    said = said.format(here=here) if "{here}" in said or "{{" in said else said
    (here / "c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in refused(["plan", "c.yaml"], capsys)
    assert not (here / "runs").exists()  # no files remain


@pytest.mark.parametrize("line", VALUES)
def test_a_wrong_value_is_told_what_is_expected(line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [kept for kept in GOOD.splitlines() if kept.partition(":")[0] != line.partition(":")[0]]
    (here / "c.yaml").write_text("\n".join([*lines, line, ""]))
    said = refused(["plan", "c.yaml"], capsys)
    assert said.startswith(f"megaflow-hpc: c.yaml:{len(lines) + 1}: "), said
    assert said.endswith(VALUES[line])


@pytest.mark.parametrize("words", WORDS)
def test_wrong_words(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts)
    said = refused(shlex.split(words.format(run=here / "run")), capsys)
    assert WORDS[words].format(run=here / "run", here=here) in said
    assert sorted(path for path in here.rglob("*") if "__pycache__" not in path.parts) == before


def test_images_build_names_the_line_of_its_campaign(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["images", "build", "lost.yaml"]) == 2
    assert f"lost.yaml:2: tasks: {here}/lost/*: {NO_TASKS}" in capsys.readouterr().err


def test_a_mistake_of_the_file_is_said_before_one_of_the_site(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "sinfo", "scontrol", "srun"):
        program = tmp_path / "bin" / name
        program.write_text("#!/bin/sh\necho no controller answers >&2\nexit 1\n")
        program.chmod(0o755)
    (here / "c.yaml").write_text(GOOD.replace("tasks/*", "nowhere/*"))
    assert main(["plan", "c.yaml"]) == 2
    first, *_ = capsys.readouterr().err.splitlines()
    assert f"/nowhere/*: {NO_TASKS}" in first
