"""No long operation is silent: everything that grows with a campaign runs while its verb shows progress.

No times are measured. The verbs run unchanged, and each call of a function that takes long in a large campaign checks
that a progress line is open.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megaflow_hpc.campaign import plan
from megaflow_hpc.campaign.planning import draft
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli import main
from megaflow_hpc.cli.progress import PlanProgress, under_way
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.report.figures import LoadedRun
from megaflow_hpc.rundir.marks import FINISHED
from megaflow_hpc.trajectories.exports import export, jsonl
from megaflow_hpc.trajectories.maintenance import anonymise, compact, gather, validate
from tests.support.samples import commit, trajectory

LONG: dict[str, list[Any]] = {
    "plan {campaign}": [draft.expand, plan.write],
    "check {campaign} --no-site": [draft.expand],
    "run {campaign} --launcher local --dry-run": [draft.expand],
    "gather {run} --rebuild": [gather.gather],
    "status {run}": [Monitor.status],
    "resume {run} --launcher local": [gather.gather, Run._recount],  # each poll shows the status
    "cancel {run}": [Monitor.status],
    "validate {run} --digests": [validate.validate, validate.column_digests],
    "compact {run}": [compact.compact],
    "anonymise {run} -o {run}/copy.h5": [anonymise.anonymise],
    "du {run}": [compact.usage_of_run],
    "export {run} --format jsonl": [export],
    "import {run}/export/trajectories.jsonl -o {run}/back.h5": [jsonl.import_jsonl],
    "report {run} --prometheus {run}/metrics.prom": [LoadedRun.__init__],
    "compact {run} --drop-journals --dry-run": [compact.drop_journals],
}
"""Command lines, in an order in which each finds its input, and the functions that take long in them."""


@contextmanager
def observed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[str, bool]]]:
    """Count the calls of each function, and those while a progress line with a step was open."""
    open_: list[PlanProgress] = []
    names = {function.__code__: function.__qualname__ for functions in LONG.values() for function in functions}
    calls: Counter[tuple[str, bool]] = Counter()
    enter, leave = PlanProgress.__enter__, PlanProgress.__exit__

    def entered(watch: PlanProgress) -> PlanProgress:
        open_.append(watch)
        return enter(watch)

    def left(watch: PlanProgress, *error: object) -> None:
        open_.remove(watch)
        leave(watch, *error)

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            calls[names[frame.f_code], any(watch._step for watch in open_)] += 1

    monkeypatch.setattr(PlanProgress, "__enter__", entered)
    monkeypatch.setattr(PlanProgress, "__exit__", left)
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def test_what_takes_long_with_a_large_campaign_is_spoken_for(
    planned: Run, campaign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [rollout.id for block in read_blocks(planned.dir) for rollout in block.rollouts]
    commit(planned.dir, "pod", *((0, 0, trajectory(number, id=id_)) for number, id_ in enumerate(ids)))
    write_json(planned.path / FINISHED, {"by": "pod.0"})
    for line, functions in LONG.items():
        with observed(monkeypatch) as calls:
            status = main(shlex.split(line.format(campaign=campaign, run=planned.path)))
        assert status in (0, 1), (line, capsys.readouterr().err)
        for name in (function.__qualname__ for function in functions):
            assert (calls[name, True] > 0, calls[name, False]) == (True, 0), (line, name)


def test_a_step_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(PlanProgress, "EVERY_S", 0.01)
    said = ""
    with under_way("exporting RUN") as watch:
        watch.detail("jsonl 3/9 trajectories")
        while "exporting RUN, jsonl 3/9 trajectories: 0:00" not in said:  # until the test's own timeout
            said += capsys.readouterr().err
        watch.step("writing")
        while "writing: 0:00" not in said:
            said += capsys.readouterr().err
