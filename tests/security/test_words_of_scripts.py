"""What batch scripts read out of a run directory: words that are compared, and never run, split or taken as options."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT

SLURM = ROOT / "megaflow_hpc" / "slurm"
TYPES = "pmix pmi2"
WORDS: dict[str, bytes] = {
    "shell text": b"$(touch ran)",
    "backquotes": b"`touch ran`",
    "another command": b"pmix; touch ran",
    "globs": b"*",
    "globs and a type": b"* pmix",
    "an option": b"pmix --export=NONE",
    "options": b"--mpi=none --jobid=1",
    "lines": b"pmix\npmi2\n--overlap",
    "a type of another site": b"cray_shasta",
    "a long word": b"pmix" * 100_000,
    "long, and then a type": b" " * 100_000 + b"pmix",
    "part of a type": b"pmi",
    "bytes": bytes(range(1, 256)),
    "nothing": b"",
    "zeros": bytes(4096),
    "a quote": b"' pmix",
    "of this file": b"of this file",
}


def part(name: str, first: str, last: str) -> str:
    """The lines of a script from one to another."""
    text = (SLURM / name).read_text()
    start = text.index(first)
    return text[start : text.index(last, start)]


def run(script: str, folder: Path, **variables: str) -> str:
    """Runs it by bash in a directory, with the options that the script has; what it says on stderr is an error."""
    done = subprocess.run(
        ["bash", "-uc", script],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "RUN": str(folder), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=20,
        check=True,
    )
    assert done.stderr == b""
    return done.stdout.decode("utf-8", "surrogateescape")


def tried(folder: Path) -> list[str]:
    """The types of srun --mpi that a pod would try, in their order."""
    choice = part("pods.sh", "known=", "for MEGAFLOW_MPI in").replace("@CLUSTER@", "")
    loop = 'for MEGAFLOW_MPI in $MEGAFLOW_MPI; do printf "<%s>" "$MEGAFLOW_MPI"; done'
    said = run(f"{choice}\n{loop}", folder, MEGAFLOW_MPI=TYPES, MEGAFLOW_POD_DIR=str(folder))
    return re.findall("<([^>]*)>", said)


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_a_remembered_type_of_mpi_runs_nothing_and_changes_nothing(tmp_path: Path, word: bytes) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "mpi").write_bytes(word)
    assert tried(tmp_path) == TYPES.split()
    assert not (tmp_path / "ran").exists()


def test_a_type_that_worked_is_tried_first_and_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    known = tmp_path / "ledger" / "mpi"
    assert tried(tmp_path) == TYPES.split()
    for word in ("pmi2\n", "pmi2"):
        known.write_text(word)
        assert tried(tmp_path) == ["pmi2", *TYPES.split()]
    known.unlink()
    os.mkfifo(known)
    assert tried(tmp_path) == TYPES.split()
    known.unlink()
    known.symlink_to("/dev/zero")
    assert tried(tmp_path) == TYPES.split()


def test_only_elements_of_arrays_are_released_or_cancelled(tmp_path: Path) -> None:
    """``scancel --me`` ends all jobs that a user has."""
    (tmp_path / "logs").mkdir()
    names = ["--me", "-u root", "1 --me", "$(touch ran)", "7_3\n--me", "*", "", "_", "１２", "12", "12_3", "456_0"]
    for name in names:
        (tmp_path / "logs" / f"pod-{name}.held").touch()
    function = part("trainer.sh", "held_pods() {", "held_pods scontrol release")
    said = run(f'{function}\nasked() {{ printf "<%s>" "$@" >>said; }}\nheld_pods asked cancel; cat said', tmp_path)
    assert sorted(re.findall("<cancel><([^>]*)>", said)) == ["12", "12_[3]", "456_[0]"]
    left = {path.name for path in (tmp_path / "logs").iterdir()}
    assert left == {f"pod-{name}.held" for name in names[:-3]}
    assert not (tmp_path / "ran").exists()


def test_held_elements_are_released_in_one_request_or_else_each_alone(tmp_path: Path) -> None:
    """Slurm refuses a list that names an element which has ended."""
    (tmp_path / "logs").mkdir()
    held = [tmp_path / "logs" / f"pod-7_{n}.held" for n in range(3)]
    function = part("trainer.sh", "held_pods() {", "held_pods scontrol release")

    def released(answer: str) -> list[str]:
        for path in held:
            path.touch()
        script = f'{function}\nasked() {{ echo "$1" >>said; {answer}; }}\nheld_pods asked; cat said; rm said'
        return run(script, tmp_path).split()

    assert released("true") == ["7_[0,1,2]"]
    assert not any(path.exists() for path in held)
    ended = 'case $1 in *1*) echo "Invalid job id specified for job $1" >&2; return 1 ;; esac'
    assert released(ended) == ["7_[0,1,2]", "7_0", "7_1", "7_2"]
    assert [path for path in held if path.exists()] == [held[1]]
    assert released('echo "Unable to contact slurm controller" >&2; return 1') == ["7_[0,1,2]"]
    assert all(path.exists() for path in held)


AGAIN = "again trainer requeue 7 && echo taken || echo refused"


@pytest.mark.parametrize(
    ("scontrol", "said"),
    [
        ("exit 0", "taken"),
        ("echo Job is pending execution >&2; exit 1", "taken"),
        ("kill -TERM $$", "taken"),
        ("echo Requested operation is presently disabled >&2; exit 1", "refused"),
        ("test -e asked && exit 0; touch asked; exit 124", "taken"),
    ],
)
def test_a_request_that_slurm_takes_is_not_called_refused(tmp_path: Path, scontrol: str, said: str) -> None:
    """Slurm ends the job that it requeues, and with it the commands of its shell."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f"#!/bin/bash\n{scontrol}\n")
    program.chmod(0o755)
    (tmp_path / "run.json").touch()
    text = (SLURM / "requeue.sh").read_text()
    function = text[text.index("again() {") :]
    script = f'{function}\nsleep() {{ [ "$1" -lt 30 ] || return 143; }}\nrequeues=yes\n{AGAIN}'
    done = run(script, tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.splitlines()[-1] == said
    assert (tmp_path / "ledger" / "refused" / "7").exists() == (said == "refused")
    if "asked" in scontrol:
        assert "scontrol requeue 7: no answer (exit status 124)" in done


def test_a_consumers_name_is_no_pattern_among_the_jobs(tmp_path: Path) -> None:
    """A pod holds its element for a trainer that waits in the queue, by the policy that the job's record names."""
    for folder in ("open", "jobs"):
        (tmp_path / "ledger" / folder).mkdir(parents=True)
    (tmp_path / "ledger" / "jobs" / "1.json").write_text('{"role": "trainer", "id": "1", "policy": "default"}')
    look = part("pods.sh", '    for open in "$RUN"/ledger/open/*', '    if [ -n "${awaited:-}" ]')

    def awaited(name: str) -> str:
        consumer = tmp_path / "ledger" / "open" / name
        consumer.touch()
        os.utime(consumer, (0, 0))
        said = run(f'{look}\nprintf "<%s>" "${{awaited:-}}"', tmp_path)
        consumer.unlink()
        return said

    assert awaited("default") == "<default>"
    for name in (".*", "d.*t", "--help", "$(touch ran)", "-f", '", "', "[^x]*", "x\ny", "default\n"):
        assert awaited(name) == "<>", name
    assert not (tmp_path / "ran").exists()


def test_a_pod_that_slurm_has_started_elsewhere_leaves_the_element_to_that_start(tmp_path: Path) -> None:
    leases = tmp_path / "ledger" / "leases"
    leases.mkdir(parents=True)
    look = part("pods.sh", 'for lease in "$RUN/ledger/leases', 'if [ "$state" = lost ]')

    def state(*names: str) -> str:
        for name in names:
            (leases / name).touch()
        return run(f'state=lost\n{look}\nprintf %s "$state"', tmp_path, MEGAFLOW_POD="8_1", MEGAFLOW_START="9")

    assert state() == "lost"
    assert state("8_1.9", "8_1.8", "8_11.10", "8_1.", "8_1.x10", "8_1.-10", "8_1." + "9" * 30) == "lost"
    assert state("8_1.11") == "superseded"


def test_no_script_reads_more_words_of_a_run_directory() -> None:
    """What is substituted from a file is listed here, with the test or the quotes that hold it."""
    known = {
        "head -c 64 \"$known\" | tr -d '\\0'",  # above
        'head -c 6 "$RUN/training/$policy/last" 2>/dev/null',  # compared by case
        'head -c 20 "$RUN/logs/trainer-$job.start"',  # compared in quotes
        'ls -q "$RUN/training" 2>/dev/null',  # said in quotes
        'wc -c 2>/dev/null <"$count" || echo 0',  # a number by wc
        'find "$open" -mmin +10 2>/dev/null',  # whether it says anything
        'cat "$MEGAFLOW_POD_DIR/state" 2>/dev/null || echo lost',  # the pod's own, of mode 0700
        'cat "$private/served"',  # the job's own, of mode 0700
        'cat "/proc/$PPID/comm" 2>/dev/null',
    }
    reading = re.compile(r"\$\(((?:cat|head|tail|ls|wc|find|grep|<)\b[^()]*)\)")
    for path in sorted(SLURM.glob("*.sh")):
        for words in reading.findall(path.read_text()):
            assert words in known, (path.name, words)
        sources = re.compile(r"(?:^[ \t]*|[;&|] *|(?:then|else|do) +)(?:read|eval|mapfile|source|\.) ([^;\n]*)", re.M)
        known_sources = ['"/dev/fd/$own/env.sh"'] if path.name == "own.sh" else []  # whose owner was looked at
        assert sources.findall(path.read_text()) == known_sources
