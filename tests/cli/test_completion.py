"""Completion by a real bash, zsh and tcsh, and the man page formatted by a real groff."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from megaflow_hpc.cli import main
from tests.support.places import ROOT
from tests.support.terminals import Terminal

BASH = shutil.which("bash")
GROFF = shutil.which("groff")
ZSH = shutil.which("zsh")
TCSH = shutil.which("tcsh")
SETSID = shutil.which("setsid")

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


def test_zsh_completes_verbs_options_choices_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    settings_of_zsh(tmp_path, capsys.readouterr().out)
    assert ZSH
    with Shell(tmp_path, ZSH, ZDOTDIR=str(tmp_path)) as shell:
        shell.completes("sta", "status ")
        shell.completes("images pu", "images pull ")
        shell.completes("status --ro", "status --rollouts ")
        shell.completes("run --launcher l", "run --launcher local ")
        shell.completes("run camp", "run campaign.yaml ")
        shell.completes("status ru", "status runs/")


def settings_of_zsh(place: Path, script: str) -> None:
    """Write the start-up files of a zsh that may be unpacked in any directory."""
    (place / "_megaflow-hpc").write_text(script)
    assert ZSH
    usr = next(
        usr
        for above in Path(ZSH).resolve().parents
        for usr in (above, above / "usr")
        if (usr / "share" / "zsh").is_dir()
    )
    functions = [path for path in (usr / "share" / "zsh" / "functions").glob("**/") if path.is_dir()]
    modules = (usr / "lib").glob("*/zsh/[0-9]*")
    setting = f"module_path=({' '.join(map(str, modules))})\nfpath=({place} {' '.join(map(str, functions))})\n"
    (place / ".zshenv").write_text(f"setopt no_global_rcs\n{setting}")
    (place / ".zshrc").write_text("PS1='ready> '\nautoload -U compinit\ncompinit -u -D\n")


def test_tcsh_completes_verbs_choices_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 0
    (tmp_path / ".tcshrc").write_text(f"set prompt='ready> '\n{capsys.readouterr().out}")
    assert TCSH
    with Shell(tmp_path, TCSH, HOME=str(tmp_path)) as shell:
        shell.completes("sta", "status ")
        shell.completes("images pu", "images pull ")
        shell.completes("status --usa", "status --usage ")
        shell.completes("run --launcher l", "run --launcher local ")
        shell.completes("run camp", "run campaign.yaml ")
        shell.completes("status ru", "status runs/")


HOSTILE = ("a$(touch ran)", "b`touch ran`", "c;touch ran;", "d\ntouch ran\n", "e\x1b]0;owned\x07", "f'\"$(touch ran)")
"""Names of run directories by other users. Each has a different first character."""


@pytest.mark.slow  # on a terminal, one name after another
@pytest.mark.parametrize("name", ["bash", "zsh", "tcsh"])
def test_a_name_that_is_completed_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """After TAB and Return the program gets the name as one word, and nothing else runs."""
    program = {"bash": BASH, "zsh": ZSH, "tcsh": TCSH}[name]
    assert program
    assert main(["completion", name]) == 0
    script = capsys.readouterr().out
    for one in HOSTILE:
        (tmp_path / one).mkdir()
    (tmp_path / "programs").mkdir()
    told = tmp_path / "told"
    (tmp_path / "programs" / "megaflow-hpc").write_text(f"#!/bin/sh\nprintf '%s\\0' \"$*\" >>{told}\n")
    (tmp_path / "programs" / "megaflow-hpc").chmod(0o755)
    (tmp_path / ".bashrc").write_text(f"PS1='ready> '\n{script}")
    (tmp_path / ".tcshrc").write_text(f"set prompt='ready> '\n{script}")
    settings_of_zsh(tmp_path, script)
    words = ["--rcfile", str(tmp_path / ".bashrc"), "-i"] if name == "bash" else []
    path = f"{tmp_path / 'programs'}:/usr/bin:/bin"  # the directory of touch
    with Shell(tmp_path, program, *words, HOME=str(tmp_path), ZDOTDIR=str(tmp_path), PATH=path) as shell:
        for one in HOSTILE:
            shell.enters(f"status {one[0]}\t", told)
        assert "\x1b]0;owned" not in shell.written
        assert told.exists(), shell.written
    assert not (tmp_path / "ran").exists()
    given = told.read_text().split("\0")
    assert f"status {HOSTILE[0]}" in [words.rstrip("/ ") for words in given], given


class Shell:
    """A shell on a terminal, in a directory with a campaign file and a directory of runs."""

    def __init__(self, place: Path, program: str, *words: str, **environ: str) -> None:
        (place / "runs").mkdir()
        (place / "campaign.yaml").touch()
        assert SETSID
        # Use a controlling terminal; without one, tcsh does no line editing.
        self._terminal = Terminal(100, 30, SETSID, "--ctty", "--wait", program, *words, cwd=place, **environ)

    def __enter__(self) -> Shell:
        self._terminal.until("ready>")
        return self

    def completes(self, typed: str, shown: str) -> None:
        """Type the beginning of a command line and TAB, and wait for the line."""
        self._terminal.write(f"megaflow-hpc {typed}\t.")  # the dot marks the cursor
        self._terminal.until(f"ready> megaflow-hpc {shown}.")
        self._terminal.write("\x15\x0c")  # kill the line and clear the screen

    def enters(self, typed: str, told: Path) -> None:
        """Type a command line with a TAB and Return; wait until the program ran, or for a timeout."""
        before, end = told.stat().st_size if told.exists() else 0, time.monotonic() + 3
        self._terminal.write(f"megaflow-hpc {typed}")
        self._terminal.settle()
        self._terminal.write("\r")
        while not (told.exists() and told.stat().st_size > before) and time.monotonic() < end:
            self._terminal.settle()
        self._terminal.write("\x03")  # if a quote is open
        self._terminal.settle()  # before more input, which an interrupt would discard

    @property
    def written(self) -> str:
        """All output so far."""
        return self._terminal.written.decode(errors="replace")

    def __exit__(self, *error: object) -> None:
        self._terminal.write("\x15exit\r")
        self._terminal.wait()


def test_the_man_page_is_laid_out_without_a_warning_and_names_verbs_and_variables() -> None:
    assert GROFF
    page = ROOT / "share" / "man" / "man1" / "megaflow-hpc.1"
    [data] = (Path(GROFF).resolve().parents[1] / "share" / "groff").glob("1.*")  # it may be unpacked in any directory
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
