"""Documents the environment variables of this package: those that users may set, and internal ones.

The campaign file defines the work. Variables specify paths on this machine, or override detected values. ``megaflow-hpc
help variables`` prints them, and docs/reference/variables.md contains the output of :func:`markdown`. A test requires
an entry in this module for every name used in the package, scripts and launchers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """An environment variable that users may set."""

    name: str
    """Name without the prefix ``MEGAFLOW_``."""
    meaning: str
    default: str
    """Effect if the variable is unset."""
    reader: str
    """Commands, jobs or launchers that read the variable."""


PREFIX = "MEGAFLOW_"

_SITE = (
    Variable(
        "SCRATCH",
        "node-local directory for sandboxes, their images and the files that they write",
        "SLURM_TMPDIR, TMPDIR, /tmp, /dev/shm: the first that is local",
        "every job, doctor, janitor, images stage",
    ),
    Variable("APPTAINER", "the Apptainer executable", "apptainer or singularity on PATH", "every verb and job"),
    Variable(
        "MPI",
        "types of srun --mpi for the pods, in the order to try",
        "those that srun offers, first the one that suits mpi4py's MPI",
        "plan, doctor",
    ),
    Variable(
        "ADDRESS",
        "name or address by which other nodes reach this one",
        "the host's name if it resolves, else the address of the default route",
        "engine servers, gateways",
    ),
    Variable(
        "SITE_FILE",
        "file with the site's caps on campaigns, if there is no /etc/megaflow-hpc/site.yaml",
        "no caps",
        "planning",
    ),
    Variable(
        "PROFILES",
        "directories of site profiles that a group shares, separated by colons",
        "only ~/.config/megaflow-hpc/sites and the package's own",
        "init, check, planning",
    ),
    Variable(
        "REQUEUES",
        "consecutive starts without progress after which a pod or server is not requeued",
        "slurm.requeues of the campaign",
        "batch scripts",
    ),
    Variable(
        "CLUSTER",
        "name of the cluster that a pod is submitted to by hand, with sbatch -M",
        "the cluster of the login node",
        "sbatch/sandbox_pods.sbatch",
    ),
)
_IMAGES = (
    Variable(
        "IMAGE_STORE",
        "directories of images, separated by colons; the first is written to",
        "environment.image_store of the campaign; else in the first of SCRATCH, PSCRATCH, GSCRATCH, WORK, PROJECT "
        "with enough space; else ~/.megaflow-hpc/images",
        "images, planning, pods",
    ),
    Variable(
        "IMAGES",
        "images of Inspect's samples: NAME=TARGET, separated by commas, with patterns",
        "docker://NAME for each NAME",
        "inspect eval --sandbox megaflow_hpc",
    ),
    Variable(
        "CACHE_GB",
        "size limit of a node's image cache, in GB (10^9 bytes)",
        "four fifths of the free space of scratch",
        "pods",
    ),
)
_MODELS = (
    Variable(
        "ENGINE_VENV",
        "virtual environment that contains vllm or sglang",
        "the interpreter that runs megaflow-hpc",
        "engine servers, doctor, launchers/setup",
    ),
    Variable(
        "TRAINER_PYTHON",
        "interpreter or virtual environment that contains torch and transformers",
        "ENGINE_VENV's",
        "the trainer's job, doctor",
    ),
    Variable("TLS", "0: engine servers speak HTTP without TLS", "1", "engine servers"),
    Variable(
        "AGENTS",
        "directory with the programs of command-line agents, visible in sandboxes",
        "~/.megaflow-hpc/agents",
        "agents of presets, launchers/agents.sh",
    ),
    Variable(
        "TASK_ENV",
        "names of variables, separated by commas, that tasks may take from this environment as ${NAME}",
        "none",
        "Harbor tasks",
    ),
)
_BY_HAND = (
    Variable(
        "SANDBOX_WITHOUT",
        "sandbox features to switch off, separated by commas: clones, overlay, nsenter, program",
        "none; each is used if it works",
        "sandboxes",
    ),
)
_CLONE = (
    Variable("HOME", "directory for everything that launchers install", "~/.megaflow-hpc", "every launcher"),
    Variable(
        "BUILD", "directory for the clone's own files, like its lab", "HOME/NAME-SUM of its path", "every launcher"
    ),
    Variable("SITE", "1: use the site's Slurm; 0: start a lab", "1 if a Slurm answers", "every launcher"),
    Variable("USER", "user to work as, when started as root", "megaflow", "every launcher"),
    Variable("PYTHON", "a Python 3.11 or later", "the first on PATH", "launchers/setup, launchers/lab"),
    Variable("REQUIREMENTS", "list of packages with their hashes", "launchers/requirements.txt", "launchers/setup"),
    Variable("TORCH_INDEX", "package index that has the CPU build of torch", "pip's own", "launchers/setup"),
    Variable("DEBIAN_MIRROR", "a Debian archive", "that of the distribution", "launchers/setup, launchers/fresh"),
    Variable("LAB_DIR", "directory of the lab", "BUILD/lab", "launchers/lab, demo, learn, test"),
    Variable("DEMO_MODEL", "tiny, gemma or a model's directory", "tiny", "launchers/demo"),
    Variable("CPU_PARTITION", "partition of the pods, on a site", "the site's default", "launchers/demo, learn"),
    Variable("GPU_PARTITION", "partition of the engines, on a site", "the site's default", "launchers/demo, learn"),
)

VARIABLES: Mapping[str, tuple[Variable, ...]] = {
    "the site": _SITE,
    "images": _IMAGES,
    "models, trainers, agents": _MODELS,
    "overrides of detected features": _BY_HAND,
    "launchers of a clone": _CLONE,
}
"""Variables that users may set, by heading."""

INTERNAL: Mapping[str, str] = {
    "POD": "batch script → pod: its name",
    "POD_DIR": "batch script → pod: directory for messages between the two",
    "START": "batch script → pod: number of this start",
    "END": "batch script → pod: when its walltime ends, in Unix seconds",
    "ELASTIC": "env.sh → batch script: engine servers start and stop on demand",
    "LIFELINE": "lifeline → engine's processes: a random text that identifies them",
    "SERVER": "batch script → rank: the engine server that it runs",
    "TRAINER_SHARE": "env.sh → batch script: whether the trainer's job holds the engine server too",
    "TRAINER_REQUEUES": "env.sh → batch script: consecutive starts without a commit after which a trainer is given up",
    "TRAINER_STORE": "batch script → processes of a trainer: the address at which they meet",
    "ASK_PODS": "batch script, local campaign → trainer: command that prints how many pods run or are queued",
    "COMMAND": "sandbox → its processes: id of their command",
    "CALL_S": "agent → its program: seconds that a model call may take",
    "INSTRUCTION_FILE": "agent → its program: the file with the task's instruction",
    "SKILLS_DIR": "task → agent: the directory of its skills in the sandbox",
    "MCP_SERVERS": "task → an agent's program: its MCP servers, as JSON",
    "JUDGE": "verifier → the task's tests: name of the first judge",
    "CLONE": "launcher → itself, as another user: where the clone is",
    "FUSE": "launchers/test → tests of the ledger: a /dev/fuse for the user",
    "TEST_BASE_SIF": "launchers → tests, demo, learn: the base image that launchers/setup made",
    "KEEP_LAB": "launchers/demo → lab-session: leave the lab running",
    "LAB_ID": "launchers/lab → its daemons: which lab they belong to",
}
"""Internal variables by name without ``MEGAFLOW_``. The text states who sets the variable, who reads it, and its
meaning."""


def markdown() -> str:
    """Returns the Markdown lists of docs/reference/variables.md."""
    parts = []
    for title, variables in VARIABLES.items():
        parts += [f"## {title[0].upper()}{title[1:]}", ""]
        parts += [f"- `{PREFIX}{v.name}` ({v.reader}): {v.meaning}; default: {v.default}" for v in variables]
        parts.append("")
    return "\n".join(parts)
