"""An engine out of an Apptainer image (``model.image``): its command line, what it sees of the host, what it is told.

::

    apptainer exec --cleanenv --home PRIVATE/home --pwd / [--nv] [--unsquash] --bind … IMAGE python3 -m …

It sees the server's private directory (its socket, its home, the runtime's own temporary files), the model, the run's
published weights read-only, and what ``model.binds`` names. It is no sandbox: an engine is its user's own program, and
it keeps the host's network, processes and /dev/shm, through which its processes pass tensors. Of the variables only
those of engines and GPUs go in (:data:`PASSED`), by ``APPTAINERENV_`` and not on the command line, where others read.
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
"""Variables that an engine in an image is given, beside those that its adapter sets."""
PYTHON = "python3"
"""In the image, where ``model.python`` names no other."""
HOME, UNPACKED = "home", "image"
FUSE = "/dev/fuse"
"""Without it an ordinary user cannot mount a SIF file: each start unpacks it."""


def contained(launch: Launch, model: Mapping[str, Any], private: Path, seen: Iterable[Path] = ()) -> Launch:
    """The same engine, started in ``model.image``.

    Args:
        private: The server's own directory.
        seen: Of the host, read-only, beside the model; what does not exist is left out.

    Raises:
        ConfigError: There is no such image, no Apptainer, or a path that it cannot be given.
    """
    image = Path(str(model["image"]))
    if not image.exists():
        raise ConfigError(
            f"model.image: {image} does not exist on this node; make it with apptainer build, on a shared disk"
        )
    try:
        runtime = find_apptainer()
    except SiteError as error:
        raise ConfigError(f"model.image: {error}") from error
    prefix = Path(runtime).name.upper()
    clear(private / UNPACKED)  # of an engine that was killed
    furnish(private)
    words = [runtime, "-q", "exec", "--cleanenv", "--home", str(private / HOME), "--pwd", "/", *gpu_flags(model)]
    if image.is_file() and prefix == "APPTAINER" and not os.access(FUSE, os.R_OK | os.W_OK):
        words.append("--unsquash")
    for bind in [str(private), *_read_only([*_model_paths(model), *seen]), *map(str, model.get("binds") or ())]:
        words += ["--bind", bind]
    told = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)} | launch.env
    told |= {"PYTHONNOUSERSITE": "1", "TMPDIR": str(private)}
    env = {f"{prefix}ENV_{name}": value for name, value in told.items()}
    env[f"{prefix}_TMPDIR"] = str(private / UNPACKED)
    return replace(launch, command=[*words, str(image), *launch.command], env=env)


def furnish(private: Path) -> None:
    """Makes in a server's private directory what a container needs there, on each node that it runs on."""
    for name in (HOME, UNPACKED):
        (private / name).mkdir(mode=0o700, exist_ok=True)


def clear(folder: Path) -> None:
    """Removes a directory with an unpacked image in it, whose directories may be closed to their owner."""
    remove_tree(folder, ignore_errors=True)


def gpu_flags(model: Mapping[str, Any], devices: Path = Path("/dev")) -> list[str]:
    """What brings the node's GPUs and their driver into a container."""
    if not model.get("gpus"):
        return []
    return ["--rocm"] if (devices / "kfd").exists() and not (devices / "nvidiactl").exists() else ["--nv"]


def _model_paths(model: Mapping[str, Any]) -> list[Path]:
    """The model's directory and where links in it lead to (a hub's cache keeps files apart), or the whole cache."""
    found = [Path(str(model["script"]))] if model.get("script") else []
    path = Path(str(model.get("path") or ""))
    if model.get("path") and path.is_dir():
        return [*found, path, *sorted({file.resolve().parent for file in path.iterdir() if file.is_symlink()})]
    if model.get("path") and path.exists():
        return [*found, path]
    cache = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return [*found, Path(cache).expanduser()]


def _read_only(paths: Iterable[Path]) -> list[str]:
    """Each path once, as ``--bind`` takes it; those in another's directory come with it."""
    there = [Path(os.path.abspath(path)) for path in dict.fromkeys(paths) if path.exists()]
    roots = [path for path in there if not any(path != other and path.is_relative_to(other) for other in there)]
    for path in roots:
        if set(str(path)) & set(":,"):
            raise ConfigError(f"{path}: a path with a comma or a colon cannot be given to a container; rename it")
    return [f"{path}:{path}:ro" for path in dict.fromkeys(roots)]
