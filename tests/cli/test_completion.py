"""What a shell completes, asked of a real bash; and the man page, laid out by a real groff."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megaflow_hpc.cli import main
from tests.support.places import ROOT

BASH = shutil.which("bash")
GROFF = shutil.which("groff")

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
words=($(complete -p megaflow-hpc)); ask=
for ((i = 0; i < ${#words[@]}; i++)); do [ "${words[i]}" != -F ] || ask=${words[i + 1]}; done
"$ask" megaflow-hpc "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_verbs_options_choices_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "megaflow-hpc"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "runs").mkdir()
    (tmp_path / "campaign.yaml").touch()
    assert BASH

    def completed(*words: str) -> set[str]:
        command = [BASH, "-c", ASK, "bash", str(script), "megaflow-hpc", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=30, check=True)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert completed("sta") == {"status"}
    assert completed("images", "pu") == {"pull"}
    assert completed("status", "--ro") == {"--rollouts"}
    assert completed("run", "--launcher", "") == {"auto", "local", "slurm"}
    assert "campaign.yaml" in completed("run", "camp")
    assert "runs" in {word.rstrip("/") for word in completed("status", "ru")}


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script_of_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in ("status", "images", "resume"))


def test_the_man_page_is_laid_out_without_a_warning_and_names_verbs_and_variables() -> None:
    assert GROFF
    page = ROOT / "share" / "man" / "man1" / "megaflow-hpc.1"
    [data] = (Path(GROFF).resolve().parents[1] / "share" / "groff").glob("1.*")  # it may have been unpacked anywhere
    paths = {
        "PATH": str(Path(GROFF).parent),
        "GROFF_FONT_PATH": str(data / "font"),
        "GROFF_TMAC_PATH": str(data / "tmac"),
    }
    command = [GROFF, "-man", "-Tutf8", "-Kutf8", "-ww", "-P-c", "-P-b", "-P-u", str(page)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={"PATH": str(Path(GROFF).parent), **paths}, timeout=60, check=True
    )
    assert done.stderr == ""
    assert "  megaflow-hpc images build\n" in done.stdout
    assert "  megaflow-hpc resume RUN --failed --no-wait\n" in done.stdout
    assert "MEGAFLOW_SCRATCH" in done.stdout
