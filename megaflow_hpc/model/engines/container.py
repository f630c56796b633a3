"""Runs an engine from an Apptainer image (``model.image``).

::

    apptainer exec --cleanenv --home PRIVATE/home --pwd / [--nv] [--unsquash] --bind … IMAGE python3 -m …

The engine sees the server's private directory (socket, home, Apptainer's temporary files), the model and the run's
published weights read-only, and what ``model.binds`` names. This is no sandbox: an engine is its user's own program and
keeps the host's network, processes and /dev/shm, through which its processes pass tensors. Only variables of engines
and GPUs are passed on (:data:`PASSED`), by ``APPTAINERENV_`` rather than on the command line, which others can read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.model.engines.launch import Launch

PASSED = re.compile(
    r"(VLLM|SGLANG|SGL|HF|HUGGING_FACE|TRANSFORMERS|SAFETENSORS|TORCH|PYTORCH|TRITON|CUDA|NVIDIA|NCCL|HIP|ROCR|RCCL|"
    r"GLOO|UCX|FI|OMP|KMP|MKL|MEGAFLOW)_.*|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|LANG|LC_ALL|TZ|no_proxy|NO_PROXY"
)
"""Names of the variables that an engine in an image inherits, beside those that its adapter sets."""
PYTHON = "python3"
"""Interpreter in the image where ``model.python`` names no other."""
HOME, UNPACKED = "home", "image"
FUSE = "/dev/fuse"
"""Without it an ordinary user cannot mount a SIF file, and each start unpacks it."""


def in_image(launch: Launch, model: Mapping[str, Any], private: Path, seen: Iterable[Path] = ()) -> Launch:
    """Returns the same engine, started in ``model.image``.

    Args:
        launch: The engine as it would be started on the host, with an interpreter of the image.
        model: The campaign's ``model:`` section.
        private: The server's private directory.
        seen: Host paths bound read-only beside the model; missing ones are left out.

    Raises:
        ConfigError: The image or Apptainer is missing, or a path cannot be bound.
    """
    image = Path(str(model["image"]))
    if not image.exists():
        raise ConfigError(
            f"model.image: {image} does not exist on this node; make it with apptainer build, on a shared disk"
        )
    try:
        runtime = find_apptainer()
    except SiteError as error:
        raise ConfigError(f"model.image: {error} (slurm.setup may load it)") from None
    prefix = Path(runtime).name.upper()
    remove_tree(private / UNPACKED, ignore_errors=True)  # of an engine that was killed
    make_directories(private)
    command = [runtime, "-q", "exec", "--cleanenv", "--home", str(private / HOME), "--pwd", "/", *gpu_flags(model)]
    if image.is_file() and prefix == "APPTAINER" and not os.access(FUSE, os.R_OK | os.W_OK):
        command.append("--unsquash")
    for bind in [str(private), *_read_only([*_model_paths(model), *seen]), *map(str, model.get("binds") or ())]:
        command += ["--bind", bind]
    passed = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)} | launch.env
    passed |= {"PYTHONNOUSERSITE": "1", "TMPDIR": str(private)}
    env = {f"{prefix}ENV_{name}": value for name, value in passed.items()}
    env[f"{prefix}_TMPDIR"] = str(private / UNPACKED)
    return replace(launch, command=[*command, str(image), *launch.command], env=env)


def make_directories(private: Path) -> None:
    """Makes the directories that a container needs in a server's private directory; called on each of its nodes."""
    for name in (HOME, UNPACKED):
        (private / name).mkdir(mode=0o700, exist_ok=True)


def gpu_flags(model: Mapping[str, Any], devices: Path = Path("/dev")) -> list[str]:
    """Returns Apptainer's option for the node's GPUs and their driver."""
    if not model.get("gpus"):
        return []
    return ["--rocm"] if (devices / "kfd").exists() and not (devices / "nvidiactl").exists() else ["--nv"]


def _model_paths(model: Mapping[str, Any]) -> list[Path]:
    """Returns the model's directory with the targets of its links (a hub's cache has some), or the whole cache."""
    found = [Path(str(model["script"]))] if model.get("script") else []
    path = Path(str(model.get("path") or ""))
    if model.get("path") and path.is_dir():
        return [*found, path, *sorted({file.resolve().parent for file in path.iterdir() if file.is_symlink()})]
    if model.get("path") and path.exists():
        return [*found, path]
    cache = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return [*found, Path(cache).expanduser()]


def _read_only(paths: Iterable[Path]) -> list[str]:
    """Returns the existing paths as ``--bind`` takes them, without duplicates and those below another.

    Raises:
        ConfigError: A path has a comma or colon, which ``--bind`` cannot express.
    """
    there = [Path(os.path.abspath(path)) for path in dict.fromkeys(paths) if path.exists()]
    roots = [path for path in there if not any(path != other and path.is_relative_to(other) for other in there)]
    for path in roots:
        if set(str(path)) & set(":,"):
            raise ConfigError(f"{path}: a path with a comma or a colon cannot be given to a container; rename it")
    return [f"{path}:{path}:ro" for path in dict.fromkeys(roots)]
