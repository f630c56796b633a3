"""Tries the functions of a section ``training`` on small examples, before anything is queued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from megaflow_hpc.campaign.job_environment import trainer_python
from megaflow_hpc.campaign.planning.model_paths import Where
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.training.methods import methods_of

TIMEOUT_S = 300.0
"""Limit in seconds on all functions together. From a cold network file system, importing torch may take a minute."""
PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from megaflow_hpc.training.trainer.probe import main; main()"


class Tried:
    """Outcome of trying a campaign's functions.

    Attributes:
        code: names of their files and directories next to the campaign file.
        digests: module → digest of its source file.
        warnings: functions that cannot be tried here, because a library is missing. Trainers try them again.
    """

    def __init__(self, code: tuple[str, ...] = (), digests: dict[str, str] | None = None) -> None:
        self.code, self.digests = code, digests or {}
        self.warnings: list[str] = []


def check_methods(training: TrainingConfig, base: Path, where: Where) -> Tried:
    """Calls each function on a small example in the trainer's interpreter, in a separate process.

    If this machine lacks that interpreter, the functions run in this one. It may lack their libraries, such as torch.

    Args:
        training: the section ``training``.
        base: directory of the campaign file, searched first.
        where: locates keys of the campaign file.

    Raises:
        Mistakes: functions cannot be imported or called, or return something else than their contracts say.
    """
    methods = methods_of(training)
    if not methods:
        return Tried()
    python = trainer_python()
    is_trainers = python != sys.executable and Path(python).exists()
    question = json.dumps({"training": training.model_dump(mode="json"), "beside": str(base.absolute())})
    command = [python if is_trainers else sys.executable, "-c", PROGRAM, str(Path(__file__).parents[3])]
    names = ", ".join(sorted({method.name for method in methods.values()}))
    try:
        done = subprocess.run(
            command, input=question, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"training: {names}: trying them took longer than {TIMEOUT_S:g} s") from None
    except ValueError:
        raise ConfigError(f"training: {names}: trying them ended {command[0]} (exit {done.returncode})") from None
    tried = Tried(tuple(answer["code"]), answer["digests"] if is_trainers else {})
    mistakes = []
    for key, (error, lacks) in answer["errors"].items():
        line = f"{where(key)}: {key}: {error}"
        if lacks and not is_trainers:
            tried.warnings.append(f"{line}: not tried here; trainers try it before their first step")
        else:
            mistakes.append(line)
    if mistakes:
        raise Mistakes(mistakes)
    return tried
