"""The trials of ``prove``: a job that tests nodes, and small campaigns with planned faults."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.campaign import job_environment
from megaflow_hpc.campaign.facade import Campaign, Run
from megaflow_hpc.errors import ConfigError, MegaflowError, SiteError
from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.prove import work
from megaflow_hpc.prove.node import NAMES, RENAMES, STEPS
from megaflow_hpc.prove.report import Finding, ProofReport
from megaflow_hpc.resources import INSTALL
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import tail
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.slurm import accounting, script, site, submission
from megaflow_hpc.slurm.ids import scancel

POLL_INTERVAL_S = 3.0
"""Seconds between two polls of Slurm or of a run's status."""
PREEMPTION_S = 300.0
"""Maximum number of seconds from submitting the preempting job until Slurm preempts the trial's pod."""
GONE_S = 120.0
"""Timeout in seconds for ended or cancelled jobs to leave Slurm."""
NODE_MINUTES = 8
"""Walltime in minutes of the job that tests nodes."""
CAMPAIGN_MINUTES = 15
"""Walltime in minutes of most trials, excluding the time that a pod gets to drain."""
USABLE_S = 75
"""Minimum walltime in seconds of the walltime trial's pod, excluding ``slurm.pods.signal``. A pod that starts slowly
still has time to store a rollout."""
WAIT_S = 15.0
"""Duration in seconds of each rollout of the walltime trial."""
REFUSAL_INTERVAL_S = 15.0
"""Seconds between two polls for refused requeues."""
SLOW_VISIBLE_S = 10.0
"""A change is reported as slow if another node sees it only after this many seconds."""
CLOCK_S = 5.0
"""Clock difference in seconds above which logs of two nodes become confusing."""
OWN_OPTIONS = ("time", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task")
"""sbatch options that each trial sets itself. They are dropped from the user's campaign file."""
KEPT = ("site", "share", "environment", "slurm")
"""Keys of the user's campaign file that every trial copies."""
ANSWERS = [f"I write it.\n\n```bash\n{work.SOLUTION}\n```", "Done."]


def _without_own(section: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a section without options that would override the trial's."""
    return {key: value for key, value in (section or {}).items() if script.option(key, True)[2:] not in OWN_OPTIONS}


@dataclass
class ProofSite:
    """The user's campaign and site, from which ``prove`` derives its test campaigns (the trials).

    Args:
        campaign: The user's campaign, with its partitions, accounts, ``setup`` lines and images.
        image: Image of the sandboxes: a SIF file or a reference.
        folder: Directory of this run of ``prove``, on the file system of the user's runs.
        wait_s: Maximum seconds for each job, including the time in the queue.
    """

    campaign: Campaign
    image: str
    folder: Path
    wait_s: float
    runs: list[Run] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    nodes_used: set[str] = field(default_factory=set)

    @cached_property
    def own(self) -> dict[str, Any]:
        """Parsed content of the user's campaign file."""
        return yaml.safe_load(self.campaign.text) or {}

    @property
    def pod_nodes(self) -> int:
        """Number of nodes in the pod of a trial: two if the partition has them, otherwise one."""
        partition = site.partitions().get(self._pod_partition)
        return min(2, partition.nodes) if partition else 2

    @property
    def _pod_partition(self) -> str:
        named = (self.campaign.config.slurm.pods.partition or "").partition(",")[0]
        return named or next((name for name, part in site.partitions().items() if part.default), "")

    @property
    def engines_have_gpus(self) -> bool:
        """True if the engine servers' partition has GPUs."""
        named = (self.campaign.config.slurm.servers.partition or "").partition(",")[0]
        partition = site.partitions().get(named or self._pod_partition)
        return bool(partition and partition.gpus)

    def walltime(self, usable_s: float) -> int:
        """Returns the shortest walltime in minutes that gives a pod ``usable_s`` seconds of work before it drains."""
        return math.ceil((usable_s + self.campaign.config.slurm.lead_s) / 60)

    def fields(self, name: str, time: float, slots: int = 2, nodes: int = 1, rollouts: int = 6) -> dict[str, Any]:
        """Returns the fields of a trial's campaign, with the site settings of the user's campaign.

        Args:
            time: Minutes until the pod drains. Its walltime is longer by ``slurm.pods.signal``.
            slots: Concurrent rollouts of each worker rank.
        """
        fields = {key: self.own[key] for key in KEPT if self.own.get(key)}
        environment = dict(fields.get("environment") or {})
        environment["images"] = {**(environment.get("images") or {}), work.IMAGE: self.image}
        slurm = _without_own(fields.get("slurm"))
        pods = {key: value for key, value in _without_own(slurm.get("pods")).items() if key not in ("pools", "count")}
        pods |= {"nodes": nodes, "ranks_per_node": 2, "cpus_per_rank": 1, "slots_per_rank": slots}
        pods["time"] = self.walltime(time * 60)
        slurm["pods"] = pods
        slurm.pop("together", None)
        tasks = [{"path": "megaflow_hpc.prove.work:ProofTask", "limit": rollouts}]
        return fields | {"name": f"prove-{name}", "tasks": tasks, "environment": environment, "slurm": slurm}

    def start(
        self, name: str, time: float, *, slots: int = 2, nodes: int = 1, rollouts: int = 6, **sections: Any
    ) -> Run:
        """Submits a trial's campaign with additional ``sections``. The other arguments are those of :meth:`fields`."""
        campaign = Campaign(**self.fields(name, time, slots, nodes, rollouts), **sections)
        campaign.base = self.campaign.base
        run = campaign.submit(run_dir=self.folder / name)
        self.runs.append(run)
        return run

    def cancel(self) -> str:
        """Cancels all queued or running jobs of the trials. Returns the reason if some could not be cancelled,
        otherwise ""."""
        why = ""
        steps = [run.cancel for run in self.runs if not run.ledger.finished]
        for step in [*steps, lambda: scancel(self.jobs)]:
            try:
                step()
            except MegaflowError as error:
                why = str(error)
        return why

    def submit(self, *words: str) -> str:
        """Submits a job outside of any campaign. Returns its id.

        Args:
            words: sbatch options and the script.

        Raises:
            SiteError: Slurm refused the job. The error quotes Slurm's message.
        """
        job = site.ask(*submission.sbatch("--parsable", *words)).strip().partition(";")[0]
        self.jobs.append(job)
        return job

    def wait_until_gone(self) -> None:
        """Waits until the jobs of all trial campaigns have ended, but at most :data:`GONE_S` seconds."""
        wait_for([job for run in self.runs for job in run.job_ids()], GONE_S)

    def environment_script(self) -> Path:
        """Writes the script that every job of a campaign sources. Returns its path."""
        path = self.folder / "env.sh"
        write_atomic(path, job_environment.environment_script(self.campaign.config, site.mpi_attempts()))
        return path


# --- nodes ---


def submit_nodes(proof: ProofSite, name: str, arguments: str, nodes: int, nodelist: str = "") -> tuple[str, Path]:
    """Submits a job that runs :mod:`.node` once on each node. Returns the job id and the job's directory.

    Raises:
        SiteError: Slurm refused the job. The error quotes Slurm's message.
    """
    folder = proof.folder / name
    (folder / "shared").mkdir(parents=True)
    config = proof.campaign.config
    keep = ("partition", *config.slurm.extra, *config.slurm.pods.extra)
    pod = script.pod_job(config, RunDir(folder), 1)
    options = {key: value for key, value in pod.options.items() if key in keep}
    options |= {"job-name": "prove-nodes", "nodes": nodes, "ntasks-per-node": 1, "cpus-per-task": 2}
    options |= {"time": NODE_MINUTES, "output": str(folder / "job.log")}
    options |= {"nodelist": nodelist} if nodelist else {}
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {script.option(key, value)}" for key, value in options.items() if value not in (None, False)]
    step = f'"$MEGAFLOW_PYTHON" -m megaflow_hpc.prove.node {arguments} {shlex.quote(str(folder / "shared"))}'
    lines += ["role=pods", f". {shlex.quote(str(proof.environment_script()))}"]  # the pods' own set-up, too
    lines += [f"srun --mpi=none --export=ALL --wait=0 {step}"]
    write_atomic(folder / "job.sh", "\n".join(lines) + "\n")
    return proof.submit(str(folder / "job.sh")), folder


def wait_for(jobs: Sequence[str], timeout_s: float) -> bool:
    """Waits until jobs have ended. Returns false on timeout."""
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(SiteError):  # the controller is busy or restarts
            if not any(state.live for state in accounting.live_jobs(jobs).values()):
                return True
        if time.monotonic() > end:
            return False
        time.sleep(POLL_INTERVAL_S)


def nodes_findings(folder: Path, expected: int, report: ProofReport) -> Iterator[Finding]:
    """Evaluates the measurements of :mod:`.node` on each node.

    Args:
        folder: Directory of the job.
        expected: Expected number of nodes.
    """
    results = _results(folder)
    if len(results) < expected:
        tail = "\n".join(_tail(folder / "job.log"))
        remedy = f"read {folder / 'job.log'}; is the run directory on a file system that all nodes mount?"
        yield Finding(
            "nodes", "FAIL", f"{len(results)} of {expected} nodes reported; the job's log ends: {tail}", remedy
        )
        return
    nodes = [result["here"] for result in results]
    names = sorted({facts["node"] for facts in nodes})
    alone = "" if len(names) > 1 else "the partition has one node; use a larger one to test several nodes"
    yield Finding("nodes", "warn" if alone else "ok", f"{len(names)} nodes were tested", alone)
    for key in ("machine", "kernel", "python", "shared_file_system", "scratch_type", "scratch_gb", "gpus"):
        report.facts[key] = ", ".join(sorted({str(facts.get(key)) for facts in nodes}))
    for facts in nodes:
        yield from _node(facts)
    yield from _findings_between_nodes(results, report)


def _results(folder: Path) -> list[dict[str, Any]]:
    """Returns the result of each task of a job."""
    return [json.loads(path.read_bytes()) for path in sorted((folder / "shared").glob("result.*.json"))]


def _node(facts: Mapping[str, Any]) -> Iterator[Finding]:
    node = facts["node"]
    if facts["packages"]:
        missing = ", ".join(facts["packages"])
        remedy = f"{INSTALL} for the interpreter of compute nodes, or fix slurm.setup"
        yield Finding("packages", "FAIL", f"{node}: {missing} cannot be imported", remedy)
    if facts["scratch_warning"]:
        remedy = "name a local directory that exists on every node: export MEGAFLOW_SCRATCH=… in slurm.setup"
        yield Finding("scratch", "warn", f"{node}: {facts['scratch_warning']}", remedy)
    if "error" in facts:
        remedy = "load the site's Apptainer in slurm.setup, or set MEGAFLOW_APPTAINER and MEGAFLOW_SCRATCH there"
        yield Finding("sandbox", "FAIL", f"{node}: {facts['error']}", remedy)
        return
    probed = facts["sandbox"]
    if probed["container"]:
        yield Finding("sandbox", "FAIL", f"{node}: {probed['container']}", "ask the site for user namespaces or setuid")
    elif probed["overlay"] and probed["copy"]:
        remedy = "set MEGAFLOW_SCRATCH in slurm.setup to a local directory"
        yield Finding("sandbox", "FAIL", f"{node}: no writable layers: {probed['overlay']}", remedy)
    elif probed["gateway"]:
        remedy = f"use environment.network: {'host' if probed['private_network'] else 'none or host'}"
        yield Finding("sandbox", "warn", f"{node}: sandboxes cannot have network: gateway: {probed['gateway']}", remedy)
    else:
        yield Finding("sandbox", "ok", f"{node}: Apptainer {probed['version']}, layers by {probed['overlay_by']}")
    if not facts["squeue"]:
        remedy = "keep megaflow-hpc run or watch open: it then adds engines and pods itself"
        yield Finding("Slurm in jobs", "warn", f"{node}: squeue does not answer: pods cannot be requeued", remedy)


def _findings_between_nodes(results: list[dict[str, Any]], report: ProofReport) -> Iterator[Finding]:
    """Evaluates the tests that involve several nodes."""
    if broken := [result["error"] for result in results if "error" in result]:
        remedy = "use a run directory on a file system that all nodes mount"
        yield Finding("nodes", "FAIL", f"the nodes did not finish their tests together: {broken[0]}", remedy)
        return
    remedies = {
        "new_files": "use a file system that shows new files to other nodes: set run_dir",
        "links": "use a file system with hard links: set run_dir",
        "renames": "use a file system with atomic rename: set run_dir",
        "appended": "ask the site for close-to-open consistency (NFS without nocto)",
        "rewritten": "ask the site for shorter attribute caches, or set run_dir to another file system",
    }
    failed = set[str]()
    for step in STEPS[:-1]:
        errors = [result[step]["error"] for result in results if _error(result[step])]
        if errors:
            failed.add(step)
            yield Finding(step.replace("_", " "), "FAIL", errors[0], remedies[step])
    if "new_files" not in failed:
        yield from _visibility_findings(results, report, remedies["rewritten"])
    if "links" not in failed:
        taken = sum(result["links"] for result in results)
        good = taken == NAMES
        found = f"{len(results)} nodes claimed {NAMES} names by hard link: {taken} claims succeeded"
        yield Finding("links", "ok" if good else "FAIL", found, "" if good else remedies["links"])
    if "renames" not in failed:
        yield Finding("renames", "ok", f"a file stayed complete through {RENAMES} replacements")
    networks = [result["network"] for result in results]
    unreached = [line for found in networks for line in ([found["error"]] if _error(found) else found)]
    if unreached:
        remedy = "set MEGAFLOW_ADDRESS in slurm.setup to a name that other nodes reach, or open ports between nodes"
        yield Finding("network", "FAIL", f"a node cannot reach another: {unreached[0]}", remedy)
    elif len(results) > 1:
        yield Finding("network", "ok", "every node reaches every other at its published address")


def _visibility_findings(results: list[dict[str, Any]], report: ProofReport, remedy: str) -> Iterator[Finding]:
    """Evaluates how quickly changes become visible on other nodes, and how much the clocks differ."""
    delays = {"a new file": results[0]["new_files"]["visible_s"]}
    for what, step in (("appended bytes", "appended"), ("an overwritten file", "rewritten")):
        delays[what] = max((r[step] for r in results if not _error(r[step])), default=0.0)
    shown = ", ".join(f"{what} after {delay:.2f} s" for what, delay in delays.items())
    report.facts["visible on another node"] = shown
    slow = max(delays.values()) > SLOW_VISIBLE_S
    yield Finding("visibility", "warn" if slow else "ok", f"another node sees {shown}", remedy if slow else "")
    drift = results[0]["new_files"]["clock_s"]
    if drift > CLOCK_S:
        yield Finding("clocks", "warn", f"nodes differ by {drift} s", "ask the site to synchronise them (chrony, NTP)")


def _error(value: Any) -> bool:
    return isinstance(value, dict) and "error" in value


def _tail(log: Path, lines: int = 3) -> list[str]:
    try:
        return log.read_text(errors="replace").strip().splitlines()[-lines:]
    except OSError:
        return ["there is no log"]


# --- campaigns ---


def start_worker(proof: ProofSite) -> Run:
    """Submits a campaign whose agent kills a worker. Its engine server replies from a file."""
    write_atomic(proof.folder / "answers.yaml", yaml.safe_dump({"default": ANSWERS}))
    model = {"engine": "scripted", "script": str(proof.folder / "answers.yaml"), "gpus": int(proof.engines_have_gpus)}
    agent = {"name": "megaflow_hpc.prove.work:KillsItsWorker", "args": {"mark": str(proof.folder / "killed")}}
    return proof.start("worker", CAMPAIGN_MINUTES, nodes=proof.pod_nodes, model=model, agent=agent)


def start_walltime(proof: ProofSite) -> Run:
    """Submits a campaign whose rollouts need more than one walltime."""
    usable_s = proof.walltime(USABLE_S) * 60 - proof.campaign.config.slurm.lead_s
    rollouts = math.ceil(usable_s / WAIT_S) + 1  # one more than a pod can start before it drains
    agent = {"name": "megaflow_hpc.prove.work:Waits", "args": {"seconds": WAIT_S}}
    return proof.start("walltime", USABLE_S / 60, slots=1, rollouts=rollouts, agent=agent)


def start_model(proof: ProofSite) -> Run | None:
    """Submits two rollouts that use the user's own model. Returns ``None`` if the user's campaign has no model."""
    own = proof.own
    models = dict(own.get("models") or {}) | ({"default": own["model"]} if own.get("model") else {})
    model = next((m for m in models.values() if m.get("engine", "vllm") not in ("scripted", "replay")), None)
    if model is None:
        return None
    agent = {"name": "megaflow_hpc.agents.example:MyAgent", "max_turns": 2, "max_tokens": 512}
    dropped = ("agent", "samples", "servers", "also", "include")
    model = {key: value for key, value in model.items() if key not in dropped}
    return proof.start("model", CAMPAIGN_MINUTES, rollouts=2, model=model, agent=agent)


STARTS: dict[str, Callable[[ProofSite], Run | None]] = {
    "worker": start_worker,
    "walltime": start_walltime,
    "model": start_model,
}
"""Maps the name of each trial to the function that submits its campaign."""


def start_preempted(proof: ProofSite) -> Run:
    """Submits a campaign whose pod is to be preempted."""
    waits = {"seconds": PREEMPTION_S, "mark": str(proof.folder / "waits")}
    agent = {"name": "megaflow_hpc.prove.work:Waits", "args": waits}
    return proof.start("preemption", CAMPAIGN_MINUTES, slots=1, agent=agent)


def preemption_findings(proof: ProofSite, run: Run, options: list[str], report: ProofReport) -> Iterator[Finding]:
    """Preempts the trial's pod, waits for its campaign and evaluates the result."""
    try:
        _preempt(proof, run, options)
    except TimeoutError as error:
        yield Finding("preemption", "FAIL", f"{error}", QUEUED)
    except SiteError as error:
        yield Finding("preemption", "FAIL", f"{error}", "correct --preempt, then repeat this trial: --only preemption")
    else:
        yield from campaign_findings(proof, run, report)


def _preempt(proof: ProofSite, run: Run, options: list[str]) -> None:
    """Waits until the run's pod is running the waiting rollout, then submits a job that preempts the pod.

    Args:
        options: sbatch options of the preempting job, such as ``--qos=high``.

    Raises:
        TimeoutError: The pod did not start in time.
        SiteError: Slurm refused the job. The error quotes Slurm's message.
    """
    end = time.monotonic() + proof.wait_s
    node = ""
    while not node:
        if time.monotonic() > end:
            raise TimeoutError("its pod did not start in time")
        time.sleep(POLL_INTERVAL_S)
        status = run.status()
        if run.over(status):  # its pod failed, which the trial's findings explain
            return
        if (proof.folder / "waits").exists():
            node = next((pod["node"] for pod in status["pods"] if pod["running"]), "")
    write_atomic(proof.folder / "preempt.sh", "#!/bin/bash\nsleep 20\n")
    wanted = ["--exclusive", "--time=2", "--job-name=prove-preempt", f"--output={proof.folder}/%j"]
    proof.submit(f"--nodelist={node}", *wanted, *options, str(proof.folder / "preempt.sh"))


REQUEUE = (
    "ask the site whether jobs may requeue themselves (JobRequeue of slurm.conf), and remove no-requeue from "
    "slurm; until then keep megaflow-hpc run open: it submits new jobs instead"
)
QUEUED = "wait longer (--wait), or name a partition with idle nodes; squeue --me --start says when jobs may start"
REMEDIES = {
    "worker": "run megaflow-hpc doctor --job: it tries each type of srun --mpi; name one that works by "
    "export MEGAFLOW_MPI=… in slurm.setup",
    "walltime": REQUEUE,
    "preemption": "does the job preempt pods with PreemptMode=REQUEUE? scontrol show partition, sacctmgr show qos",
    "model": "read the server's log; run megaflow-hpc doctor where the engine is installed",
}


def campaign_findings(proof: ProofSite, run: Run, report: ProofReport) -> Iterator[Finding]:
    """Waits for a trial's campaign and evaluates its result.

    Raises:
        OSError: The results cannot be read.
    """
    name = run.path.name
    try:
        result = _wait(proof, run)
    except _RequeueRefusedError as error:
        yield Finding(name, "FAIL", f"Slurm refuses to requeue the pod: {error}", _remedy(run, name))
        return
    except TimeoutError:
        status = run.status()
        lines, remedy = [f"not finished after {proof.wait_s:.0f} s"], _remedy(run, name)
        if not status["pods"]:
            lines, remedy = [*lines, "no pod has started"], QUEUED
        yield Finding(name, "FAIL", "; ".join([*lines, *causes(status)]), remedy)
        return
    except MegaflowError as error:
        yield Finding(name, "FAIL", "; ".join([str(error), *causes(run.status())]), _remedy(run, name))
        return
    if result["state"] != "finished":
        yield Finding(name, "FAIL", "; ".join(["it did not finish", *causes(result)]), _remedy(run, name))
        return
    yield from _stored(proof, run, name, result, report)


class _RequeueRefusedError(Exception):
    """Slurm repeatedly refused to requeue a pod. The message quotes Slurm."""


def _wait(proof: ProofSite, run: Run) -> Mapping[str, Any]:
    """Waits until the run has ended. Returns its status.

    Raises:
        _RequeueRefusedError: Slurm refused a requeue in two consecutive polls. The run is cancelled, because waiting
            longer would replace its pods with new jobs and hide the fault.
        TimeoutError: The run did not end in time.
        MegaflowError: The run failed.
    """
    refused, looked = set[str](), time.monotonic()

    def look(_: Mapping[str, Any]) -> None:
        nonlocal refused, looked
        if time.monotonic() < looked + REFUSAL_INTERVAL_S:
            return
        now = {each.job: each.words for each in Marks(run.dir).refused()}
        if again := refused & set(now):
            raise _RequeueRefusedError(now[again.pop()])
        refused, looked = set(now), time.monotonic()

    try:
        return run.wait(proof.wait_s, look)
    except _RequeueRefusedError:
        run.cancel()
        raise


def _stored(proof: ProofSite, run: Run, name: str, result: Mapping[str, Any], report: ProofReport) -> Iterator[Finding]:
    from megaflow_hpc.trajectories import open_trajectories

    with open_trajectories(run.path) as store:
        rows = list(store)
        attempts = [attempt for row in rows for attempt in row.attempts]
        proof.nodes_used |= {attempt.node for attempt in attempts if attempt.node}
        ids = Counter(row.id for row in rows)
        unsolved = [f"{row.id} {row.status} {row.error}".strip() for row in rows if name != "model" and row.reward != 1]
        failed = [f"{row.id}: {row.error}" for row in rows if row.status == "failed"]
        retried = sum(attempt.status == "failed" for attempt in attempts)
        turns = sum(len(row.turns) for row in rows)
    starts = 1 + max(int(pod["pod"].rpartition(".")[2] or 0) for pod in result["pods"])
    replaced = len({pod["pod"].rpartition(".")[0] for pod in result["pods"]}) - 1
    report.facts[f"{name}: rollouts, starts, failed attempts"] = f"{len(rows)}, {starts}, {retried}"
    wrong = failed or unsolved
    twice = [each for each, count in ids.items() if count > 1]
    if wrong or twice or len(rows) != result["rollouts"]["total"]:
        found = f"{len(rows)} of {result['rollouts']['total']} rollouts stored; {'; '.join([*wrong, *twice][:2])}"
        yield Finding(name, "FAIL", found, _remedy(run, name))
        return
    if name == "worker":
        yield from _worker(proof, retried, starts, turns, len({attempt.node for attempt in attempts}))
    elif name == "model" and not turns:
        yield Finding(name, "FAIL", "no model call was recorded", _remedy(run, name))
    elif name == "model":
        yield Finding(name, "ok", f"{turns} model calls of {len(rows)} rollouts are recorded")
    elif starts < 2 and replaced:
        found = f"Slurm did not requeue the pod ({_refusal(run)}); {replaced} new jobs took its place"
        yield Finding(name, "FAIL", found, _remedy(run, name))
    elif starts < 2:
        yield Finding(name, "warn", "its pod started only once, so this was not tested", REMEDIES[name])
    else:
        yield Finding(name, "ok", f"{len(rows)} rollouts in {starts} starts of a pod, each stored once")


def _refusal(run: Run) -> str:
    """Returns the last refused requeue in the pods' logs. The refusal mark no longer exists, because the job was
    replaced."""
    lines = [line for path in run.dir.logs.glob("pod-*.log") for line in tail(path, 100).lines]
    return next((line for line in reversed(lines) if line.startswith("scontrol requeue ")), "no reason is in its log")


def _worker(proof: ProofSite, retried: int, starts: int, turns: int, nodes: int) -> Iterator[Finding]:
    killed = (proof.folder / "killed").exists()
    if not killed or not (retried or starts > 1):
        yield Finding("worker", "warn", "no worker was killed, so this was not tested", "run prove again")
    else:
        how = "its pod continued" if starts == 1 else "its pod started again"
        yield Finding("worker", "ok", f"a rank was killed and {how}; every rollout is stored once")
    yield Finding("engine", "ok", f"{turns} calls from sandboxes on {nodes} nodes reached the engine server")


def _remedy(run: Run, name: str) -> str:
    return f"{REMEDIES[name]}; logs: {run.dir.logs}"


def causes(status: Mapping[str, Any]) -> list[str]:
    """Returns at most three causes of failure from the status of a run."""
    messages = [
        f"pod {pod['pod']} ended on {pod['node']} before any rollout: {pod['cause']}" for pod in status["unstarted"]
    ]
    messages += [f"{cause['kind']}: {cause['error']}" for cause in status["first_failures"]]
    messages += [
        f"{job['role']} in the queue: {job['reason']} {job['means']}".strip() for job in status.get("queue", ())
    ]
    messages += [pod["why"] for pod in status["pods"] if pod.get("why")]
    return list(dict.fromkeys(messages))[:3]


def left_findings(folder: Path) -> Iterator[Finding]:
    """Reports processes that the trials left behind on nodes."""
    results = _results(folder)
    if not results:
        found = "the nodes could not be searched for leftover processes"
        yield Finding("clean", "warn", found, f"read {folder / 'job.log'}")
        return
    left = [line for result in results for line in result["left"]]
    if left:
        remedy = "run megaflow-hpc janitor there, and send us this report"
        yield Finding("clean", "FAIL", f"{len(left)} processes were left behind, such as: {left[0]}", remedy)
    else:
        yield Finding("clean", "ok", f"no processes were left on {len(results)} nodes")


def check_image(image: str, campaign: Campaign) -> str:
    """Returns ``image`` if given, otherwise the first image of the campaign.

    Raises:
        ConfigError: No image is given, and the campaign does not name any.
    """
    chosen = image or next(iter(campaign.config.environment.images.values()), "")
    if not chosen:
        raise ConfigError(f"{campaign.where('environment.images')}: no image is named; give one with --image SIF")
    if "://" not in chosen and not (campaign.base / chosen).exists():
        raise ConfigError(f"{'--image' if image else campaign.where('environment.images')}: {chosen}: no such file")
    return chosen
