"""Lab variants: settings of real sites that differ from the lab's defaults. Each variant has one trait.

``launchers/lab start --site NAME`` starts a lab with a variant, ``launchers/lab sites`` lists them. A variant changes
the lab's slurm.conf, by settings documented in slurm.conf(5), and adds at most one file next to it. The lines in
``DIR/site.conf`` still come last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

LUA_END = """
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
"""
DEMANDS = (
    """\
-- Demands a walltime and an account, and tells the user which one is missing.
function slurm_job_submit(job_desc, part_list, submit_uid)
    if job_desc.time_limit == slurm.NO_VAL then
        slurm.log_user("this site: state a walltime (--time)")
        return slurm.ERROR
    end
    if job_desc.account == nil then
        slurm.log_user("this site: state a project (--account)")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end
"""
    + LUA_END
)
ROUTES = (
    """\
-- Chooses the partition by the constraint, as sites do whose users name a kind of node.
function slurm_job_submit(job_desc, part_list, submit_uid)
    local wanted = job_desc.features or ""
    if job_desc.partition == nil and wanted:find("gpu") then
        job_desc.partition = "gpu"
    end
    return slurm.SUCCESS
end
"""
    + LUA_END
)


@dataclass(frozen=True)
class Site:
    """One variant.

    ``conf`` is appended to slurm.conf, where later values win. ``edit`` changes lines that the lab wrote. Nodes and
    partitions can only be changed this way, because Slurm accepts each definition once. ``files`` are written next to
    slurm.conf. ``since`` is the first Slurm version (year, month) with the setting. ``plugin`` names a Slurm plugin
    that the variant requires.
    """

    about: str
    conf: str = ""
    edit: Callable[[str], str] = field(default=lambda conf: conf)
    files: dict[str, str] = field(default_factory=dict)
    since: tuple[int, int] = (0, 0)
    plugin: str = ""
    gpus: tuple[tuple[str, int], ...] = ()
    """Type and number of the GPUs of each GPU node. Empty: the lab's untyped GPUs."""
    stepd: str = ""
    """Name of the process that starts batch scripts; empty: slurmstepd."""


def _replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def edit(conf: str) -> str:
        for old, new in pairs:
            if old not in conf:
                raise ValueError(f"the lab's slurm.conf has no {old!r}")
            conf = conf.replace(old, new)
        return conf

    return edit


TYPES = (("3090", 4), ("a100", 4))

SITES: dict[str, Site] = {
    "plain": Site("the lab's defaults"),
    "waittime": Site("WaitTime=15: a step is killed 15 s after its first task has ended", "WaitTime=15\n"),
    "norequeue": Site("JobRequeue=0: jobs are not requeued unless they ask for it", "JobRequeue=0\n"),
    "grace": Site(
        "partition preempt: GraceTime=40, so 40 s pass between the signal of a preemption and the end of the job",
        edit=_replaced(("GraceTime=10", "GraceTime=40")),
    ),
    "lua": Site(
        "job_submit.lua refuses jobs without --time and --account",
        "JobSubmitPlugins=lua\n",
        files={"job_submit.lua": DEMANDS},
        plugin="job_submit_lua.so",
    ),
    "hidden": Site(
        "partitions are hidden (from users of a lab with --users; the owner of a lab sees them), and job_submit.lua "
        "sends jobs with --constraint=gpu to GPU nodes, others to CPU nodes",
        "JobSubmitPlugins=lua\n",
        edit=_replaced(
            ("PartitionName=DEFAULT ", "PartitionName=DEFAULT Hidden=YES "),
            ("CPUs=8 RealMemory=4096", "CPUs=8 Feature=cpu RealMemory=4096"),
            ("CPUs=8 RealMemory=8192", "CPUs=8 Feature=gpu RealMemory=8192"),
        ),
        files={"job_submit.lua": ROUTES},
        plugin="job_submit_lua.so",
    ),
    "exclusive": Site(
        "OverSubscribe=EXCLUSIVE: a job gets whole nodes, whatever it asks for",
        edit=_replaced(("PartitionName=DEFAULT ", "PartitionName=DEFAULT OverSubscribe=EXCLUSIVE ")),
    ),
    "gputypes": Site(
        "GPUs have types: gpu1 has Gres=gpu:3090:4 and gpu2 has Gres=gpu:a100:4",
        "AccountingStorageTRES=gres/gpu," + ",".join(f"gres/gpu:{kind}" for kind, _ in TYPES) + "\n",
        gpus=TYPES,
    ),
    "ratelimit": Site(
        "slurmctld answers 30 requests of a user at once, and then 2 a second",
        "SlurmctldParameters=rl_enable,rl_bucket_size=30,rl_refill_rate=2,rl_refill_period=1\n",
        since=(23, 2),
    ),
    "psslurm": Site(
        "batch scripts are children of a process named psid, as where ParaStation replaces slurmd",
        stepd="psid",
    ),
    "array": Site("MaxArraySize=5 and MaxJobCount=40: small arrays, few jobs", "MaxArraySize=5\nMaxJobCount=40\n"),
}


def table() -> str:
    """Returns one line for each variant."""
    return "\n".join(f"  {name:10} {site.about}" for name, site in SITES.items())
