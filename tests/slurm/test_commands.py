"""What Slurm's commands print is understood: programs of their names on PATH print what Slurm 23.11 does."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megaflow_hpc import config
from megaflow_hpc.campaign import job_requests
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.cli import doctor, main
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.host import mpi
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.resources import __version__
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, ServerGroup, read_run, write_run
from megaflow_hpc.slurm import accounting, arrays, fits, ids, limits, script, site
from megaflow_hpc.slurm.accounting import JobState, efficiencies
from megaflow_hpc.slurm.arrays import Arrays
from megaflow_hpc.slurm.limits import Cap
from tests.support.training import training_run

CACHED = (site.partitions, site.mpi_plugins, site.configuration, site._shown_partitions, site._sacctmgr)
CONFIGURATION = """\
Configuration data as of 2026-03-01T10:00:00
AccountingStorageEnforce = associations,limits,qos,safe
ClusterName             = lab
MaxArraySize            = 501

Slurmctld(primary) at head is UP
"""
QOS = "name,flags,maxjobspu,maxsubmitpu,maxjobspa,maxsubmitpa,grpjobs,grpsubmit,maxtres,maxtrespu,maxtrespa,grptres"
QOS += ",maxwall"
Print = Callable[..., Path]


@pytest.fixture
def prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Print]:
    """Makes a command that prints ``text`` and notes how it was called in the file that is returned.

    ``otherwise``: a shell pattern on the arguments, and what is printed then.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for name in ("MEGAFLOW_MPI", "SBATCH_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for asked in CACHED:
        asked.cache_clear()

    def make(name: str, text: str = "", status: int = 0, said: str = "", otherwise: tuple[str, str] = ("", "")) -> Path:
        called = tmp_path / f"{name}.called"
        script = folder / name
        lines = [f'printf "%s\\n" "$*" >> {called}']
        lines += (
            [f"case $* in {otherwise[0]}) printf %s {shlex.quote(otherwise[1])}; exit;; esac"] if otherwise[0] else []
        )
        lines += [f"printf %s {shlex.quote(text)}"]
        lines += [f"printf %s {shlex.quote(said)} >&2", f"exit {status}"]
        script.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
        script.chmod(0o755)
        return called

    yield make
    for asked in CACHED:
        asked.cache_clear()


def test_a_job_that_cannot_be_released_keeps_back_no_other(prints: Print, tmp_path: Path) -> None:
    for name in ("sbatch", "srun"):
        prints(name)
    prints("squeue", "7_[0-2]|PENDING|N/A|N/A||launch failed requeued held\n")
    prints("scontrol", status=1, said="Job has already finished for job 7_1\n", otherwise=("*7_[02]", ""))
    run = training_run(tmp_path / "run", None)
    record = read_run(run)
    jobs = Jobs(run, record.config, record, Ledger(run))
    jobs.arrays._record("7", "pods", 3)
    assert jobs.release_unlaunched() == ["7_0", "7_2"]
    refused, released = jobs.notices
    assert refused == "7_1: not released: scontrol release 7_1: Job has already finished for job 7_1"
    assert released == "released 2 jobs that their nodes could not launch: 7_0, 7_2"


SQUEUE = """\
7_[2-3%2]|PENDING|1795335600|1795339200||Resources
7_0|RUNNING|1795335100|1795338700|node1|None
7_1|COMPLETED|1795335100|1795335200|node2|None
8_[0-1]|PENDING|N/A|N/A||JobHeldUser
9_0|REQUEUE_HOLD|N/A|N/A||(null)
10+0|COMPLETED|1795335100|1795335200|node3|None
10+1|RUNNING|1795335100|NONE|node4|None
11|PENDING|N/A|N/A||late | ask Ada
12_0|RUNNING|1795335100|1795338700|node5|None
"""


def test_elements_that_squeue_knows_are_told_apart(prints: Print) -> None:
    called = prints("squeue", SQUEUE)
    found = accounting.live_jobs(["7", "8", "9", "10", "11"])
    assert called.read_text() == "--local -h --me -t all -o %i|%T|%S|%e|%N|%r\n", "ids would fetch the whole job table"
    assert "12_0" not in found, "a job of another campaign"
    assert found["7_0"] == JobState("7_0", "RUNNING", "None", "node1", 1795335100.0, 1795338700.0)
    assert [found[name].ends_at for name in ("7_1", "7_2", "10")] == [None, None, None], "only a running job's is known"
    assert {name for name, job in found.items() if job.live} == {"7_0", "7_2", "7_3", "8_0", "8_1", "9_0", "10", "11"}
    assert {name for name, job in found.items() if job.held} == {"8_0", "8_1", "9_0"}
    assert found["10"].node == "node4", "a heterogeneous job lives while a part of it does"
    pods, held, requeued, other = accounting.waiting(("pods", job) for job in found.values())
    assert pods | {"means": ""} == {
        "role": "pods", "reason": "Resources", "jobs": 2, "first": "7_2", "means": "", "remedy": "",
        "starts_at": 1795335600.0,
    }  # fmt: skip
    assert (held["reason"], held["remedy"]) == ("JobHeldUser", "scontrol release JOB")
    assert (requeued["reason"], requeued["remedy"]) == ("REQUEUE_HOLD", "scontrol release JOB")
    assert (other["reason"], other["means"], other["starts_at"]) == ("late | ask Ada", "", None)


@pytest.mark.parametrize(
    ("state", "live", "held", "remedy"),
    [
        ("RESV_DEL_HOLD", True, True, "name another reservation"),
        ("SPECIAL_EXIT", True, True, "scontrol release"),
        ("REQUEUED", True, False, ""),
        ("EXPEDITING", True, False, ""),
        ("STAGE_OUT", True, False, None),
        ("POWER_UP_NODE", True, False, None),
        ("REVOKED", False, False, None),
        ("LAUNCH_FAILED", False, False, None),
        ("UPDATE_DB", False, False, None),
    ],
)
def test_rare_states_are_told_apart_and_explained(state: str, live: bool, held: bool, remedy: str | None) -> None:
    job = JobState("7_0", state, "None")
    assert (job.live, job.held, job.waits) == (live, held, remedy is not None)
    rows = accounting.waiting([("pods", job)])
    assert [row["reason"] for row in rows] == ([] if remedy is None else [state])
    assert all((remedy or "") in row["remedy"] for row in rows)


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("AssocMaxJobsLimit", "limit of jobs"),
        ("QOSMaxCpuPerJobLimit", "one job"),
        ("AssocGrpCPURunMinutesLimit", "used up"),
        ("ReqNodeNotAvail, UnavailableNodes:node[1-3]", "down, drained or reserved"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "down, drained or reserved",
        ),
    ],
)
def test_reasons_that_no_recording_has_are_said_in_plain_words(reason: str, word: str) -> None:
    assert word in accounting.explain(reason)[0]


