"""Describes how an engine is started and reached: on the host, in an image, or across several nodes.

In an Apptainer image (``model.image``)::

    apptainer exec --cleanenv --home PRIVATE/home --pwd / [--nv] [--unsquash] --bind … IMAGE python3 -m …

The engine sees the server's private directory (socket, home, Apptainer's temporary files) and the paths in
``model.binds``. It sees the model and the run's published weights read-only. The image is not a sandbox, because the
engine is the user's own program. The container shares the host's network and processes. It also shares /dev/shm,
through which the engine's processes pass tensors. Only environment variables for engines and GPUs (:data:`PASSED`) are
passed on. They are passed as ``APPTAINERENV_`` variables, because other users can read the command line.

Across the nodes of the server's allocation (``model.nodes``), as a job step with one task per node::

    server ── lifeline ── srun ─┬─ first node: lifeline ── engine --node-rank 0, listens on the server's socket
                                └─ node k:     lifeline ── engine --node-rank k --headless

The server runs on the first node, so its proxy reaches the engine's Unix socket as usual. The part on each node watches
the step's standard input: end-of-file stops all parts, even if the server was killed. If one part exits, the step ends.
``srun`` starts ``python -m megaflow_hpc.model.engines.launch PRIVATE COMMAND…`` on each node. The command contains the
path of the server's private directory, so the other nodes create a directory at the same path.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.model.engines import lifeline


@dataclass
class Launch:
    """Command, environment and address of an engine. An external engine is already running, so it has no
    ``command``."""

    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables added to the server's own environment."""
    uds: str | None = None
    """Path of the engine's Unix socket. ``None`` if it listens at ``base_url``."""
    base_url: str = ""
    """Root URL of the engine, without ``/v1``."""
    api_url: str = ""
    """Base URL of an external endpoint's API, such as ``https://HOST/v1``. If empty, ``base_url/v1`` is used."""
    api: str = ""
    """API of an external endpoint, a key of :data:`~megaflow_hpc.model.engines.upstream.UPSTREAMS`. If empty, the
    endpoint gets the same requests as an engine."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Default values of request fields for an external endpoint. They are added to completion requests that do not set
    them."""
    key: str = field(default="", repr=False)
    """Bearer token that the engine requires. Empty if it requires none."""
    model_name: str = ""
    """Name under which the engine serves the model."""
    protocol: str = "text"
    """The highest gateway protocol that the engine supports: ``text``, ``plain``, ``split`` or ``sglang``. It is
    ``reward`` for a reward model."""
    reload: str = ""
    """API for loading weights in place: ``vllm`` or ``sglang``. If empty, new weights require a restart."""
    metrics: bool = False
    """True if ``/metrics`` reports the number of waiting requests."""
    slots: int = 0
    """Maximum number of requests that the engine processes concurrently, or 0 if unknown."""
    start_timeout_s: float = 900.0
    """Maximum seconds from the start to the first completion. Large models take minutes to load."""

    def url(self, path: str) -> str:
        """Returns the URL of an engine API path such as ``/v1/models``."""
        if self.uds:
            return f"http://engine{path}"
        if self.api_url and path.startswith("/v1/"):
            return self.api_url + path.removeprefix("/v1")
        return self.base_url + path


# --- in an image ------------------------------------------------------------------------------------------------------

PASSED = re.compile(
    r"(VLLM|SGLANG|SGL|HF|HUGGING_FACE|TRANSFORMERS|SAFETENSORS|TORCH|PYTORCH|TRITON|CUDA|NVIDIA|NCCL|HIP|ROCR|RCCL|"
    r"GLOO|UCX|FI|OMP|KMP|MKL|MEGAFLOW)_.*|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|LANG|LC_ALL|TZ|no_proxy|NO_PROXY"
)
"""Environment variables that an engine running in an image inherits, in addition to those set by its adapter."""
IMAGE_PYTHON = "python3"
"""Interpreter in the image if ``model.python`` is not set."""
HOME, UNPACKED = "home", "image"
FUSE = "/dev/fuse"
"""Path of the FUSE device. Without it, unprivileged users cannot mount a SIF file, so every start unpacks the file."""


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
    """Returns host paths that the model needs: its script, and its directory with the targets of symlinks. If the model
    is not a directory, returns the whole Hugging Face cache."""
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


# --- across nodes -----------------------------------------------------------------------------------------------------


def over_nodes(launch: Launch, nodes: int, private: Path, environ: Mapping[str, str] = os.environ) -> Launch:
    """Wraps a launch in a job step of ``nodes`` tasks, one per node.

    Raises:
        ConfigError: The allocation has too few nodes.
    """
    given = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 0)
    if given < nodes:
        raise ConfigError(
            f"model.nodes: {nodes}: this server runs on {given or 'no'} nodes of Slurm; submit the campaign there, or "
            f"by hand: sbatch --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 …"
        )
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--mpi=none", "--overlap"]
    srun += ["--kill-on-bad-exit=1", "--wait=0", "--input=all", "--export=ALL"]
    if environ.get("SLURM_CPUS_PER_TASK"):  # job steps do not inherit this option from sbatch
        srun.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    part = [sys.executable, "-m", "megaflow_hpc.model.engines.launch", str(private)]
    return replace(launch, command=[*srun, *part, *launch.command])


def part_command(rank: int, command: Sequence[str]) -> list[str]:
    """Returns the engine command for one node. Ranks above 0 serve no requests."""
    words = [*command, "--node-rank", str(rank)]
    return [*words, "--headless"] if rank else words


def main(private: Path, command: Sequence[str]) -> int:
    """Runs the engine's part on this node until the part or the server exits. Returns the part's exit status."""
    rank = int(os.environ["SLURM_PROCID"])
    for name in list(os.environ):
        if name.startswith(("PMI_", "PMIX_")):
            del os.environ[name]
    created = False
    if rank:
        try:
            private.mkdir(mode=0o700)
            make_directories(private)
            created = True
        except FileExistsError:
            status = private.lstat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o170077 != 0o040000:
                print(f"error: {private} belongs to another user, or is open to others", file=sys.stderr)
                return 1
    try:
        # Slurm signals the step while the server is still draining requests. The server ends the step itself.
        return lifeline.main(part_command(rank, command), end_on=(signal.SIGHUP,))
    finally:
        if created:
            remove_tree(private, ignore_errors=True)


if __name__ == "__main__":
    os.umask(0o077)
    exit_status = main(Path(sys.argv[1]), sys.argv[2:])
    sys.stderr.flush()
    os._exit(exit_status)
