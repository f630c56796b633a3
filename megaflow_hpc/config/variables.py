"""Every environment variable of this package: those that a user may set, and those by which its own parts talk.

A campaign file says what is wanted; a variable says what is where on this machine, or decides by hand what is found out
otherwise. ``megaflow-hpc help variables`` prints them, and docs/reference/variables.md holds :func:`markdown`. A test
finds every name in package, scripts and launchers, and asks for it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable that a user may set."""

    name: str
    """Without ``MEGAFLOW_``, which all begin with."""
    meaning: str
    default: str
    """What happens where it is not set."""
    reader: str
    """Verbs, jobs or launchers that look at it."""


PREFIX = "MEGAFLOW_"

_SITE = (
    Variable(
        "SCRATCH",
        "node-local directory for sandboxes, their images and what they write",
        "SLURM_TMPDIR, TMPDIR, /tmp, /dev/shm: the first that is local",
        "every job, doctor, janitor, images stage",
    ),
    Variable("APPTAINER", "the Apptainer executable", "apptainer or singularity on PATH", "every verb and job"),
    Variable(
        "MPI",
        "types of srun --mpi for the pods, in the order to try",
        "those that srun offers, what fits mpi4py's MPI first",
        "plan, doctor",
    ),
    Variable(
        "ADDRESS",
        "name or address by which other nodes reach this one",
        "the host's name where it resolves, else the address that routes lead through",
        "engine servers, gateways",
    ),
    Variable(
        "SITE_FILE",
        "file with the most that a campaign may ask for, where there is no /etc/megaflow-hpc/site.yaml",
        "no caps",
        "planning",
    ),
    Variable(
        "PROFILES",
        "directories of site profiles that a group shares, separated by colons",
        "none beside ~/.config/megaflow-hpc/sites",
        "init, check, planning",
    ),
    Variable(
        "SITE_CHECK",
        "0: plan without trying whether a container starts here and looking for engines and models, on login nodes "
        "that have less than compute nodes",
        "1",
        "planning",
    ),
    Variable(
        "REQUEUES",
        "starts in a row of a pod or server that stored nothing before its element is given up",
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
        "environment.image_store of the campaign; else below the first of SCRATCH, PSCRATCH, GSCRATCH, WORK, PROJECT "
        "that has room; else ~/.megaflow-hpc/images",
        "images, planning, pods",
    ),
    Variable(
        "CACHE_GB", "10^9 bytes that a node's copies of images may take", "four fifths of what scratch has free", "pods"
    ),
)
_MODELS = (
    Variable(
        "ENGINE_VENV",
        "virtual environment that has vllm or sglang",
        "the interpreter that runs megaflow-hpc",
        "engine servers, doctor, launchers/setup",
    ),
    Variable(
        "TRAINER_PYTHON",
        "interpreter or virtual environment that has torch and transformers",
        "ENGINE_VENV's",
        "the trainer's job, doctor",
    ),
    Variable("TLS", "0: engine servers speak HTTP without TLS", "1", "engine servers"),
    Variable(
        "AGENTS",
        "directory with the programs of command-line agents, which sandboxes see",
        "~/.megaflow-hpc/agents",
        "agents of presets, launchers/agents.sh",
    ),
    Variable(
        "TASK_ENV",
        "names of variables, separated by commas, that tasks may take from this environment as ${NAME}",
        "none",
        "reading of Harbor tasks",
    ),
)
_BY_HAND = (
    Variable(
        "SANDBOX_WITHOUT",
        "features that sandboxes do without, separated by commas: clones, overlay, nsenter, program",
        "none: each is used where it works",
        "sandboxes",
    ),
)
_CLONE = (
    Variable("HOME", "where everything is set up", "~/.megaflow-hpc", "every launcher"),
    Variable("BUILD", "what a clone has for itself, such as its lab", "HOME/NAME-SUM of its path", "every launcher"),
    Variable("SITE", "1: use the site's Slurm; 0: start a lab", "1 where a Slurm answers", "every launcher"),
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
    "by hand, where what was found out is wrong": _BY_HAND,
    "launchers of a clone": _CLONE,
}
"""Title → the variables that a user may set."""

INTERNAL: Mapping[str, str] = {
    "POD": "batch script → pod: its name",
    "POD_DIR": "batch script → pod: directory in which the two talk",
    "START": "batch script → pod: which start of it this is",
    "END": "batch script → pod: when its walltime ends, in seconds UTC",
    "ELASTIC": "env.sh → batch script: engine servers come and go",
    "SERVER": "batch script → rank: the engine server that it runs",
    "TRAINER_SHARE": "env.sh → batch script: whether the trainer's job holds the engine server too",
    "TRAINER_REQUEUES": "env.sh → batch script: starts in a row without a commit, after which a trainer is given up",
    "TRAINER_STORE": "batch script → processes of a trainer: where they meet",
    "ASK_PODS": "batch script, local campaign → trainer: what prints how many pods run or are queued",
    "COMMAND": "sandbox → its processes: the command that they belong to",
    "CALL_S": "agent → its program: seconds that a model call may take",
    "INSTRUCTION_FILE": "agent → its program: the file with the task's instruction",
    "SKILLS_DIR": "task → agent: the directory of its skills in the sandbox",
    "CLONE": "launcher → itself, as another user: where the clone is",
    "FUSE": "launchers/test → tests of the ledger: a /dev/fuse for the user",
    "TEST_BASE_SIF": "launchers → tests, demo, learn: the base image that launchers/setup made",
    "KEEP_LAB": "launchers/demo → lab-session: leave the lab running",
    "LAB_ID": "launchers/lab → its daemons: which lab they belong to",
}
"""Name without ``MEGAFLOW_`` → who sets it for whom; nobody else does."""


def markdown() -> str:
    """Returns the tables of docs/reference/variables.md."""
    parts = []
    for title, variables in VARIABLES.items():
        head = ["| variable | means | default | read by |", "| --- | --- | --- | --- |"]
        parts += [f"## {title[0].upper()}{title[1:]}", "", *head]
        parts += [f"| `{PREFIX}{v.name}` | {v.meaning} | {v.default} | {v.reader} |" for v in variables]
        parts.append("")
    return "\n".join(parts)