def test_jobs_that_slurm_has_forgotten_are_gone_and_a_controller_that_is_away_is_an_error(prints: Print) -> None:
    prints("squeue")
    assert accounting.live_jobs(["7"]) == {}
    prints("squeue", status=1, said="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(SiteError, match="Unable to contact slurm controller"):
        accounting.live_jobs(["7"])


def test_ended_elements_are_read_from_accounting(prints: Print) -> None:
    prints(
        "sacct", "7_0|COMPLETED|node1\n7_1|CANCELLED by 1000|node2\n7_[2-3]|PENDING|None assigned\n7_4|NODE_FAIL|n5\n"
    )
    states = {name: job.state for name, job in accounting.finished_jobs(["7"]).items()}
    assert states == {"7_0": "COMPLETED", "7_1": "CANCELLED", "7_2": "PENDING", "7_3": "PENDING", "7_4": "NODE_FAIL"}
    prints("sacct", status=1, said="Slurm accounting storage is disabled\n")
    assert accounting.finished_jobs(["7"]) == {}


def test_what_elements_used_is_read_beside_what_they_held(prints: Print) -> None:
    prints(
        "sacct",
        "7_0|COMPLETED|1795335100|1795335160|4|01:30.500|billing=4,cpu=4,mem=8G,node=1|\n"
        "7_0.batch|COMPLETED|1795335100|1795335160|4|00:00.500|cpu=4,mem=8G,node=1|cpu=00:00:00,mem=2048K,pages=0\n"
        "7_0.0|COMPLETED|1795335101|1795335160|4|01:30.000|cpu=4,mem=8G,node=1|cpu=00:01:30,mem=3.50G,pages=0\n"
        "7_0|TIMEOUT|1795335200|1795335300|4|1-00:00:01|cpu=4,gres/gpu=2,mem=8000M,node=1|\n"
        "7_0.batch|CANCELLED|1795335200|1795335300|4|1-00:00:01|cpu=4,node=1|cpu=1-00:00:01,mem=1048576,pages=0\n"
        "7_1|RUNNING|1795335400|Unknown|2|00:00:00|cpu=2,mem=4G,node=1|\n"
        "7_1.extern|RUNNING|1795335400|Unknown|2|00:00:00|cpu=2,mem=4G,node=1|\n"
        "7_2|PENDING|Unknown|Unknown|0|00:00:00||\n",
    )
    first, again, running = efficiencies(["7"])
    assert (first.id, first.state, first.cores, first.gpus) == ("7_0", "COMPLETED", 4, 0)
    assert (first.started_at, first.ended_at) == (1795335100, 1795335160)
    assert (first.cpu_s, first.memory_asked_mb, first.memory_peak_mb) == (90.5, 8192.0, 3584.0)
    assert (again.gpus, again.cpu_s, again.memory_asked_mb, again.memory_peak_mb) == (2, 86401.0, 8000.0, 1.0)
    assert (running.ended_at, running.memory_peak_mb) == (None, None)


def test_every_start_that_held_something_is_accounted_for(prints: Print) -> None:
    span, rest = "1795335100|1795335160", "4|00:10.000|cpu=4,mem=8G,node=1|\n"
    prints(
        "sacct",
        f"7_0|REQUEUED|{span}|{rest}7_0|COMPLETED|{span}|{rest}7_0.0|COMPLETED|{span}|4|00:10.000||mem=2G\n"
        f"10_0|COMPLETED|{span}|{rest}10_[1-3]|PENDING|Unknown|Unknown|0|00:00:00||\n"
        "11|CANCELLED by 1000|Unknown|1795335160|0|00:00:00||\n"
        f"12+0|COMPLETED|{span}|{rest}12+1|COMPLETED|{span}|{rest}",
    )
    starts = efficiencies(["7", "10", "11", "12"])
    assert [start.id for start in starts] == ["7_0", "7_0", "10_0", "12+0", "12+1"]
    assert [start.memory_peak_mb for start in starts[:2]] == [None, 2048]
    prints("sacct", status=1, said="Slurm accounting storage is disabled\n")
    with pytest.raises(SiteError, match="disabled"):
        efficiencies(["7"])


SINFO = """\
cpu|cpu*|up|3|8|16000|(null)|1-00:00:00
cpu|cpu*|up|1|16|32000|(null)|1-00:00:00
gpu|gpu|up|2|64+|512000+|gpu:a100:4(S:0-1)|infinite
old|old|down|1|4|8000|(null)|1:00:00
"""


def test_partitions_are_read_from_sinfo(prints: Print) -> None:
    prints("sinfo", SINFO)
    found = site.partitions()
    assert (found["cpu"].nodes, found["cpu"].default, found["cpu"].gpus) == (4, True, 0)
    assert (found["gpu"].cpus, found["gpu"].memory_mb, found["gpu"].gpus) == (64, 512000, 4)
    assert not found["old"].up


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:8", {"": 8}),
        ("gpu", {"": 1}),
        ("gpu:3090:8", {"3090": 8}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0,2),shard:8(S:0-1)", {"a100": 4}),
        ("gpu:h100_1g.10gb:7", {"h100_1g.10gb": 7}),
        ("gpu:v100:2,gpu:a100:4(S:0-1),gpu:a100:2", {"v100": 2, "a100": 6}),
        ("gpu:tesla:no_consume:2", {"tesla": 2}),
        ("mps:gpu:200,nvme:1", {}),
    ],
)
def test_gpus_of_a_node_are_counted_by_type(gres: str, gpus: dict[str, int]) -> None:
    assert site.gpus_in(gres) == gpus


