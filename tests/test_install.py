"""The wheel in environments with nothing else in them: what the core install does, and the README's first campaign."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.resources import INSTALL, __version__
from megaflow_hpc.trajectories import gather
from tests.support.campaigns import Make, rows
from tests.support.places import LAUNCHERS, ROOT
from tests.support.requirements import required
from tests.support.samples import commit, run_dir, trajectory

pytestmark = pytest.mark.slow  # packages are installed: some 15 s for each interpreter


LOCALLY = ("--launcher", "local", "--ranks", "2", "--json")


class Environment:
    """A virtual environment of its own, and a shell in which it comes first and nothing of ours is to be seen."""

    def __init__(self, python: str, place: Path) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", place], check=True)
        self.place, self.bin = place, place / "bin"
        # Debian's own pip lies in a package of wheels beside each of its interpreters; others' have it installed.
        wheels = sorted(Path(python).resolve().parents[1].glob("share/python-wheels/pip-*.whl"))
        inside = [str(self.bin / "python"), str(wheels[0] / "pip")] if wheels else []
        self.pip = inside or [python, "-m", "pip", "--python", str(self.bin / "python")]
        ours = (sys.prefix, str(ROOT))
        path = [entry for entry in os.environ["PATH"].split(":") if not entry.startswith(ours)]
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLURM", "VIRTUAL_ENV"))
        } | {"PATH": ":".join([str(self.bin), *path]), "MEGAFLOW_SCRATCH": str(place), "TMPDIR": str(place)}

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment to its end, outside the checkout."""
        return subprocess.run(
            [*map(str, words)],
            cwd=self.place,
            env=self.environment,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
            check=False,
        )

    def say(self, *words: object) -> str:
        """Runs a program that must succeed; returns what it printed."""
        done = self.run(*words)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, requirement: str) -> None:
        """``pip install``, of the versions in launchers/requirements.txt where it names one."""
        names = re.findall(r"^([a-zA-Z][^\\]*?) \\$", (LAUNCHERS / "requirements.txt").read_text(), re.MULTILINE)
        (self.place / "versions.txt").write_text("\n".join(names))
        quick = ["--quiet", "--no-compile", "--disable-pip-version-check"]
        self.say(*self.pip, "install", *quick, "--constraint", self.place / "versions.txt", requirement)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    place = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(ROOT)]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *build], check=True)
    (found,) = place.glob("*.whl")
    return found


