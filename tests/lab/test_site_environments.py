"""Jobs whose programs come from what sites have: environment modules, and a relocatable prefix as conda makes them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from megaflow_hpc.trajectories import open_trajectories
from tests.support.campaigns import Make
from tests.support.labs import pods
from tests.support.places import ROOT
from tests.support.requirements import REMEDY

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]

AGENT = """\
import json, os, shutil, sys
from megaflow_hpc.types import AgentResult

class Tells:
    async def run(self, task, sandbox, model):
        names = ("LOADEDMODULES", "SITE_LICENCE", "CONDA_PREFIX")
        said = {name: os.environ.get(name) for name in names}
        said |= {"python": sys.executable, "tool": shutil.which("site-tool")}
        return AgentResult(messages=[{"role": "assistant", "content": json.dumps(said)}])
"""

MODULE = """\
#%Module1.0
prepend-path PATH {place}/bin
setenv SITE_LICENCE 1717@licences
"""

ACTIVATE = """\
export CONDA_PREFIX=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$CONDA_PREFIX/bin:$PATH"
for hook in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do . "$hook"; done
"""
"""What ``bin/activate`` of an environment that conda-pack has packed does."""


def tool(place: Path) -> Path:
    """A program of the site's, which is on nobody's PATH."""
    program = place / "bin" / "site-tool"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\necho tool\n")
    program.chmod(0o755)
    return program


def told(make_campaign: Make, tmp_path: Path, setup: list[str], shell: str) -> tuple[dict[str, str], str]:
    """Runs a campaign from a shell: what its agent saw in the job, and what else the shell printed."""
    (tmp_path / "tells.py").write_text(AGENT)
    campaign = make_campaign(1, f"{pods(count=1)}  setup: {json.dumps(setup)}\n", agent="tells:Tells")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MODULE", "LOADED"))}
    done = subprocess.run(
        ["bash", "-euc", shell, "bash", str(campaign), str(tmp_path / "run")],
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with open_trajectories(tmp_path / "run") as store:
        [row] = list(store)
        return json.loads(row.messages[-1]["content"]), done.stdout


def modules(tmp_path: Path) -> Path:
    """The lines by which a shell gets the command ``module``; the package may have been unpacked anywhere."""
    program = shutil.which("modulecmd")
    assert program, f"no environment modules; {REMEDY}"
    usr = Path(program).resolve().parents[1]
    init = tmp_path / "modules.sh"
    init.write_text((usr / "share" / "modules" / "init" / "bash").read_text().replace("/usr/", f"{usr}/"))
    return init


def test_jobs_load_modules_and_the_interpreter_is_the_one_that_a_module_gave(
    make_campaign: Make, tmp_path: Path
) -> None:
    site, ours = tmp_path / "modules" / "site", tmp_path / "modules" / "megaflow-hpc"
    for folder in (site, ours):
        folder.mkdir(parents=True)
    program = tool(tmp_path / "opt")
    (site / "2.1").write_text(MODULE.format(place=tmp_path / "opt"))
    shipped = (ROOT / "launchers" / "site" / "modulefile").read_text()
    (ours / "0.1.0").write_text(shipped.replace("/opt/apps/megaflow-hpc/0.1.0", sys.prefix))
    shell = f"""
        PATH=/usr/bin:/bin:$(dirname "$(command -v apptainer)")
        set +eu; . {modules(tmp_path)}; set -e
        module use {tmp_path}/modules
        ! command -v megaflow-hpc
        module load megaflow-hpc/0.1.0
        command -v megaflow-hpc
        megaflow-hpc run "$1" --run-dir "$2" >&2
        module unload megaflow-hpc
        command -v megaflow-hpc || echo unloaded
    """
    seen, printed = told(make_campaign, tmp_path, [f"module use {tmp_path}/modules", "module load site/2.1"], shell)
    assert printed.split() == [f"{sys.prefix}/bin/megaflow-hpc", "unloaded"]
    assert seen["LOADEDMODULES"].split(":")[-1] == "site/2.1"
    assert (seen["SITE_LICENCE"], seen["tool"]) == ("1717@licences", str(program))
    assert seen["python"].startswith(f"{sys.prefix}/bin/python")


def test_jobs_run_in_a_relocated_prefix_with_hooks_as_conda_has_them(make_campaign: Make, tmp_path: Path) -> None:
    made, prefix = tmp_path / "made", tmp_path / "env"
    venv.create(made, with_pip=False)
    packages = made / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    paths = [os.environ.get("PYTHONPATH", ""), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (packages / "ours.pth").write_text("\n".join(dict.fromkeys(filter(None, paths))) + "\n")
    for entry in Path(sys.prefix, "lib").iterdir():  # MPI and what it needs, which lie there in conda's too
        if not entry.name.startswith("python"):
            (made / "lib" / entry.name).symlink_to(entry)
    hooks = made / "etc" / "conda" / "activate.d"
    hooks.mkdir(parents=True)
    (made / "conda-meta").mkdir()
    (hooks / "licence.sh").write_text('export SITE_LICENCE="$CONDA_PREFIX/licence"\n')
    (made / "bin" / "activate").write_text(ACTIVATE)
    tool(made)
    made.rename(prefix)
    shell = f"""
        set +u; . {prefix}/bin/activate
        python -m megaflow_hpc run "$1" --run-dir "$2" >&2
    """
    seen, _ = told(make_campaign, tmp_path, [f". {prefix}/bin/activate"], shell)
    assert seen["python"] == f"{prefix}/bin/python"
    assert seen["CONDA_PREFIX"] == str(prefix)
    assert (seen["SITE_LICENCE"], seen["tool"]) == (f"{prefix}/licence", f"{prefix}/bin/site-tool")