MIXED = "mixed|mixed|up|1|32|64000|gpu:tesla:2(S:0),shard:8|1:00:00\nmixed|mixed|up|1|12|64000|gpu:4|1:00:00\n"
ONE_EACH = "ones|ones|up|1|4|16000|gpu:4|1:00:00\n"


def test_engines_ask_for_their_part_of_a_nodes_cpus_unless_the_site_gives_them_some(prints: Print) -> None:
    prints("sinfo", SINFO + MIXED)
    shown = "PartitionName=gpu AllowGroups=ALL JobDefaults=(null) QoS=N/A\n"
    shown += "PartitionName=mixed AllowGroups=ALL JobDefaults=DefCpuPerGPU=2 QoS=short\n"
    prints("scontrol", CONFIGURATION, otherwise=("*partition*", shown))
    assert {name: part.cpus_per_gpu for name, part in site.partitions().items()} == {
        "cpu": 0,
        "gpu": 16,
        "old": 0,
        "mixed": 3,
    }
    assert site.engine_cpus("gpu") == 8, "not more than an engine can use"
    assert site.engine_cpus("mixed") is None
    assert site.engine_cpus(None) is None, "the default partition has no GPUs"
    assert site.partition_qos("mixed,gpu") == {"short"}


def test_servers_ask_for_what_the_campaign_says_or_their_part_of_a_node(prints: Print, tmp_path: Path) -> None:
    site_with_limits(prints, assoc="lab|proj|ada||10|50||||cpu=64||normal\n", qos="normal||||||||||||\n")
    for name in ("sbatch", "srun"):
        prints(name)
    group, run = ServerGroup(0, 1, 2), RunDir(tmp_path)

    def asked(gpus: int = 2, **servers: object) -> object:
        wanted = {"name": "x", "tasks": "t", "agent": "nop", "slurm": {"servers": {"partition": "gpu", **servers}}}
        (job,) = arrays.server_jobs(config.parse(wanted), run, [ServerGroup(0, 1, gpus)], limits.Allowance())
        return job.options.get("cpus-per-task")

    assert asked() == 16
    assert asked(cpus_per_gpu=3) == 6
    assert asked(0) is None
    assert asked(0, cpus_per_gpu=3) == 3
    assert asked(cpus_per_task=5) == 5, "as a user may spell it"
    assert asked(exclusive=True) is None
    assert arrays.cpus_per_gpu(config.parse({"name": "x", "tasks": "t", "agent": "nop"}), run, group) is None


