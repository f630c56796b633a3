"""``doctor`` reports what the site provides, what is missing, and remedies. ``janitor`` removes leftover files and
processes of killed sandboxes from this node."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megaflow_hpc.cli.output import print_json, print_result, say
from megaflow_hpc.cli.verb import Subparsers, add_verb
from megaflow_hpc.errors import MegaflowError, SiteError
from megaflow_hpc.prove.report import Finding
from megaflow_hpc.resources import INSTALL, RUNNING, install, is_installed

if TYPE_CHECKING:
    from megaflow_hpc.slurm.health import AbsentNodes
    from megaflow_hpc.slurm.site import Partition

ASK_S = 60.0
"""Timeout in seconds for a reply from a trainer's interpreter."""
TRAINED_WITH = ("torch", "transformers", "safetensors", "numpy", "h5py", "msgspec", "pydantic", "yaml")
"""Modules required in a trainer's interpreter. This package itself need not be installed there."""


def register(subparsers: Subparsers) -> None:
    """Registers the verbs ``doctor`` and ``janitor``."""
    doctor = add_verb(
        subparsers,
        "doctor",
        _doctor,
        "check this site: ok, warn or FAIL for each requirement, with the remedy",
        examples=["doctor", "doctor --job      # also two MPI ranks through srun"],
        description="Checks the interpreter, Slurm, MPI, Apptainer, scratch, engines and trainers. Changes nothing.",
    )
    doctor.add_argument(
        "--job", action="store_true", help="also run two MPI ranks through srun, and kill one (waits for two CPUs)"
    )

    janitor = add_verb(
        subparsers,
        "janitor",
        _janitor,
        "remove what killed sandboxes left on this node",
        examples=["janitor", "janitor --scratch /local/me/megaflow"],
        description="Ends processes and removes scratch files of sandboxes whose owner has ended. Never touches files "
        "of a live process. Processes are identified by pid and start time.",
    )
    janitor.add_argument(
        "--scratch", metavar="DIR", help="scratch directory to clean; default: the sandboxes' scratch on this node"
    )


def _doctor(arguments: argparse.Namespace) -> int:
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _slurm,
        _mpi,
        _apptainer,
        _scratch,
        _run_directory,
        _engines,
        _trainer,
    ]
    if arguments.job:
        checks.append(_mpi_probe)
    findings = [finding for check in checks for finding in _guarded(check)]
    failed = any(finding.level == "FAIL" for finding in findings)
    if arguments.json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            say_finding(finding, 12)
    return SiteError.exit_status if failed else 0


def say_finding(finding: Finding, width: int) -> None:
    """Prints a finding and its remedy. ``width`` is the width of the check-name column, in characters."""
    say(f"{finding.level:4}  {finding.check:{width}}  {finding.found}")
    if finding.remedy:
        say(f"      {'':{width}}  -> {finding.remedy}")


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except (MegaflowError, OSError, subprocess.TimeoutExpired) as error:
        yield Finding(check.__name__.strip("_"), "FAIL", str(error))


def _python() -> Iterator[Finding]:
    from megaflow_hpc.agents.probe import probe
    from megaflow_hpc.config import AgentConfig

    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    for name in ("submitit", "h5py", *RUNNING):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "FAIL", "not installed; rollouts need it", INSTALL)
    # Planning uses the same probe. It imports the agent's dependencies too.
    (made,), _ = probe([AgentConfig(name="mini-swe-agent")])
    if made.error:
        yield Finding("agents", "warn", made.error.partition("; install")[0], install("agents"))
    else:
        yield Finding("agents", "ok", f"mini-swe-agent {importlib.metadata.version('mini-swe-agent')}")
    if lacking := [name for name in ("jinja2", "vl_convert") if not is_installed(name)]:
        yield Finding("report", "warn", f"{', '.join(lacking)}: not installed; reports need it", install("report"))


def _slurm() -> Iterator[Finding]:
    from megaflow_hpc.slurm import health, site

    if not site.has_slurm():
        yield Finding(
            "slurm", "warn", "sbatch is not on PATH", "load the site's module; without it use --launcher local"
        )
        return
    remedy = "load the site's module, or set SLURM_CONF; without Slurm use --launcher local"
    try:
        yield Finding("slurm", "ok", site.ask("sbatch", "--version").strip())
    except SiteError as error:
        yield Finding("slurm", "FAIL", str(error), remedy)
        return
    try:
        partitions, absent = site.partitions(hidden=False), health.absent_nodes()
    except SiteError as error:
        remedy = "check that slurmctld runs (scontrol ping) and that SLURM_CONF is right; or use --launcher local"
        yield Finding("controller", "FAIL", str(error), remedy)
        return
    for name, part in sorted(partitions.items()):
        yield _partition(part, absent.get(name))
        if part.gpus and part.up:
            yield _engine_cpus(name)
    if not any(part.up for part in partitions.values()):
        yield Finding("partition", "FAIL", "no partition that you may use accepts jobs", "ask the site")
    elif not any(part.default for part in partitions.values()):
        remedy = "set slurm.pods.partition and slurm.servers.partition, or ask the site for a default partition"
        yield Finding("partition", "warn", "there is no default: sbatch refuses jobs that name no partition", remedy)
    yield Finding("array size", "ok", f"MaxArraySize {site.max_array_size()}")
    if why := health.why_no_accounting():
        remedy = (
            "tell the site that slurmdbd is down; jobs continue, but ended jobs and usage are unknown until it is back"
        )
        yield Finding("accounting", "warn", why, remedy)
    elif why is not None:
        yield Finding("accounting", "ok", "sacct answers")


