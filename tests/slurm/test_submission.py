"""Variables that a job queued from here does not inherit, and what a refused job is told."""

from __future__ import annotations

import pytest

from megaflow_hpc.slurm import site
from megaflow_hpc.slurm.submission import inherited, keys_of


def test_nothing_of_a_job_or_world_around_is_inherited_and_the_site_is() -> None:
    around = [
        "SLURM_MEM_PER_NODE",
        "SLURM_RESTART_COUNT",
        "SBATCH_PARTITION",
        "SLURMD_NODENAME",
        "PMI_RANK",
        "PMIX_RANK",
    ]
    ours = ["MEGAFLOW_POD", "MEGAFLOW_START", "MEGAFLOW_POD_DIR"]
    kept = ["PATH", "SLURM_CONF", "MEGAFLOW_MPI", "MEGAFLOW_SCRATCH", "OMP_NUM_THREADS", "PMIRROR"]
    assert set(inherited([*around, *ours, *kept])) == {*around, *ours}


@pytest.mark.parametrize(
    ("role", "words", "keys"),
    [
        ("pods", "SITE: every job must state a walltime: --time", ["slurm.pods.time"]),
        ("servers", "Batch job submission failed: Invalid account or account/partition combination specified",
         ["slurm.account", "slurm.servers.partition"]),
        ("gather", "Batch job submission failed: Invalid qos specification", ["slurm.qos"]),
        ("servers", "SITE: name the GPUs that you need (--gres)", ["the GPUs of the model or slurm.servers.gres"]),
        ("pods", "Unspecified error", []),
    ],
)  # fmt: skip
def test_a_refusal_names_the_keys_that_it_is_probably_about(role: str, words: str, keys: list[str]) -> None:
    assert keys_of(role, words) == keys


def test_all_that_a_site_says_is_quoted_without_repetition_and_within_bounds() -> None:
    lines = ["sbatch: error: SITE: first", "  scontrol: error: SITE: second", "", "SITE: second", "Unspecified error"]
    assert site.joined(lines) == "SITE: first; SITE: second; Unspecified error"
    assert len(site.joined(["x" * 9999])) == site.MAX_WORDS