def test_servers_ask_for_no_cpus_that_a_limit_would_refuse(prints: Print, tmp_path: Path) -> None:
    site_with_limits(prints, assoc="lab|proj|ada||10|50|||cpu=8|||normal\n", qos="normal||||||||||||\n")
    for name in ("sbatch", "srun"):
        prints(name)
    wanted = config.parse({"name": "x", "tasks": "t", "agent": "nop", "slurm": {"servers": {"partition": "gpu"}}})
    assert arrays.cpus_per_gpu(wanted, RunDir(tmp_path), ServerGroup(0, 1, 1)) == 8
    assert arrays.cpus_per_gpu(wanted, RunDir(tmp_path), ServerGroup(0, 1, 2)) is None


def test_doctor_warns_where_an_engine_gets_one_core(prints: Print) -> None:
    prints("sinfo", SINFO + MIXED + ONE_EACH)
    shown = "PartitionName=mixed AllowGroups=ALL JobDefaults=DefCpuPerGPU=2 QoS=N/A\n"
    prints("scontrol", CONFIGURATION, otherwise=("*partition*", shown))
    for name in ("sbatch", "squeue", "srun"):
        prints(name)
    found = [finding for finding in doctor._slurm() if finding.check == "engine CPUs"]
    assert [(finding.level, finding.found.partition(":")[0]) for finding in found] == [
        ("ok", "gpu"),
        ("ok", "mixed"),
        ("warn", "ones"),
    ]
    assert found[2].remedy == "set slurm.servers.cpus-per-gpu"


def test_a_partition_that_is_not_there_is_refused_with_those_that_are(prints: Print) -> None:
    prints("sinfo", SINFO)
    wanted = {"name": "x", "tasks": "t", "agent": "nop", "slurm": {"pods": {"partition": "cpu,batch"}}}
    with pytest.raises(ConfigError, match=r"no partition 'batch' here; there are: cpu, gpu, old"):
        site.check_site(config.parse(wanted), lambda key: key)


def test_the_mpi_plugin_is_the_first_that_fits_of_those_offered(prints: Print) -> None:
    types = "MPI plugin types are...\n\tnone\n\tpmix\n\tcray_shasta\n"
    prints("srun", said=f"{types}specific pmix plugin versions available: pmix_v4\n")
    assert site.mpi_plugins() == ("pmix", "pmix_v4", "cray_shasta")
    assert site.mpi_attempts() == "pmix cray_shasta"


