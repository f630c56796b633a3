"""Runs an engine from an Apptainer image (``model.image``).

::

    apptainer exec --cleanenv --home PRIVATE/home --pwd / [--nv] [--unsquash] --bind … IMAGE python3 -m …

The engine sees the server's private directory (socket, home, Apptainer's temporary files) and the paths in
``model.binds``. It sees the model and the run's published weights read-only. The image is not a sandbox, because the
engine is the user's own program. It shares the host's network, processes and /dev/shm, through which its processes pass
tensors. Only environment variables for engines and GPUs are passed on (:data:`PASSED`). They are passed as
``APPTAINERENV_`` variables, because other users can read the command line.
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
"""Environment variables inherited by an engine in an image, in addition to those set by its adapter."""
PYTHON = "python3"
"""Default interpreter in the image, if ``model.python`` is not set."""
HOME, UNPACKED = "home", "image"
FUSE = "/dev/fuse"
"""The FUSE device. Without it, unprivileged users cannot mount a SIF file, so each start has to unpack it."""


def in_image(launch: Launch, model: Mapping[str, Any], private: Path, seen: Iterable[Path] = ()) -> Launch:
    """Wraps a launch so that the engine runs in ``model.image``.

    Args:
        launch: The engine's launch on the host, with an interpreter in the image.
        model: The campaign's ``model:`` section.
        private: The server's private directory.
        seen: Host paths bound read-only in addition to the model. Missing paths are skipped.

    Raises:
        ConfigError: The image or Apptainer is missing, or a path cannot be bound.
    """
    image = Path(str(model["image"]))
    if not image.exists():
        raise ConfigError(
            f"model.image: {image} does not exist on this node; create it with apptainer build, on a shared file system"
        )
    try:
        runtime = find_apptainer()
    except SiteError as error:
        raise ConfigError(f"model.image: {error} (slurm.setup may load it)") from None
    prefix = Path(runtime).name.upper()
    remove_tree(private / UNPACKED, ignore_errors=True)  # left behind by a killed engine
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
    """Creates the directories that a container needs in a server's private directory, on the current node."""
    for name in (HOME, UNPACKED):
        (private / name).mkdir(mode=0o700, exist_ok=True)


def gpu_flags(model: Mapping[str, Any], devices: Path = Path("/dev")) -> list[str]:
    """Returns the Apptainer option that exposes the node's GPUs and their driver."""
    if not model.get("gpus"):
        return []
    return ["--rocm"] if (devices / "kfd").exists() and not (devices / "nvidiactl").exists() else ["--nv"]


def _model_paths(model: Mapping[str, Any]) -> list[Path]:
    """Returns the script and the model's directory with its symlink targets, or the whole Hugging Face cache."""
    paths = [Path(str(model["script"]))] if model.get("script") else []
    path = Path(str(model.get("path") or ""))
    if model.get("path") and path.is_dir():
        return [*paths, path, *sorted({file.resolve().parent for file in path.iterdir() if file.is_symlink()})]
    if model.get("path") and path.exists():
        return [*paths, path]
    cache = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return [*paths, Path(cache).expanduser()]


def _read_only(paths: Iterable[Path]) -> list[str]:
    """Returns read-only ``--bind`` values for the paths that exist. Skips duplicates and paths below another path.

    Raises:
        ConfigError: A path contains a comma or colon, which ``--bind`` cannot express.
    """
    existing = [Path(os.path.abspath(path)) for path in dict.fromkeys(paths) if path.exists()]
    roots = [path for path in existing if not any(path != other and path.is_relative_to(other) for other in existing)]
    for path in roots:
        if set(str(path)) & set(":,"):
            raise ConfigError(f"{path}: a path with a comma or a colon cannot be given to a container; rename it")
    return [f"{path}:{path}:ro" for path in dict.fromkeys(roots)]