def python(version: str) -> str:
    """An interpreter of a version; launchers/python.sh brings those that the machine lacks."""
    return subprocess.run(
        ["bash", LAUNCHERS / "python.sh", version],
        env=os.environ | {"MEGAFLOW_PYTHON": f"python{version}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()


def first_campaign(environment: Environment, wheel: Path, image: Path) -> dict[str, tuple[str, float]]:
    """Types what the README says of the first campaign, with this wheel; returns the rows stored."""
    chapter = (ROOT / "README.md").read_text().partition("## Your first campaign")[2].partition("## ")[0]
    typed = chapter.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert typed[0] == INSTALL
    environment.install(f"{wheel}[mpi]")
    campaign = environment.place / "campaign.yaml"
    result: dict[str, Any] = {}
    for program, verb, *words in (shlex.split(line, comments=True) for line in typed[1:]):
        if verb == "doctor":
            done = environment.run(
                program, verb, *words, "--json"
            )  # of this machine's Slurm it may think what it likes
            found = {finding["check"]: finding["level"] for finding in json.loads(done.stdout)["findings"]}
            assert {found[name] for name in ("mpi4py", "aiohttp", "mpiexec", "apptainer", "containers")} == {"ok"}
        elif verb == "run":
            result = json.loads(environment.say(program, verb, *words, *LOCALLY))
        else:
            environment.say(program, verb, *words)
        if verb == "init":  # what a person would edit
            text = (
                campaign.read_text()
                .replace("agent: oracle ", "agent: [oracle, nop] ")
                .replace("docker://*", str(image))
                .replace("docker://debian:12", str(image))
            )
            campaign.write_text(text.replace("network: gateway", "network: none"))
    return rows(environment.place / result["run"])


def test_the_core_install_reads_and_plans_and_names_the_extra_that_runs(
    tmp_path: Path, wheel: Path, make_campaign: Make
) -> None:
    run = run_dir(tmp_path)
    commit(run, "pod", *((number, 0, trajectory(number)) for number in range(3)))
    gather(run)
    here = Environment(sys.executable, tmp_path / "core")
    here.install(str(wheel))
    absent = ("mpi4py", "aiohttp", "cryptography", "minisweagent", "pyarrow", "torch")
    code = f"import importlib.util as u; print([name for name in {absent} if u.find_spec(name)])"
    assert here.say("python", "-c", code).strip() == "[]"

    file = str(run.trajectories)
    shown = here.say("megaflow-hpc", "show", file, "task/default/1")
    assert "task/default/1" in shown
    assert json.loads(here.say("megaflow-hpc", "validate", file, "--digests", "--json"))
    assert "complete" in here.say("megaflow-hpc", "completion", "bash")
    here.say("megaflow-hpc", "export", file, "--format", "jsonl", "--output", "rows")
    (exported,) = (here.place / "rows").glob("*.jsonl")
    assert len(exported.read_text().splitlines()) == 3
    code = f"import megaflow_hpc; s = megaflow_hpc.open_trajectories({file!r}); print(*sorted(s.batch(s.ids)))"
    assert {"tokens", "loss_mask", "logprobs"} <= set(here.say("python", "-c", code).split())
    refused = here.run("megaflow-hpc", "export", file, "--format", "parquet", "--output", "table")
    assert refused.returncode == 2
    assert "megaflow-hpc[export]" in refused.stderr

    campaign = make_campaign(1)
    here.say("megaflow-hpc", "check", "--no-site", campaign)
    code = f"from megaflow_hpc import Campaign; print(Campaign.from_yaml('{campaign}').plan(launcher='local').path)"
    planned = here.say("python", "-c", code).strip()
    assert Path(planned, "run.json").exists()
    refused = here.run("megaflow-hpc", "run", campaign, "--launcher", "local")
    assert refused.returncode == 3
    assert "lacks aiohttp, cryptography, mpi4py" in refused.stderr
    assert 'pip install "megaflow-hpc[mpi]"' in refused.stderr

    # What messages point at came along.
    code = "from megaflow_hpc.resources import resource; print(resource('sbatch'), resource('launchers/agents.sh'))"
    scripts, agents = here.say("python", "-c", code).split()
    assert Path(scripts, "sandbox_pods.sbatch").read_text() == (ROOT / "sbatch" / "sandbox_pods.sbatch").read_text()
    assert agents.startswith(str(here.place))
    # It knows the versions, and finds them installed by the set-up.
    assert here.say("bash", agents, "claude-code").strip() == required("MEGAFLOW_AGENTS")


def test_the_first_campaign_runs_in_the_newest_python(tmp_path: Path, wheel: Path, base_sif: Path) -> None:
    here = Environment(python("3.13"), tmp_path / "new")
    first = {"count-words/oracle/0": ("completed", 1.0), "count-words/nop/0": ("completed", 0.0)}
    assert first_campaign(here, wheel, base_sif) == first
    assert here.say("python", "-c", "import sys; print(sys.version_info[:2])").strip() == "(3, 13)"


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(about).decode()
        licence = archive.read(next(name for name in names if name.endswith("LICENSE"))).decode()
    assert licence == (ROOT / "LICENSE").read_text()
    assert "License-Expression: Apache-2.0\n" in metadata
    assert f"Version: {__version__}\n" in metadata
    assert f"**Version {__version__}, beta.**" in metadata  # the README
    for minor in (11, 12, 13):
        assert f"Classifier: Programming Language :: Python :: 3.{minor}\n" in metadata
    assert not [name for name in names if not name.startswith(("megaflow_hpc/", "megaflow_hpc-"))]
    assert any(name.endswith(".data/data/share/man/man1/megaflow-hpc.1") for name in names)
    assert f"megaflow_hpc/environments/sandbox/commands/runner-{os.uname().machine}" in names