def test_programs_that_do_not_answer_are_named_and_end_no_other_check(
    prints: Print, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("srun", "python"):
        prints(name)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(site, "COMMAND_TIMEOUT_S", 0.1)
    with pytest.raises(SiteError, match="srun --mpi=list: no answer"):
        site.mpi_plugins()
    monkeypatch.setattr(doctor, "ASK_S", 0.1)
    monkeypatch.setenv("MEGAFLOW_TRAINER_PYTHON", str(tmp_path / "bin" / "python"))
    [finding] = doctor._guarded(doctor._trainer)
    assert (finding.check, finding.level, "timed out" in finding.found) == ("trainer", "FAIL", True)


@pytest.mark.parametrize(
    ("library", "attempts"),
    [("Open MPI v5.0.11", "pspmix pmix pspmi pmi2"), ("MPICH Version: 5.0.2", "pspmi pmi2 pspmix pmix")],
)
def test_parastations_own_types_come_before_slurms(
    prints: Print, monkeypatch: pytest.MonkeyPatch, library: str, attempts: str
) -> None:
    monkeypatch.setattr(site, "mpi_library", lambda: library)
    prints("srun", said="MPI plugin types are...\n\tnone\n\tpmi2\n\tpspmi\n\tpspmix\n\tpmix\n")
    assert site.mpi_attempts() == attempts


@pytest.mark.parametrize(
    ("library", "first"),
    [
        ("MPICH Version: 5.0.2", "pmi2"),
        ("Intel(R) MPI Library 2021.18.1", "pmi2"),
        ("Open MPI v5.0.11 package:", "pmix"),
        ("", "pmi2"),
    ],
)
def test_each_mpi_gets_the_plugin_that_it_speaks_first(library: str, first: str) -> None:
    everywhere = [plugin for plugin in mpi.mpi_order(library) if not plugin.startswith("ps")]  # these: ParaStation's
    assert everywhere[0] == first
    assert set(mpi.mpi_order(library)) == {*mpi.PMI, *mpi.PMIX, *mpi.CRAY}


def test_the_mpi_of_this_interpreter_says_what_it_is() -> None:
    assert mpi.mpi_library().startswith("MPICH Version")


def site_with_limits(prints: Print, assoc: str, qos: str, queued: str = "", shown: str = "") -> Path:
    """A site of these associations, QOS, jobs and partitions (scontrol); the file of what sacctmgr is asked."""
    assert {len(line.split("|")) for line in qos.splitlines()} == {len(QOS.split(","))}
    prints("scontrol", CONFIGURATION, otherwise=("*partition*", shown))
    prints("squeue", queued)
    prints("sinfo", SINFO)
    return prints("sacctmgr", qos, otherwise=("*assoc*", assoc))


def test_the_narrowest_limit_on_submission_leaves_the_room(prints: Print) -> None:
    qos = "normal|||20||||||gres/gpu=4|||\nfew||1|1|||||||||\n"
    site_with_limits(
        prints,
        assoc="other|proj|ada||1|1||||cpu=1||normal\nlab|proj|ada||10|50|||cpu=32|cpu=64||normal\n",
        qos=qos,
        queued="QOS normal|account proj\n" * 15,
    )
    allowed = limits.allowance({"partition": "cpu"})
    assert (allowed.array_size, allowed.submit, allowed.queued, allowed.room) == (501, 20, 15, 5)
    assert allowed.running == 10, "of the association of this cluster"
    assert allowed.why == "QOS normal allows 20"
    assert allowed.caps == (
        Cap("MaxTRESPerUser", "gres/gpu", 4, "QOS normal"),
        Cap("MaxTRESPerJob", "cpu", 32, "account proj"),
        Cap("GrpTRES", "cpu", 64, "account proj"),
    )


def test_limits_are_those_of_the_account_that_the_job_is_charged_to(
    prints: Print, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an account it is the user's default one. An association with the partition comes first."""
    rows = ["lab|a|ada||||||||1:00:00|normal", "lab|b|ada||||||||2:00:00|normal", "lab|b|ada|cpu|||||||3:00:00|normal"]
    site_with_limits(prints, assoc="\n".join(rows) + "\n", qos="normal||||||||||||\n")
    program = tmp_path / "bin" / "sacctmgr"
    users = 'case $* in *" user "*) printf "b|a\\nb|b\\n"; exit;; esac'
    program.write_text(program.read_text().replace("case $*", f"{users}\ncase $*", 1))
    monkeypatch.setenv("SBATCH_ACCOUNT", "a")  # which submissions do not inherit
    assert limits.longest_walltime({}) == ("2:00:00", "account b")
    assert limits.longest_walltime({"partition": "cpu"}) == ("3:00:00", "account b")
    assert limits.longest_walltime({"partition": "cpu,gpu"}) == ("2:00:00", "account b")
    assert limits.longest_walltime({"account": "a"}) == ("1:00:00", "account a")


def test_a_qos_may_override_the_limits_of_a_partition(prints: Print) -> None:
    shown = "PartitionName=cpu DefaultTime=NONE MaxTime=1-00:00:00 QoS=part\nPartitionName=old QoS=N/A\n"
    qos = [
        "part||||||||cpu=8||||12:00:00",
        "long|OverPartQOS|||||||cpu=64||||4-00:00:00",
        "free|DenyOnLimit,PartitionTimeLimit|||||||||||",
        "plain||||||||||||",
    ]
    assoc = "lab|proj|ada|||||||||free\n"
    site_with_limits(prints, assoc=assoc, qos="\n".join(qos) + "\n", shown=shown)
    three_days = {"partition": "cpu", "time": "3-00:00:00"}
    assert limits.longest_walltime(three_days | {"qos": "long"}) == ("4-00:00:00", "QOS long")
    assert [cap.value for cap in limits.resource_caps(three_days | {"qos": "long"})] == [64]
    assert limits.longest_walltime(three_days | {"qos": "plain"}) == ("12:00:00", "QOS part")
    assert limits.longest_walltime({"partition": "cpu,gpu", "qos": "plain"}) is None, "Slurm may choose the other"
    two_hours = {"partition": "old", "time": "2:00:00"}
    assert fits.refusals("slurm.pods", two_hours) == [], "the default QOS of the account lifts the partition's limit"
    assert "longer than partition old allows" in fits.refusals("slurm.pods", two_hours | {"qos": "plain"})[0]


def test_a_site_without_accounting_limits_nothing_but_the_size_of_an_array(prints: Print) -> None:
    prints("scontrol", CONFIGURATION)
    prints("sacctmgr", status=1, said="sacctmgr: error: slurm_persist_conn_open_without_init: Connection refused\n")
    assert limits.allowance({}) == limits.Allowance(501)
    assert limits.resource_caps({}) == ()


def test_limits_that_are_not_enforced_are_none(prints: Print) -> None:
    prints("scontrol", CONFIGURATION.replace("associations,limits,qos,safe", "associations"))
    assert limits.allowance({}) == limits.Allowance(501)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (7, 3), (1000, 501), (1001, 501), (0, 5), (5, 0)])
