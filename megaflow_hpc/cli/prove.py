"""``prove``: tests a real site in about half an hour and writes a report."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megaflow_hpc.cli.doctor import say_finding
from megaflow_hpc.cli.output import note, print_json
from megaflow_hpc.cli.verb import Subparsers, above_zero, add_verb
from megaflow_hpc.errors import MegaflowError, SiteError

if TYPE_CHECKING:
    from megaflow_hpc.campaign.facade import Run
    from megaflow_hpc.prove.report import Finding, ProofReport
    from megaflow_hpc.prove.trials import ProofSite

TRIALS = ("nodes", "worker", "walltime", "model", "preemption")
ERRORS = (MegaflowError, OSError)
CORRECT = "correct what the message names, then repeat this trial"


def register(subparsers: Subparsers) -> None:
    """Registers the verb ``prove``."""
    parser = add_verb(
        subparsers,
        "prove",
        _prove,
        "test this site with real jobs and write a report",
        examples=["prove campaign.yaml", "prove campaign.yaml --preempt=--partition=urgent"],
        description="Submits a job on two nodes and small campaigns with the site settings of a campaign file. It "
        "tests file system, network and sandboxes, kills a worker, lets a walltime end, calls the campaign's model, "
        "and has a pod preempted if asked. Takes about ten minutes plus the time in the queue. The report names what "
        "failed, with a remedy, and hides your name, accounts and directories.",
    )
    parser.add_argument(
        "campaign", metavar="CAMPAIGN", help="campaign file, whose partitions, accounts, images and models are used"
    )
    parser.add_argument("--image", metavar="SIF", default="", help="image with a shell; default: the campaign's first")
    parser.add_argument(
        "--preempt",
        metavar="OPTIONS",
        default="",
        help="also preempt a pod by a job with these sbatch options; write --preempt=OPTIONS",
    )
    parser.add_argument(
        "--only", metavar="TRIAL", action="append", choices=TRIALS, help=f"run only this trial: {', '.join(TRIALS)}"
    )
    parser.add_argument(
        "--wait", metavar="MINUTES", type=above_zero, default=60.0, help="minutes to wait for a job (60)"
    )


def _prove(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Campaign
    from megaflow_hpc.prove import trials
    from megaflow_hpc.prove.report import Finding, ProofReport, secrets_of
    from megaflow_hpc.slurm import site

    campaign = Campaign.from_yaml(arguments.campaign)
    if not site.has_slurm():
        raise SiteError("sbatch is not on PATH: prove submits jobs; load the site's Slurm module")
    image = trials.check_image(arguments.image and str(Path(arguments.image).absolute()), campaign)
    folder = campaign.runs / time.strftime("prove-%Y%m%dT%H%M%SZ", time.gmtime())
    folder.mkdir(parents=True, mode=0o700)
    slurm = campaign.config.slurm
    accounts = [part.extra["account"] for part in (slurm, *slurm.pods.pools) if part.extra.get("account")]
    report = ProofReport(secrets_of(accounts, [folder, Path.home(), campaign.base]))
    report.facts["slurm"] = site.ask("sbatch", "--version").strip()
    proof = trials.ProofSite(campaign, image, folder, arguments.wait * 60)
    wanted = set(arguments.only or TRIALS) - (set() if arguments.preempt else {"preemption"})
    note(f"testing this site in {folder}")
    try:
        for finding in _trials(proof, report, wanted, shlex.split(arguments.preempt)):
            kept = report.add(finding)
            if not arguments.json:
                say_finding(kept, 13)
    finally:
        if why := proof.cancel():
            left = f"jobs of the trials may still be queued or running: {why}"
            report.add(Finding("clean", "warn", left, "see squeue --me, and end those named prove-… with scancel"))
        written = report.write(folder)
        note(f"report: {written}; if something failed, please send it to us")
    if arguments.json:
        print_json(report.to_dict())
    return SiteError.exit_status if report.failed else 0


def _trials(proof: ProofSite, report: ProofReport, wanted: set[str], preempting: list[str]) -> Iterator[Finding]:
    """Runs the selected trials. Submits all of their jobs at the start, except those of the preemption trial."""
    from megaflow_hpc.prove import trials
    from megaflow_hpc.prove.report import Finding

    runs: list[Run] = []
    for name, start in trials.STARTS.items():
        if name not in wanted:
            continue
        try:
            run = start(proof)
        except ERRORS as error:
            yield Finding(name, "FAIL", f"not submitted: {error}", f"{CORRECT}: --only {name}")
            continue
        if run is None:
            yield Finding(name, "skip", "the campaign file names no model", "name one to test the engine and GPUs")
            continue
        runs.append(run)
    if "nodes" in wanted:
        yield from _guarded("nodes", _nodes(proof, report))
    for run in runs:
        note(f"waiting for {run.path.name}: {run.path}")
        yield from _guarded(run.path.name, trials.campaign_findings(proof, run, report))
    if "preemption" in wanted:
        yield from _guarded("preemption", _preemption(proof, report, preempting))
    else:
        yield Finding("preemption", "skip", "not asked for", "give sbatch options of a job that preempts: --preempt")
    if proof.nodes_used:
        yield from _guarded("clean", _leftover_processes(proof))


def _guarded(name: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yields the findings of a trial. Reports an unexpected error as a finding, so that the other trials still run."""
    from megaflow_hpc.prove.report import Finding

    try:
        yield from findings
    except ERRORS as error:
        yield Finding(name, "FAIL", f"not finished: {error}", CORRECT)


def _preemption(proof: ProofSite, report: ProofReport, options: list[str]) -> Iterator[Finding]:
    from megaflow_hpc.prove import trials

    run = trials.start_preempted(proof)
    note(f"waiting for {run.path.name}: {run.path}")
    yield from trials.preemption_findings(proof, run, options, report)


def _nodes(proof: ProofSite, report: ProofReport) -> Iterator[Finding]:
    from megaflow_hpc.prove import trials
    from megaflow_hpc.prove.report import Finding

    nodes = proof.pod_nodes
    try:
        job, folder = trials.submit_nodes(proof, "nodes", "", nodes)
    except SiteError as error:
        yield Finding("nodes", "FAIL", f"not submitted: {error}", "correct slurm.pods of the campaign file")
        return
    note(f"waiting for job {job} on {nodes} nodes")
    if not trials.wait_for([job], proof.wait_s):
        found = f"job {job} did not end within {proof.wait_s / 60:g} minutes"
        yield Finding("nodes", "FAIL", found, trials.QUEUED)
        return
    yield from trials.nodes_findings(folder, nodes, report)


def _leftover_processes(proof: ProofSite) -> Iterator[Finding]:
    """Searches the nodes that the campaigns used for leftover processes."""
    from megaflow_hpc.prove import trials

    proof.cancel()
    proof.wait_until_gone()
    used = sorted(proof.nodes_used)
    arguments = f"--left {shlex.quote(str(proof.folder))}"
    job, folder = trials.submit_nodes(proof, "left", arguments, len(used), ",".join(used))
    note(f"waiting for job {job}, which looks for leftover processes on {', '.join(used)}")
    trials.wait_for([job], proof.wait_s)
    yield from trials.left_findings(folder)