def _partition(part: Partition, absent: AbsentNodes | None) -> Finding:
    from megaflow_hpc.slurm import site

    gpus = "GPUs, " if part.gpus else ""
    allocation = "whole nodes, " if part.name in site.whole_nodes() else ""
    shown = (
        f"{part.name}: {part.nodes} nodes, {part.cpus} CPUs, {part.memory_mb} MB, {gpus}{allocation}limit {part.time}"
    )
    elsewhere = "name another partition in the campaign file, or ask the site when it is back"
    if not part.up:
        return Finding("partition", "warn", f"{shown}; it is down: jobs wait in it", elsewhere)
    if absent and absent.count >= part.nodes:
        return Finding("partition", "warn", f"{shown}; none of them takes jobs ({absent.reason})", elsewhere)
    missing = f"; {absent.count} of them take no jobs ({absent.reason})" if absent else ""
    return Finding("partition", "ok", shown + missing)


def _engine_cpus(partition: str) -> Finding:
    from megaflow_hpc.slurm import site

    share = site.partitions()[partition].cpus_per_gpu
    cpus = site.engine_cpus(partition)
    if cpus is not None and cpus > 1:
        return Finding("engine CPUs", "ok", f"{partition}: servers ask for {cpus} CPUs for each GPU")
    if cpus is None and share:
        return Finding("engine CPUs", "ok", f"{partition}: DefCpuPerGPU gives them to servers")
    message = f"{partition}: {'its nodes have one CPU for each GPU' if share else 'the CPUs for each GPU are unknown'}"
    return Finding("engine CPUs", "warn", f"{message}; an engine server gets one", "set slurm.servers.cpus-per-gpu")


def _mpi() -> Iterator[Finding]:
    from megaflow_hpc.host.mpi import find_mpiexec
    from megaflow_hpc.slurm import health, site

    try:
        yield Finding("mpiexec", "ok", find_mpiexec())
    except SiteError:
        yield Finding("mpiexec", "warn", "not found", "pip install mpich, or load an MPI module")
    if not site.has_slurm():
        return
    remedy = "ask the site for Slurm's plug-in mpi/pmi2 or mpi/pmix, or load an MPI that supports an installed plug-in"
    try:
        plugin = site.mpi_plugins()[0]
    except SiteError as error:
        yield Finding("srun --mpi", "FAIL", str(error), remedy)
        return
    if why := health.why_no_pmi(plugin):
        yield Finding("srun --mpi", "FAIL", why, remedy)
    else:
        yield Finding("srun --mpi", "ok", plugin)


def _mpi_probe() -> Iterator[Finding]:
    """Tests the ``srun --mpi`` types in order. Each test starts two ranks and kills one of them.

    Stops at the first type whose surviving rank continues.
    """
    from megaflow_hpc.slurm import health, site

    plugins, tried = site.mpi_plugins(), []
    worlds: dict[str, health.MpiProbe] = {}
    for plugin in plugins:
        if plugin.partition("_")[0] in worlds:  # pmix_v4 was already tested as pmix
            continue
        world = health.try_world(plugin)
        if world.why_not:
            tried.append(f"{plugin}: {world.why_not}")
            continue
        worlds[plugin] = world
        if world.outlives:
            break
    if not worlds:
        remedy = "set MEGAFLOW_MPI to another type of srun --mpi=list, or install an mpi4py for the site's MPI"
        yield Finding("mpi probe", "FAIL", "; ".join(tried), remedy)
        return
    plugin, world = next(iter(worlds.items()))
    yield Finding("mpi probe", "ok", f"two ranks in one world with --mpi={plugin}, {world.library}")
    if plugin != plugins[0]:
        remedy = f"export MEGAFLOW_MPI={plugin}"
        message = f"--mpi={plugins[0]} does not work here, but the first pods of a run try it first"
        yield Finding("mpi probe", "warn", message, remedy)
    yield _lost_rank({name: launched.outlives for name, launched in worlds.items()})
    if world.asks:
        yield Finding("from jobs", "ok", "Slurm answers on compute nodes: pods can requeue and scale")
    else:
        remedy = "keep megaflow-hpc run or watch open; it then adds engines and pods itself"
        yield Finding("from jobs", "warn", "Slurm does not answer on compute nodes", remedy)