def test_arrays_hold_all_elements_and_none_is_too_large(count: int, size: int) -> None:
    arrays = limits.chunks(count, size)
    assert sum(arrays) == count
    assert all(0 < elements <= max(1, size) for elements in arrays)
    assert max(arrays, default=0) - min(arrays, default=0) <= 1


def test_submissions_of_a_killed_process_are_adopted_by_their_comment(prints: Print, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "small-1")
    run.create()
    called = prints("squeue", "7_[0-2]|small-1\n7_3|small-1\n8|small-2\n9+0|small-1\n9+1|small-1\n")
    prints("scontrol", f"JobId=7 JobName=small UserId=ada(1000) StdOut={run.logs}/server-7_0.log Comment=small-1\n")
    arrays = Arrays(run)
    arrays.adopt("small")
    assert "--name=small" in called.read_text()
    found = [(record.role, record.id, record.elements) for record in arrays.records()]
    assert found == [("servers", "7", None), ("servers", "9", None)], "components are no jobs by themselves"
    again = Arrays(run)
    again.adopt("small")
    assert again.ids("servers") == ["7", "9"]


def test_jobs_of_a_run_in_another_place_with_the_same_name_are_not_adopted(prints: Print, tmp_path: Path) -> None:
    mine, other = RunDir(tmp_path / "a" / "small-1"), RunDir(tmp_path / "b" / "small-1")
    mine.create()
    other.create()
    prints("squeue", "7_0|small-1\n")
    prints("scontrol", f"JobId=7 JobName=small StdOut={other.logs}/pod-7_0.log Comment=small-1\n")
    Arrays(mine).adopt("small")
    assert Arrays(mine).ids() == []
    Arrays(other).adopt("small")
    assert Arrays(other).ids("pods") == ["7"]


AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


def test_resume_changes_nothing_while_slurm_does_not_answer(prints: Print, tmp_path: Path) -> None:
    """Queued pods hold no leases. They must not lose their place in the queue because squeue failed once."""
    cancelled = prints("scancel")
    submitted = prints("sbatch")
    prints("srun")
    prints("squeue", status=1, said=AWAY)
    run = training_run(tmp_path / "run", None)
    record = read_run(run)
    record.version = __version__
    write_run(run, record)
    Arrays(run)._record("7", "pods", 4)
    for options in ({}, {"accept_changes": True}):
        with pytest.raises(SiteError, match="Slurm does not report which"):
            Run(run).resume(launcher="slurm", **options)
    assert not cancelled.exists()
    assert not submitted.exists()


def test_resume_that_accepts_changed_tasks_asks_slurm_no_more_often(
    prints: Print, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "srun", "scancel"):
        prints(name)
    asked = prints("squeue")
    monkeypatch.setattr(Run, "start", lambda *_: None)
    counts = []
    for number, options in enumerate(({}, {"accept_changes": True})):
        run = training_run(tmp_path / f"run{number}", None)
        record = read_run(run)
        record.version = __version__
        write_run(run, record)
        Arrays(run)._record("7", "pods", 4)
        asked.unlink(missing_ok=True)
        assert Run(run).resume(launcher="slurm", **options)
        counts.append(len(asked.read_text().splitlines()))
    assert counts[0] == counts[1] > 0


def test_resume_leaves_the_servers_of_a_pool_that_serves_alone(
    prints: Print, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = prints("scancel")
    for name in ("sbatch", "srun"):
        prints(name)
    prints("squeue", "5_0|RUNNING|1795335100|1795338700|node1|None\n")
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    fields = {"name": "x", "model": {"path": "m", "servers": 2}}
    campaign = config.parse(fields).model_dump(mode="json")
    write_run(run, RunRecord(version=__version__, campaign=campaign, server_groups=[ServerGroup(0, 2, 1)]))
    Arrays(run)._record("5", "servers", 2)
    started: list[list[ServerGroup]] = []
    monkeypatch.setattr(Jobs, "_queue_servers", lambda self, allowed, groups: started.append(groups))
    monkeypatch.setattr(limits, "allowance", lambda options: limits.Allowance())
    assert Run(run).resume(launcher="slurm")
    assert not cancelled.exists(), "other campaigns use it"
    assert [(group.first, group.count) for group in started[0]] == [(1, 1)]


def test_gather_writes_its_file_although_slurm_cannot_end_the_engines(prints: Print, tmp_path: Path) -> None:
    for name in ("sbatch", "srun", "scancel"):
        prints(name)
    prints("squeue", status=1, said=AWAY)
    run = training_run(tmp_path / "run", None)
    assert main(["gather", str(run), "--end-servers", "5"]) == SiteError.exit_status
    assert run.trajectories.exists()


def test_gather_ends_the_engines_that_were_submitted_after_it(prints: Print, tmp_path: Path) -> None:
    for name in ("sbatch", "srun"):
        prints(name)
    cancelled = prints("scancel")
    prints("squeue")
    listed = f"test -e {cancelled} || echo '6_0|PENDING|N/A|N/A||Resources'"
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{listed}\n")
    run = training_run(tmp_path / "run", None)
    Arrays(run)._record("6", "servers", 1)
    assert main(["gather", str(run), "--end-servers", "5"]) == 0
    assert cancelled.read_text() == "--quiet 6_0\n"


def test_one_scancel_for_each_cluster(prints: Print) -> None:
    called = prints("scancel")
    ids.scancel(["7_1", "9@other", "8"], "--state=PENDING")
    assert called.read_text().splitlines() == ["--quiet --state=PENDING 8 7_1", "-M other --quiet --state=PENDING 9"]


def test_elements_of_an_array_are_one_request() -> None:
    assert ids.compressed(["7_3", "8", "7_1", "7_2", "7_9", "9_1", "8_4", "10+1"]) == [
        "8",
        "8_4",
        "10+1",
        "7_[1-3,9]",
        "9_1",
    ]
    assert ids.compressed(["7", "7_3"]) == ["7", "7_3"], "the whole array is named already"


def test_without_slurm_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteError, match="squeue: not found; load the site's Slurm module, or use --launcher local"):
        accounting.live_jobs(["7"])


