"""Variables that a job queued from here does not inherit."""

from __future__ import annotations

from megaflow_hpc.slurm.submission import inherited


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
