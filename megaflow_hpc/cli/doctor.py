"""``doctor``: what this site has, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megaflow_hpc.cli.output import add_json, print_json
from megaflow_hpc.errors import MegaflowError, SiteError


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    level: Literal["ok", "warn", "FAIL"]
    found: str
    remedy: str = ""


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check what this site has: ok, warn or FAIL with the remedy",
        description="Checks interpreter, Slurm, MPI, Apptainer, scratch and engines. Nothing is changed.",
        epilog="examples:\n  megaflow-hpc doctor\n  megaflow-hpc doctor --job      # also two MPI ranks through srun",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--job", action="store_true", help="also run a two-rank MPI probe through srun (waits for two CPUs)"
    )
    add_json(parser)
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _slurm, _mpi, _apptainer, _scratch, _engines]
    if arguments.job:
        checks.append(_mpi_probe)
    findings = [finding for check in checks for finding in _guarded(check)]
    failed = any(finding.level == "FAIL" for finding in findings)
    if arguments.json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            print(f"{finding.level:4}  {finding.check:12}  {finding.found}")
            if finding.remedy:
                print(f"      {'':12}  -> {finding.remedy}")
    return SiteError.exit_status if failed else 0


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except (MegaflowError, OSError) as error:
        yield Finding(check.__name__.strip("_"), "FAIL", str(error))


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    for name in ("submitit", "mpi4py", "h5py", "spython"):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "FAIL", "not installed", "pip install megaflow-hpc")
    try:
        yield Finding("agents", "ok", f"mini-swe-agent {importlib.metadata.version('mini-swe-agent')}")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("agents", "warn", "mini-swe-agent is not installed", "pip install --no-deps mini-swe-agent")


def _slurm() -> Iterator[Finding]:
    from megaflow_hpc.slurm import site

    if not site.has_slurm():
        yield Finding(
            "slurm", "warn", "sbatch is not on PATH", "load the site's module; without it use --launcher local"
        )
        return
    yield Finding("slurm", "ok", site.ask("sbatch", "--version").strip())
    for name, part in sorted(site.partitions().items()):
        gpus = "GPUs, " if part.gpus else ""
        shown = f"{name}: {part.nodes} nodes, {part.cpus} CPUs, {part.memory_mb} MB, {gpus}limit {part.time}"
        yield Finding("partition", "ok" if part.up else "warn", shown + ("" if part.up else ", down"))
    yield Finding("array size", "ok", f"MaxArraySize {site.max_array_size()}")
    if shutil.which("sacct"):
        try:
            site.ask("sacct", "-n", "-X", "-S", "now-1minutes")
            yield Finding("accounting", "ok", "sacct answers")
        except SiteError as error:
            yield Finding("accounting", "warn", str(error), "states of ended jobs will not be known")


def _mpi() -> Iterator[Finding]:
    from megaflow_hpc.slurm import site

    mpiexec = Path(sys.executable).parent / "mpiexec"
    found = str(mpiexec) if mpiexec.exists() else shutil.which("mpiexec")
    remedy = "pip install mpich, or load an MPI module"
    yield Finding("mpiexec", "ok" if found else "warn", found or "not found", "" if found else remedy)
    if site.has_slurm():
        yield Finding("srun --mpi", "ok", site.mpi_plugin())


def _mpi_probe() -> Iterator[Finding]:
    from megaflow_hpc.slurm import site

    code = "from mpi4py import MPI; c = MPI.COMM_WORLD; print('ranks', c.allreduce(1))"
    output = site.ask("srun", f"--mpi={site.mpi_plugin()}", "-n2", "-N1", "--time=2", sys.executable, "-c", code)
    joined = output.count("ranks 2") == 2
    remedy = "set MEGAFLOW_MPI to another type of srun --mpi=list"
    yield Finding(
        "mpi probe",
        "ok" if joined else "FAIL",
        "two ranks in one world" if joined else output.strip(),
        "" if joined else remedy,
    )


def _apptainer() -> Iterator[Finding]:
    from megaflow_hpc.environments.apptainer import find_apptainer, probe

    found = probe(find_apptainer())
    yield Finding("apptainer", "ok", f"{found['version']} at {found['path']}")
    refused = found["user_namespaces"]
    remedy = "ask the site for unprivileged user namespaces, or for setuid Apptainer" if refused else ""
    yield Finding("namespaces", "warn" if refused else "ok", refused or "user namespaces work", remedy)
    fuse = os.access("/dev/fuse", os.R_OK | os.W_OK)
    remedy = "" if fuse else "images are unpacked to scratch once per node instead of mounted"
    yield Finding("/dev/fuse", "ok" if fuse else "warn", "usable" if fuse else "not open to users", remedy)


def _scratch() -> Iterator[Finding]:
    path = os.environ.get("MEGAFLOW_SCRATCH") or os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(path).free / 1e9
    remedy = "" if free > 5 else "set MEGAFLOW_SCRATCH to a node-local directory with room for the images"
    yield Finding("scratch", "ok" if free > 5 else "warn", f"{path}: {free:.0f} GB free", remedy)


def _engines() -> Iterator[Finding]:
    venv = os.environ.get("MEGAFLOW_ENGINE_VENV")
    if not venv:
        yield Finding(
            "engine",
            "warn",
            "MEGAFLOW_ENGINE_VENV is not set",
            "name the virtual environment that has vllm, or set model.python",
        )
    elif not (Path(venv) / "bin" / "python").exists():
        yield Finding(
            "engine", "FAIL", f"{venv}: no interpreter there", "point MEGAFLOW_ENGINE_VENV at a virtual environment"
        )
    else:
        yield Finding("engine", "ok", venv)