def _lost_rank(outlives: dict[str, bool]) -> Finding:
    """Reports whether a pod survives the loss of a rank.

    Args:
        outlives: For each working ``--mpi`` type, whether the surviving rank continues. Pods use the first type.
    """
    first = next(iter(outlives))
    better = next((name for name, survives in outlives.items() if survives), "")
    if first == better:
        return Finding("lost rank", "ok", f"with --mpi={first}, a step continues after one of its ranks is killed")
    message = f"with --mpi={first}, the loss of a rank ends the step: the pod restarts and repeats its rollouts"
    remedy = "use more and smaller pods, which lose less (slurm.pods), or an MPI that supports pmi2: MPICH, Intel MPI"
    return Finding("lost rank", "warn", message, f"export MEGAFLOW_MPI={better}" if better else remedy)


def _apptainer() -> Iterator[Finding]:
    from megaflow_hpc.environments.sandbox import probe
    from megaflow_hpc.environments.sandbox.scratch import is_full, scratch_base
    from megaflow_hpc.host.apptainer import find_apptainer

    try:
        apptainer, (scratch, _) = find_apptainer(), scratch_base()
    except SiteError as error:
        yield Finding("apptainer", "warn", str(error), "without it, only tasks with image: none can run")
        return
    if is_full(scratch):
        yield Finding("apptainer", "warn", f"{apptainer}: not tried", "free space on scratch first")
        return
    probed = probe.probe(scratch, apptainer)
    kind = "setuid" if probed.setuid else "in user namespaces"
    yield Finding("apptainer", "ok", f"{probed.version} at {probed.apptainer}, {kind}")
    yield _can("namespaces", "user namespaces work", probed.user_namespaces, "ask the site for user namespaces", "warn")
    yield _can("containers", "a container starts", probed.container, "no sandbox can run here; ask the site")
    if probed.container:
        return
    layers = f"writable layers by {'the kernel' if probed.overlay_by == 'kernel' else probed.overlay_by}"
    remedy = "set MEGAFLOW_SCRATCH to a local disk, or ask for fuse-overlayfs and an open /dev/fuse"
    if probed.overlay and not probed.copy:
        cost = f"every sandbox is a copy of its image, which takes time and space on scratch: {probed.overlay}"
        yield Finding("overlay", "warn", cost, remedy)
    else:
        yield _can("overlay", layers, probed.overlay and f"{probed.overlay}; copies fail too: {probed.copy}", remedy)
    remedy = "use environment.network: host, or ask the site"
    yield _can("network none", "sandboxes without a network", probed.private_network, remedy, "warn")
    remedy = f"use environment.network: {'host' if probed.private_network else 'none or host'}"
    way = {"nsenter": "by entering their network", "helper": "through a helper inside"}.get(probed.gateway_by, "")
    yield _can("gateway", f"sandboxes reach only the model ({way})", probed.gateway, remedy, "warn")
    yield _can("processes", "limited by the kernel", probed.processes, "the watchdog counts them instead", "warn")
    remedy = "sandboxes can use kernel keys, io_uring and vsock"
    yield _can("system calls", "sandboxes cannot use kernel keys, io_uring or vsock", probed.calls, remedy, "warn")


def _can(check: str, yes: str, why_not: str, remedy: str, level: Literal["warn", "FAIL"] = "FAIL") -> Finding:
    return Finding(check, level, why_not, remedy) if why_not else Finding(check, "ok", yes)


def _scratch() -> Iterator[Finding]:
    from megaflow_hpc.environments.sandbox import scratch

    path, warning = scratch.scratch_base()
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize / 1e9
    type_ = scratch.file_system(path)
    kind = scratch.kind_of(type_)
    inodes = f"{room.f_favail:,} inodes" if room.f_files else "unlimited inodes"
    message = f"{path} on {type_}: {free:.0f} GB, {inodes} free"
    if scratch.is_full(path):
        remedy = "remove old files (megaflow-hpc janitor, images prune), or set MEGAFLOW_SCRATCH to another directory"
        yield Finding("scratch", "FAIL", f"{message}; it is full, so no sandbox can start", remedy)
    elif kind == "memory":
        remedy = "files of sandboxes count as the job's memory; request more (slurm.pods.mem)"
        yield Finding("scratch", "warn", f"{message}; it is memory", remedy)
    elif kind == "network":
        remedy = "set MEGAFLOW_SCRATCH to a node-local directory"
        yield Finding("scratch", "warn", f"{message}; every sandbox copies its image there", remedy)
    elif free < 5 or (room.f_files and room.f_favail < 200_000):
        remedy = "set MEGAFLOW_SCRATCH to a node-local directory with space for the images"
        yield Finding("scratch", "warn", message, remedy)
    else:
        yield Finding("scratch", "ok", message)
    if warning:
        yield Finding("scratch", "warn", warning, "set MEGAFLOW_SCRATCH to a node-local directory")