ASSOC = "lab|proj|ada|||||||||normal\nlab|short|ada||||||||20:00|normal\n"
NORMAL_AND_BRIEF = "normal||||||||||||\nbrief|DenyOnLimit|||||||||||00:10:00\nlong||||||||||||2-00:00:00\n"


def test_a_job_with_engines_beside_it_has_the_shortest_of_the_times_that_they_name() -> None:
    engines = [{"time": "2:00:00"}, {"time": "90"}, {"time": "1-0"}]
    job = script.Job("pods", {"partition": "cpu"}, engines=engines)
    assert fits.timed(job).options["time"] == "90"


def test_every_kind_of_job_without_a_time_asks_for_what_is_allowed_where_the_default_is_more(
    prints: Print, tmp_path: Path
) -> None:
    shown = "PartitionName=cpu AllowGroups=ALL DefaultTime=01:00:00 QoS=N/A\n"
    shown += "PartitionName=gpu AllowGroups=ALL DefaultTime=NONE QoS=N/A\n"
    asked = site_with_limits(prints, assoc=ASSOC, qos=NORMAL_AND_BRIEF, shown=shown)
    for name in ("sbatch", "srun"):
        prints(name)
    model = {"engine": "vllm", "path": "m", "gpus": 1}
    pools = [{"time": 5}, {"qos": "brief"}, {"qos": "long"}, {"account": "short"}]
    wanted = {
        "name": "x", "tasks": "t", "agent": "mini-swe", "samples": 4, "model": model,
        "training": {"policies": {"default": {}}},
        "slurm": {
            "account": "proj",
            "pods": {"partition": "cpu", "pools": [*pools, {"partition": "cpu,gpu"}, {"clusters": "other"}]},
            "servers": {"partition": "gpu", "qos": "long"},
            "trainer": {"qos": "brief"},
            "gather": {"qos": "brief"},
        },
    }  # fmt: skip
    campaign, run = config.parse(wanted), RunDir(tmp_path)
    groups = [ServerGroup(0, 1, 1)]

    def times(campaign: config.CampaignConfig) -> dict[str, list[object]]:
        found: dict[str, list[object]] = {}
        for job in [
            *arrays.pod_jobs(campaign, run, limits.Allowance()),
            *arrays.pod_jobs_elsewhere(campaign, run),
            *arrays.server_jobs(campaign, run, groups, limits.Allowance()),
            *arrays.trainer_jobs(campaign, run),
            arrays.gather_job(campaign, run, "afterany:7"),
        ]:
            found.setdefault(job.role, []).append(job.options["time"])
        return found

    assert times(campaign) == {
        # cpu gives an hour by default, gpu what it allows: all that there is.
        "pods": [None, "5", "10", None, "20", None, None],
        "servers": ["2880"],
        "trainer": ["10"],
        "gather": ["10"],
    }
    assert len(asked.read_text().splitlines()) == 2, "all associations at once, and all QOS"
    one = campaign.model_copy(update={"slurm": campaign.slurm.model_copy(update={"together": True})})
    assert job_requests.together(one, run, groups).options["time"] == "2880", "that of its engines"
    prints("sacctmgr", status=1, said="sacctmgr: error: Connection refused\n")
    site._sacctmgr.cache_clear()
    assert times(campaign)["pods"] == [None, "5", None, None, None, None, None], "nobody says what is allowed"
    prints("sinfo", status=1, said="Unable to contact slurm controller\n")
    site.partitions.cache_clear()
    assert times(campaign)["gather"] == ["60"]


def test_an_error_names_the_slurm_command_and_not_the_env_before_it() -> None:
    with pytest.raises(SiteError, match=r"^false --parsable: no message$"):
        site.ask("env", "--unset=SLURM_JOB_ID", "false", "--parsable")