def _run_directory() -> Iterator[Finding]:
    """Checks the file system of the current directory, where runs are created by default."""
    from megaflow_hpc.host.mounts import MAX_CACHED_S, mount_of, why_no_links

    here = Path.cwd()
    mount = mount_of(here)
    if not os.access(here, os.W_OK):
        yield Finding(
            "run directory",
            "warn",
            f"{here}: not writable, so it was not tested",
            "run doctor in the directory for your runs",
        )
        return
    if why := why_no_links(here):
        remedy = "set run_dir to a directory on Lustre, GPFS, BeeGFS, NFS or a local disk"
        yield Finding(
            "run directory",
            "FAIL",
            f"{here} on {mount.type}: no hard links, which pods need to claim work ({why})",
            remedy,
        )
    else:
        yield Finding("run directory", "ok", f"{here} on {mount.type}: hard links work")
    if "nocto" in mount.options:
        remedy = "ask the site for a mount without it, or set run_dir elsewhere; pods may read outdated files"
        yield Finding("run directory", "warn", f"{mount.point} is mounted with nocto", remedy)
    if (cached_s := mount.cached_s()) > MAX_CACHED_S:
        remedy = f"ask the site for acregmax and acdirmax of at most {MAX_CACHED_S}, or set run_dir elsewhere"
        message = f"{mount.point} caches attributes for up to {cached_s} s, so changes are seen late"
        yield Finding("run directory", "warn", message, remedy)


def _engines() -> Iterator[Finding]:
    venv = os.environ.get("MEGAFLOW_ENGINE_VENV")
    if not venv:
        yield Finding(
            "engine",
            "warn",
            "MEGAFLOW_ENGINE_VENV is not set",
            "set it to the virtual environment that has vllm, or set model.python",
        )
    elif not (Path(venv) / "bin" / "python").exists():
        yield Finding(
            "engine", "FAIL", f"{venv}: no interpreter there", "point MEGAFLOW_ENGINE_VENV at a virtual environment"
        )
    else:
        yield Finding("engine", "ok", venv)


def _trainer() -> Iterator[Finding]:
    from megaflow_hpc.campaign.job_environment import trainer_python

    python = trainer_python()
    if shutil.which(python) is None:
        remedy = "point MEGAFLOW_TRAINER_PYTHON at an environment with torch and transformers"
        yield Finding("trainer", "warn", f"{python}: no interpreter there", remedy)
        return
    ask = "import importlib.util as u,sys; [print(n) for n in sys.argv[1:] if not getattr(u.find_spec(n), 'origin', 0)]"
    asked = [python, "-c", ask, *TRAINED_WITH]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S, check=False)
    if missing := [done.stderr.strip()[-200:]] if done.returncode else done.stdout.split():
        remedy = f"if you train: set MEGAFLOW_TRAINER_PYTHON, or there: {install('train')}"
        yield Finding("trainer", "warn", f"{python} lacks {' '.join(missing)}", remedy)
    else:
        yield Finding("trainer", "ok", python)


def _janitor(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.environments.sandbox.scratch import scratch_directories, sweep
    from megaflow_hpc.host.private import BUILD_DIRECTORY, sweep_directories, sweep_shared_memory

    places = [arguments.scratch] if arguments.scratch else scratch_directories()
    counts: Counter[str] = Counter(owners=0, sandboxes=0, processes=0, left=0)
    for directory in places:
        counts.update(sweep(directory))
    scratch = ", ".join(map(str, places)) or "no scratch on this node"
    temporary = {os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir(), tempfile.gettempdir()}
    counts["pods"] = sum(map(sweep_directories, temporary))
    counts["builds"] = sweep_directories(tempfile.gettempdir(), BUILD_DIRECTORY)
    counts["shared_memory"] = sweep_shared_memory()
    text = (
        f"{scratch}: {counts['owners']} dead owners, {counts['sandboxes']} sandboxes, "
        f"{counts['processes']} processes, {counts['pods']} directories of pods and "
        f"{counts['builds']} of builds, {counts['shared_memory']} shared-memory files removed, "
        f"{counts['left']} could not be removed"
    )
    print_result(arguments.json, {"scratch": scratch, **counts}, text)
    return 1 if counts["left"] else 0
