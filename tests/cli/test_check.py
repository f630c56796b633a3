"""Checks before anything is queued: first all mistakes of the file, then those of the site."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc import Campaign, config
from megaflow_hpc.campaign import facade
from megaflow_hpc.campaign.planning import draft, model_paths
from megaflow_hpc.campaign.planning.starter import Starter
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.environments.images.build_progress import BuildProgress
from megaflow_hpc.environments.sandbox import probe
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host import mounts
from megaflow_hpc.slurm import site
from megaflow_hpc.trajectories import gather
from tests.support.samples import commit, run_dir, trajectory
from tests.support.tensors import safetensors

Megaflow = Callable[..., "subprocess.CompletedProcess[str]"]

PARTITIONS = "cpu|cpu*|up|4|64|257000|(null)|1-00:00:00\ngpu|gpu|up|2|32|500000|gpu:a100:4|2:00:00\n"
CONFIGURATION = "ClusterName = lab\nMaxArraySize = 501\nAccountingStorageEnforce = none\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make programs with the names of Slurm's that print what Slurm prints about two partitions. Queueing fails."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    printed = {
        "sinfo": PARTITIONS,
        "scontrol": CONFIGURATION,
        "squeue": "",
        "srun": "MPI plugin types are...\n\tpmi2\n",
    }
    for name, text in printed.items():
        write_program(folder / name, f"printf %s {shlex.quote(text)}")
    write_program(folder / "sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("MEGAFLOW_MPI", "pmi2")
    return folder


def files(campaign: Path) -> list[Path]:
    """Return the files next to the campaign file, without scratch."""
    return sorted(path for path in campaign.parent.rglob("*") if "scratch" not in path.parts)


def write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_every_mistake_of_a_file_is_said_at_once(campaign: Path, megaflow: Megaflow) -> None:
    text = campaign.read_text()
    campaign.write_text(f"{text}sample: 3\nslurm: {{pods: {{count: 0, time: soon}}}}\n")
    done = megaflow("check", campaign)
    assert done.returncode == 2
    assert [line.removeprefix(f"{campaign}:").split(": ")[:2] for line in done.stderr.splitlines()] == [
        ["5", "unknown key 'sample'; did you mean 'samples'?"],
        ["6", "slurm.pods.count 0"],
        ["6", "slurm.pods.time 'soon'"],
    ]
    broken = campaign.parent / "tasks" / "task1" / "task.toml"
    broken.write_text("version = [")
    campaign.write_text(
        text.replace("images: {base: ", "images: {other: ").replace("[oracle, nop]", "[oracle, nobody]")
    )
    done = megaflow("check", campaign, "--json")
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert (found["ok"], found["site"]) == (False, [])
    for words in (f"{campaign}:3: agent 'nobody' is unknown",):
        assert [line for line in found["mistakes"] if words in line], words
    assert [line for line in found["left_out"] if f"{broken}:" in line]
    (campaign.parent / "empty.yaml").write_text("# nothing yet\n")
    assert "megaflow-hpc init" in megaflow("check", campaign.parent / "empty.yaml").stderr


def test_a_right_file_is_ok_without_slurm_and_nothing_is_made(campaign: Path, megaflow: Megaflow) -> None:
    before = files(campaign)
    done = megaflow("check", campaign)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{campaign}: ok: 2 tasks, 4 rollouts\n", "")
    assert files(campaign) == before


def test_a_store_that_cannot_be_used_hides_no_mistake_of_the_file(
    campaign: Path, megaflow: Megaflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = campaign.parent / "store"
    store.mkdir()
    store.chmod(0o777)
    monkeypatch.setenv("MEGAFLOW_IMAGE_STORE", str(store))
    assert "everybody may write to this image store" in megaflow("plan", campaign).stderr
    campaign.write_text(campaign.read_text().replace("tasks/*", "task/*"))
    for words in (["plan"], ["check", "--no-site"]):
        done = megaflow(*words, campaign)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert f"{campaign}:2: tasks: " in done.stderr


@pytest.mark.parametrize("words", [["plan"], ["run"], ["submit"], ["submit", "--dry-run"], ["check"]])
def test_a_mistake_of_the_file_is_said_before_what_slurm_says(
    words: list[str], campaign: Path, slurm: Path, megaflow: Megaflow
) -> None:
    write_program(slurm / "sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    campaign.write_text(campaign.read_text().replace("tasks/*", "task/*"))
    done = megaflow(*words, campaign)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{'' if words == ['check'] else 'megaflow-hpc: '}{campaign}:2: tasks: ")
    assert ("controller" in done.stderr) == (words == ["check"])


def test_a_site_that_cannot_be_asked_is_told_from_a_mistake_of_the_file(
    campaign: Path, slurm: Path, megaflow: Megaflow
) -> None:
    write_program(slurm / "sinfo", "echo 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1")
    done = megaflow("check", campaign)
    assert done.returncode == 3
    assert "configuration source" in done.stderr
    assert done.stderr.endswith("--no-site checks it alone, and run --launcher local needs no Slurm\n")


def test_what_no_partition_can_run_is_refused_with_key_and_limit_and_nothing_is_left(
    campaign: Path, slurm: Path, megaflow: Megaflow
) -> None:
    right = campaign.read_text()
    campaign.write_text(
        f"{right}slurm:\n  pods:\n    partition: cpu\n    time: 2-0\n    mem: 400G\n    nodes: 9\n"
        "    ranks_per_node: 40\n"
        "  gather:\n    partition: gpu\n    time: 180\n"
    )
    write_program(slurm / "sacctmgr", "exit 1")
    before = files(campaign)
    for words in (["check"], ["plan"], ["submit"]):
        done = megaflow(*words, campaign)
        assert done.returncode == (3 if words == ["check"] else 2)
        for line in (
            "8: slurm.pods.time: 2-0 is longer than partition cpu allows (1-00:00:00); ask for less",
            "9: slurm.pods.mem: 400G on each node, but a node of partition cpu has 251G; ask for less",
            "10: slurm.pods.nodes: 9 nodes, but partition cpu has 4; ask for fewer",
            "11: slurm.pods.ranks_per_node and cpus_per_rank: 80 CPUs on each node, and one of partition cpu has 64; "
            "ask for fewer",
            "14: slurm.gather.time: 180 is longer than partition gpu allows (2:00:00); ask for less",
        ):
            assert f"{campaign}:{line}" in done.stderr, done.stderr
    write_program(slurm / "scontrol", f"printf %s {shlex.quote(CONFIGURATION.replace('= none', '= limits'))}")
    assoc = "case $* in *assoc*) echo 'lab|ml|me||||||||2:00:00|normal';; *) echo 'normal||||||||||||0:50:00';; esac"
    write_program(slurm / "sacctmgr", assoc)
    site.configuration.cache_clear()
    campaign.write_text(f"{right}slurm: {{pods: {{time: 60}}, gather: {{time: 30}}}}\n")
    assert megaflow("check", campaign).stderr == (
        f"{campaign}:5: slurm.pods.time: 60 is longer than QOS normal allows (MaxWall 0:50:00); ask for less\n"
    )
    # Without values in the file, the partition's day and the gather job's hour are what that QOS allows.
    campaign.write_text(right)
    done = megaflow("submit", campaign, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    times = {name: re.findall("--time=(.+)", text) for name, text in json.loads(done.stdout)["scripts"].items()}
    assert times == {"pods-0": ["50"], "gather-1": ["50"]}
    write_program(slurm / "sacctmgr", "exit 1")
    campaign.write_text(right)
    done = megaflow("submit", campaign)
    assert (done.returncode, done.stdout) == (3, "")
    refused = "sbatch refused the pods job (slurm.pods of the campaign): Invalid account; see slurm.account\n"
    assert refused in done.stderr
    assert files(campaign) == before


def test_requeues_that_are_off_and_a_walltime_without_work_are_named_and_nothing_is_queued(
    campaign: Path, slurm: Path, megaflow: Megaflow
) -> None:
    write_program(slurm / "sacctmgr", "exit 1")
    right, queued = campaign.read_text(), slurm / "queued"
    write_program(slurm / "sbatch", f"touch {queued}; exit 1")
    campaign.write_text(f"{right}slurm: {{requeue: false, no-requeue: true, pods: {{time: 60}}}}\n")
    assert "slurm.pods: no-requeue is among its options" in megaflow("check", campaign).stderr
    write_program(slurm / "scontrol", f"printf %s {shlex.quote(CONFIGURATION + 'JobRequeue = 0')}")
    for option, warned in (("false", True), ("true", False)):
        site.configuration.cache_clear()
        campaign.write_text(f"{right}slurm: {{requeue: {option}, pods: {{time: 60}}}}\n")
        assert ("JobRequeue=0" in megaflow("check", campaign).stderr) == warned
    campaign.write_text(f"{right}slurm: {{pods: {{time: 20, signal: 'B:USR2@1200'}}}}\n")
    before = files(campaign)
    done = megaflow("run", campaign)
    assert done.returncode == 2
    assert "slurm.pods.time: 1200 s, and its signal before the end is 1200 s" in done.stderr
    assert files(campaign) == before
    assert not queued.exists()


def test_without_a_named_partition_the_default_one_refuses_nothing(
    campaign: Path, slurm: Path, megaflow: Megaflow
) -> None:
    """A site may choose partitions by QOS, constraint or a submit plugin."""
    write_program(slurm / "sacctmgr", "exit 1")
    right = campaign.read_text()
    pods = "time: 2-0, mem: 400G, nodes: 9"
    campaign.write_text(f"{right}slurm: {{constraint: cpu, pods: {{{pods}}}}}\n")
    done = megaflow("check", campaign)
    assert (done.returncode, done.stdout) == (0, f"{campaign}: ok: 2 tasks, 4 rollouts\n"), done.stderr
    for line in (
        "5: slurm.pods.time: 2-0 is longer than partition cpu allows (1-00:00:00); ask for less",
        "5: slurm.pods.mem: 400G on each node, but a node of partition cpu has 251G; ask for less",
        "5: slurm.pods.nodes: 9 nodes, but partition cpu has 4; ask for fewer",
    ):
        unnamed = "no partition is named, and the site may choose one other than its default"
        assert f"warning: {campaign}:{line} ({unnamed})\n" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 3


def test_findings_about_the_site_are_warnings_if_checks_are_lifted(
    campaign: Path, slurm: Path, megaflow: Megaflow
) -> None:
    write_program(slurm / "sacctmgr", "exit 1")
    right = campaign.read_text()
    for pods, finding in (
        ("partition: cpu, nodes: 9", "slurm.pods.nodes: 9 nodes, but partition cpu has 4; ask for fewer"),
        ("partition: secret", "slurm.pods.partition: no partition 'secret' here; there are: cpu, gpu"),
    ):
        campaign.write_text(f"{right}slurm: {{pods: {{{pods}}}}}\n")
        done = megaflow("check", campaign)
        assert (done.returncode, f"{campaign}:5: {finding}" in done.stderr) == (3, True), done.stderr
        campaign.write_text(f"{right}slurm: {{check: false, pods: {{{pods}}}}}\n")
        done = megaflow("check", campaign)
        assert (done.returncode, f"warning: {campaign}:5: {finding}" in done.stderr) == (0, True), done.stderr
        done = megaflow("submit", campaign, "--dry-run")
        assert (done.returncode, finding in done.stderr) == (0, True), done.stderr


def test_a_hidden_partition_can_be_named(campaign: Path, slurm: Path, megaflow: Megaflow) -> None:
    hidden = "large|large|up|2|256|500000|(null)|1-00:00:00\n"
    write_program(slurm / "sacctmgr", "exit 1")
    shown = (
        f"case $1 in -a) printf %s {shlex.quote(PARTITIONS + hidden)};; *) printf %s {shlex.quote(PARTITIONS)};; esac"
    )
    write_program(slurm / "sinfo", shown)
    campaign.write_text(f"{campaign.read_text()}slurm: {{pods: {{partition: large, ranks_per_node: 100}}}}\n")
    assert megaflow("check", campaign).returncode == 0
    write_program(slurm / "sbatch", "echo slurm 24.05")
    found = json.loads(megaflow("doctor", "--json").stdout)["findings"]
    assert [one["found"].split(":")[0] for one in found if one["check"] == "partition"] == ["cpu", "gpu"]


EXCLUSIVE = "PartitionName=cpu Default=YES OverSubscribe=EXCLUSIVE ExclusiveUser=NO MaxCPUsPerNode=UNLIMITED\n"


def test_ranks_fill_a_node_and_whole_nodes_are_counted(campaign: Path, slurm: Path, megaflow: Megaflow) -> None:
    write_program(slurm / "sacctmgr", "exit 1")
    right = campaign.read_text()
    printed = (
        f"case $* in *partition) printf %s {shlex.quote(EXCLUSIVE)};; *) printf %s {shlex.quote(CONFIGURATION)};; esac"
    )
    write_program(slurm / "scontrol", printed)
    rows = PARTITIONS + "cpu|cpu*|up|2|48|257000|(null)|1-00:00:00\n"
    write_program(slurm / "sinfo", f"printf %s {shlex.quote(rows)}")
    campaign.write_text(f"{right}slurm: {{pods: {{partition: cpu, count: 2, time: 60}}}}\n")
    done = megaflow("submit", campaign, "--dry-run", "--rollout-seconds", "900", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["estimate"]
    assert {(job["role"], job["cores"]) for job in found["jobs"]} == {("pods", 64), ("gather", 64)}
    assert found["core_hours"]["by_walltime"] == 2 * 64 + 64
    assert (
        f"warning: {campaign}:5: slurm.pods: a pod uses 4 of the 64 CPUs charged for it, because cpu "
        "allocates whole nodes; write slurm.pods.ranks_per_node: fill\n"
    ) in megaflow("check", campaign).stderr
    assert (
        "    ranks_per_node: fill  # of 2 CPUs each, because jobs get whole nodes\n"
        in Starter.of(campaign.parent).text()
    )
    campaign.write_text(
        f"{right}slurm: {{pods: {{partition: cpu, time: 60, ranks_per_node: fill, cpus_per_rank: 4}}}}\n"
    )
    done = megaflow("submit", campaign, "--dry-run", "--json")
    (script,) = [text for name, text in json.loads(done.stdout)["scripts"].items() if name.startswith("pods")]
    assert ("--ntasks-per-node=12" in script, "--cpus-per-task=4" in script) == (True, True)  # of the smallest node
    write_program(slurm / "sinfo", f"printf %s {shlex.quote(rows.replace('cpu*', 'cpu'))}")
    site.partitions.cache_clear()
    campaign.write_text(f"{right}slurm: {{pods: {{ranks_per_node: fill}}}}\n")
    assert (
        f"{campaign}:5: slurm.pods.ranks_per_node: fill: the size of a node is unknown; name the partition, or the "
        "ranks\n"
    ) in megaflow("check", campaign).stderr


def test_gpus_that_a_server_leaves_idle_are_warned_of(campaign: Path, slurm: Path, megaflow: Megaflow) -> None:
    """Where Slurm selects whole nodes only, every partition allocates them."""
    write_program(slurm / "sacctmgr", "exit 1")
    rows = EXCLUSIVE.replace("=EXCLUSIVE", "=NO") + "PartitionName=gpu OverSubscribe=NO ExclusiveUser=NO\n"
    settings = f"{CONFIGURATION}SelectType = select/linear\n"
    write_program(
        slurm / "scontrol",
        f"case $* in *partition) printf %s {shlex.quote(rows)};; *) printf %s {shlex.quote(settings)};; esac",
    )
    right = campaign.read_text().replace("[oracle, nop]", "oracle")
    pods = "pods: {partition: cpu, ranks_per_node: fill}, servers: {partition: gpu, time: 60}"
    campaign.write_text(f"{right}model: {{path: {campaign.parent}, gpus: 2}}\nslurm: {{{pods}}}\n")
    done = megaflow("check", campaign)
    assert (done.returncode, done.stderr) == (
        0,
        f"warning: {campaign}:6: slurm.servers: a server uses 2 of the 4 GPUs charged for it, because gpu "
        "allocates whole nodes; raise the model's gpus\n",
    )


def test_gpus_of_a_type_are_refused_where_there_are_none(campaign: Path, slurm: Path, megaflow: Megaflow) -> None:
    write_program(slurm / "sacctmgr", "exit 1")
    rows = PARTITIONS.replace("gpu:a100:4", "gpu:3090:8,gpu:h100_1g.10gb:7(S:0,1)")
    write_program(slurm / "sinfo", f"printf %s {shlex.quote(rows)}")
    right = campaign.read_text().replace("[oracle, nop]", "oracle")

    def said(model: str, servers: str = "") -> str:
        campaign.write_text(
            f"{right}model: {{path: {campaign.parent}, {model}}}\nslurm: {{servers: {{partition: gpu{servers}}}}}\n"
        )
        return megaflow("check", campaign).stderr

    assert said("gpus: 8, gpu_type: 3090") == ""
    assert said("gpus: 7, gpu_type: h100_1g.10gb") == ""
    place = f"{campaign}:6: slurm.servers.partition"
    assert "cpus_per_gpu" not in said("gpus: 31"), "each GPU brings its share of the node's CPUs by default"
    assert said("gpus: 16").startswith(f"{place}: 16 GPUs per node, but a node of partition gpu has 15; request fewer")
    assert said("gpu_type: a100").startswith(
        f"{place}: requests GPUs of type 'a100', but partition gpu has types 3090, h100_1g.10gb; change gpu_type"
    )
    assert said("gpus: 9, gpu_type: 3090").startswith(
        f"{place}: 9 3090 GPUs per node, but a node of partition gpu has 8"
    )
    assert said("gpu_type: 3090", ", gres: 'gpu:h100:1'").startswith(
        f"{campaign}:6: slurm.servers.gres: gpu:h100:1: replaces model.gpu_type: 3090; write gpus and gpu_type"
    )
    assert "gpu_type: a100: gpus is 0; raise it, or leave gpu_type out" in said("gpus: 0, gpu_type: a100")


def test_sequences_longer_than_a_row_of_the_training_are_warned_of(
    tmp_path: Path, campaign: Path, slurm: Path, megaflow: Megaflow
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    text = campaign.read_text().replace("[oracle, nop]", "oracle")
    text += f"model: {{path: {model}, args: {{max-model-len: 131072}}}}\nsamples: 8\nslurm: {{pods: {{time: 60}}}}\n"

    def warned(training: str) -> list[str]:
        campaign.write_text(f"{text}training: {training}\n")
        lines = json.loads(megaflow("check", campaign, "--no-site", "--json").stdout)["warnings"]
        return [line for line in lines if "microbatch" in line or "tokens" in line]

    (line,) = warned("{policies: {default: }}")
    assert "32768 tokens, but the servers allow sequences of 131072: a longer sequence is trained in a row of" in line
    assert warned("{policies: {default: }, data: [{over_length: 32768}]}") == []
    assert warned("{policies: {default: {microbatch: 131072}}}") == []


def test_what_will_go_badly_is_warned_of(campaign: Path, slurm: Path, megaflow: Megaflow) -> None:
    right = campaign.read_text().replace("[oracle, nop]", "oracle")
    campaign.write_text(f"{right}slurm: {{pods: {{count: 3, time: 15}}}}\nscheduling: {{spare: 1}}\nsamples: 8\n")
    done = megaflow("check", campaign, "--json")
    assert done.returncode == 0
    idle, cut = json.loads(done.stdout)["warnings"]
    assert idle == (
        f"{campaign}:5: 3 pods for 18 rollouts in 2 groups, which stay whole (scheduling: spare or "
        "signal_after): 1 of them will have nothing to do; 2 are enough"
    )
    assert cut.startswith(
        f"{campaign}:5: rollouts of 2 of 2 tasks may take up to 1200 s (time-outs of agent and tests)"
    )
    assert "a pod runs them for 840 s, its walltime less 60 s" in cut
    # Pools without own values share one warning with the pods that they resemble.
    pools = "[{partition: cpu}, {partition: gpu}, {time: 10}]"
    campaign.write_text(f"{right}slurm: {{pods: {{time: 15, pools: {pools}}}}}\nsamples: 8\n")
    assert ["840 s" in line for line in json.loads(megaflow("check", campaign, "--json").stdout)["warnings"]] == [
        True,
        False,
    ]
    # Without rules on whole groups, a group may be split, and only the number of rollouts can be too small.
    campaign.write_text(f"{right}slurm: {{pods: {{count: 3, time: 60}}}}\nsamples: 8\n")
    assert json.loads(megaflow("check", campaign, "--json").stdout)["warnings"] == []
    campaign.write_text(f"{right}slurm: {{pods: {{count: 3, time: 60}}}}\n")
    done = megaflow("plan", campaign)
    assert "3 pods for 2 rollouts: 1 of them will have nothing to do; 2 are enough" in done.stderr
    run = Path(done.stdout.strip())
    assert len(list((run / "tasks").glob("*.json"))) == 2
    submit, gather = done.stderr.splitlines()[1:]
    assert submit.endswith(f"{run}/sbatch/sandbox_pods.sbatch {run}")
    assert submit.startswith("sbatch --array=0-2 ")
    assert gather.startswith(f"megaflow-hpc gather {run} --wait")
    assert (run / "sbatch" / "sandbox_pods.sbatch").read_text().startswith("#!/bin/bash")


def test_a_run_directory_that_cannot_be_finished_is_removed(campaign: Path) -> None:
    campaign.write_text(campaign.read_text() + "slurm: {check: false}\n")
    before = files(campaign)
    code = "import sys; from megaflow_hpc.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "plan", str(campaign), "--run-dir", str(campaign.parent / "a" / "b" / "run")]

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))

    done = subprocess.run(words, capture_output=True, text=True, check=False, preexec_fn=small_files, env=os.environ)
    assert done.returncode == 2
    assert "File too large" in done.stderr
    assert files(campaign) == before


def test_a_model_that_no_node_could_load_is_said_when_it_is_planned(
    campaign: Path, megaflow: Megaflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "check_models", model_paths.check_models)
    monkeypatch.delenv("MEGAFLOW_ENGINE_VENV", raising=False)
    monkeypatch.setenv("HF_HOME", str(campaign.parent / "hub"))
    right = campaign.read_text().replace("[oracle, nop]", "oracle")

    def said(model: str) -> list[str]:
        campaign.write_text(f"{right}model: {{{model}}}\n")
        done = megaflow("check", campaign, "--json", "--no-site")
        return [line.removeprefix(f"{campaign}:5: ") for line in json.loads(done.stdout)["mistakes"]]

    path, engine = said("path: some/model")
    assert path.startswith("model.path: 'some/model' is not a directory, and not in the Hugging Face cache")
    assert "hf download some/model" in path
    assert engine == (
        f"model: {sys.executable} has no vllm; name a virtual environment that has vllm: model.python or "
        "MEGAFLOW_ENGINE_VENV; if only the nodes of the jobs have it, write slurm.check: false"
    )
    assert said(f"path: some/model, python: {campaign.parent}/venv")[1].startswith(
        f"model: the engine's interpreter {campaign.parent}/venv does not exist or cannot be run"
    )
    directory = campaign.parent / "model"
    directory.mkdir()
    packages = campaign.parent / "packages"
    (packages / "vllm").mkdir(parents=True)
    (packages / "vllm" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{os.environ.get('PYTHONPATH', '')}")
    for file, missing in (
        ("config.json", "no config.json there"),
        ("tokenizer.json", "no tokenizer there"),
        ("model.safetensors", "no weights there"),
    ):
        [line] = said("path: model")
        assert f"{directory}: {missing}" in line
        (directory / file).write_text("{}")
    weights = directory / "model.safetensors"
    [line] = said("path: model")
    assert line.startswith(f"model.path: {weights}: is not a safetensors file (2 bytes, its header would have")
    assert "so no engine can load it; save the weights again; if only the nodes of the jobs" in line
    assert said("path: model, args: {load-format: dummy}") == []
    weights.write_bytes(safetensors(b"1234")[:-1])
    assert "bytes, and its header describes" in said("path: model")[0]
    weights.write_bytes(safetensors(b"1234"))
    assert said("path: model") == []
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    assert "model-00002-of-00002.safetensors: is missing, although" in said("path: model")[0]
    snapshot = campaign.parent / "hub" / "hub" / "models--some--model" / "snapshots" / "1f"
    snapshot.parent.mkdir(parents=True)
    (directory / "model.safetensors.index.json").unlink()
    directory.rename(snapshot)
    assert said("path: some/model") == []
    (snapshot / "model.safetensors").write_bytes(b"")
    assert f"{snapshot}/model.safetensors: is not a safetensors file" in said("path: some/model")[0]
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(snapshot / "blob")
    assert f"{snapshot}/model.safetensors: cannot be read (No such file or directory)" in said("path: some/model")[0]


def test_a_group_shares_a_site_profile(
    campaign: Path, megaflow: Megaflow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shared, own = tmp_path / "group", tmp_path / "config" / "megaflow-hpc" / "sites"
    for directory in (shared, own):
        directory.mkdir(parents=True)
    monkeypatch.setenv("MEGAFLOW_PROFILES", f"{tmp_path}/none:{shared}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = shared / "hpc.yaml"
    profile.write_text(
        "slurm:\n  account: ml\n  setup: [module load apptainer]\n"
        "  pods: {partition: cpu, count: 3, qos: low}\n"
        "model:\n  python: /opt/vllm\n"
    )
    right = campaign.read_text()
    campaign.write_text(f"{right}site: hpc\nslurm: {{account: mine, pods: {{count: 1, nice: 5}}}}\n")
    done = megaflow("plan", campaign)
    assert done.returncode == 0, done.stderr
    record = json.loads((Path(done.stdout.strip()) / "run.json").read_text())
    slurm = record["campaign"]["slurm"]
    assert (slurm["account"], slurm["setup"], slurm["pods"]["partition"]) == ("mine", ["module load apptainer"], "cpu")
    pods = slurm["pods"]
    assert (pods["count"], pods["qos"], pods["nice"]) == (1, "low", 5)
    assert record["campaign"]["model"] is None  # a profile completes models and never creates them
    assert (record["site"]["name"], record["site"]["file"]) == ("hpc", str(profile))
    assert record["site"]["fields"]["model"] == {"python": "/opt/vllm"}

    campaign.write_text(right.replace("[oracle, nop]", "oracle") + "models:\n  a: {path: some/a}\nsite: hpc\n")
    loaded = config.load(campaign)
    assert loaded.models["a"].python == "/opt/vllm"
    for text, said in (
        (
            "slurm:\n  pods:\n    partion: x\n",
            f"{profile}:3: unknown key 'slurm.pods.partion'; did you mean 'partition'?",
        ),
        ("model:\n  pyton: x\n", f"{profile}:2: unknown key 'model.pyton'; did you mean 'python'?"),
        ("tasks: [a]\n", f"{profile}:1: 'tasks' is not allowed in a site profile; allowed: run_dir, "),
        ("samples: x", f"{profile}:1: 'samples' is not allowed in a site profile"),
    ):
        profile.write_text(text)
        assert megaflow("check", campaign).stderr.startswith(said)
    (own / "hpc.yaml").write_text("slurm: {account: own}\n")
    assert config.load(campaign).slurm.extra == {"account": "own"}
    (own / "hpc.yaml").chmod(0o666)
    assert "everybody may write to this site profile" in megaflow("check", campaign).stderr
    campaign.write_text(f"{right}site: hcp\n")
    assert megaflow("check", campaign).stderr.startswith(
        f"{campaign}:5: site 'hcp': no such profile in {own} and {tmp_path}/none and {shared} (MEGAFLOW_PROFILES) or "
        "in the package; did you mean 'hpc'? there are: "
    )


def test_init_writes_a_campaign_for_this_site_and_asks_nothing(
    tmp_path: Path, slurm: Path, megaflow: Megaflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(slurm / "sacctmgr", "printf 'ml|ml\\nml|vision\\n'")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MEGAFLOW_ENGINE_VENV", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    place = tmp_path / "my bugs"
    place.mkdir()
    done = megaflow("init", place)
    assert (done.returncode, done.stdout) == (0, f"{place}/campaign.yaml\n")
    text = (place / "campaign.yaml").read_text()
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 120
    found = config.load(place / "campaign.yaml")
    assert (found.name, found.slurm.extra["account"], found.agent[0].name) == ("my-bugs", "ml", "oracle")
    assert "account: ml  # also: vision" in text
    pods, servers = found.slurm.pods, found.slurm.servers
    assert (pods.partition, pods.time, pods.ranks_per_node) == ("cpu", "4:00:00", 4)
    assert (servers.partition, servers.time) == ("gpu", "2:00:00")
    # Only the tasks are missing; adding one task completes the campaign.
    assert "no Harbor task directory" in megaflow("check", place / "campaign.yaml").stderr
    assert megaflow("tasks", "new", "first", place / "tasks").returncode == 0
    assert megaflow("check", place / "campaign.yaml").returncode == 0
    done = megaflow("init", place)
    assert (done.returncode, "--force" in done.stderr) == (2, True)
    assert megaflow("init", place, "--force", "--json").returncode == 0

    # Available models, engines and profiles are used. If the controller is away, the file says so.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    sites = tmp_path / "config" / "megaflow-hpc" / "sites"
    sites.mkdir(parents=True)
    (sites / "hpc.yaml").write_text("slurm: {account: ml}\n")
    snapshot = tmp_path / "hub" / "hub" / "models--some--model" / "snapshots" / "1f"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    packages = tmp_path / "packages"
    for name in ("vllm", "minisweagent"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(packages)
    write_program(slurm / "sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    site.partitions.cache_clear()
    done = megaflow("init", place / "two.yaml")
    assert "Unable to contact slurm controller; check that" in done.stderr
    assert "; written without partitions and accounts" in done.stderr
    found = config.load(place / "two.yaml")
    assert (found.site, found.agent[0].name, found.tasks[0].path) == ("hpc", "mini-swe-agent", "tasks/*")
    assert found.model is not None
    assert (found.model.path, found.slurm.extra["account"]) == ("some/model", "ml")


def test_a_dry_run_says_what_a_campaign_would_take_and_touches_nothing(
    campaign: Path, slurm: Path, megaflow: Megaflow, tmp_path: Path
) -> None:
    write_program(
        slurm / "sacctmgr",
        "case $* in *assoc*) echo 'lab|ml|me||||2|4||||normal';; *) echo 'normal||||||||||||';; esac",
    )
    write_program(
        slurm / "scontrol",
        f"printf %s {shlex.quote(CONFIGURATION.replace('= none', '= limits').replace('501', '3'))}",
    )
    right = campaign.read_text().replace("[oracle, nop]", "oracle")
    campaign.write_text(
        f"{right}samples: 20\nslurm:\n  account: ml\n"
        "  pods: {count: 5, time: 60, ranks_per_node: 3, cpus_per_rank: 2, mem: 2G}\n"
        "limits: {core_hours: 2}\n"
    )
    before = files(campaign)
    done = megaflow("submit", campaign, "--dry-run", "--rollout-seconds", "900", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [name.split("-")[0] for name in said["scripts"]] == ["pods", "pods", "gather"]
    found = said["estimate"]
    assert (found["rollouts"], found["tasks"], found["rollout_s"]) == (40, 2, 900)
    pods = [job for job in found["jobs"] if job["role"] == "pods"]
    assert sum(job["elements"] for job in pods) == 5
    assert {(job["nodes"], job["cores"], job["walltime_s"]) for job in pods} == {(1, 6, 3600)}
    # Two of five pods run at once, each with two worker ranks of two slots: 40 rollouts of 900 s on 8 slots.
    assert (found["slots"], found["nodes"], found["time_s"]) == (8, 2, 5 * 900)
    assert found["core_hours"]["expected"] == pytest.approx(2 * 6 * 4500 / 3600)
    assert found["core_hours"]["by_walltime"] == pytest.approx(5 * 6 + 6)  # five pods and the gather job
    long = megaflow("submit", campaign, "--dry-run", "--rollout-seconds", "90000", "--json")
    hours = json.loads(long.stdout)["estimate"]["core_hours"]
    assert hours["expected"] <= hours["by_walltime"], "several walltimes in a row are counted"
    text = "\n".join(found["site"])
    for words in (
        "MaxArraySize: pods are 2 arrays of at most 3 elements",
        "pods run at the same time as the engines (at most 2 jobs",
        "3 of 5 pods are queued at first, and the rest when others end",
        "limits.core_hours: 2 ends the campaign before the expected 15.0",
        "slurm.pods.time: takes 2 consecutive walltimes",
    ):
        assert words in text, text
    place = found["storage"][0]
    assert (place["what"], place["bytes"], place["by"]) == ("run directory", 40e6, "the file system")
    assert place["free_bytes"] > 0
    assert files(campaign) == before

    text = megaflow("submit", campaign, "--dry-run").stderr
    assert "as the time-outs of agent and tests allow" in text
    assert "40 rollouts of 2 tasks in 16 blocks\n2 pods with 8 slots at once" in text
    assert "warning" not in text
    assert "core-hours: " in text
    done = megaflow(
        "run", campaign, "--launcher", "local", "--ranks", "3", "--dry-run", "--rollout-seconds", "10", "--json"
    )
    found = json.loads(done.stdout)["estimate"]
    assert (found["slots"], found["time_s"], found["jobs"][0]["role"]) == (4, 100, "local")
    earlier = run_dir(tmp_path / "earlier")
    commit(earlier, "pod", *((number, 0, trajectory(number)) for number in range(4)))  # 0.25 s each
    gather(earlier)
    before = files(campaign)
    found = json.loads(megaflow("submit", campaign, "--dry-run", "--like", earlier.path, "--json").stdout)["estimate"]
    assert (found["rollout_s"], found["basis"]) == (0.25, f"as rollouts took in {earlier.path}")
    kinds = (".h5", ".journal", ".contents")
    size = sum(path.stat().st_size for path in earlier.path.rglob("*") if path.suffix in kinds)
    assert found["storage"][0]["bytes"] == pytest.approx(size / 4 * 40)
    assert "--like" in megaflow("submit", campaign, "--dry-run", "--like", tmp_path / "none").stderr
    assert files(campaign) == before


def test_planning_says_what_it_is_at_when_that_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlanProgress, "EVERY_S", 0.05)
    with PlanProgress() as watch:
        watch.step("reading tasks")
        said = ""
        while said.count("reading tasks: 0:0") < 2:  # repeats it until the test's own timeout
            time.sleep(0.01)
            said += capsys.readouterr().err
        watch.show(BuildProgress(1, 1, 0, 1, 1, 0, 0))
        watch.step("listing rollouts")
        while "listing rollouts: 0:0" not in said:  # planning continues after the images
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert "images: 1/1 made" in said


REQUIRE, CHECK_PACKAGES = probe.require, facade.check_packages
"""The real checks, which the fixture ``bare_host`` replaces."""


@pytest.fixture
def own_checks(monkeypatch: pytest.MonkeyPatch, slurm: Path) -> None:
    """Verbs check Apptainer, packages and MPI of a site with Slurm."""
    monkeypatch.setattr(probe, "require", REQUIRE)
    monkeypatch.setattr(facade, "check_packages", CHECK_PACKAGES)
    for name in ("MEGAFLOW_APPTAINER", "MEGAFLOW_MPI"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("own_checks")
@pytest.mark.parametrize("verb", ["check", "plan", "run", "submit"])
def test_a_missing_apptainer_is_found_before_anything_is_made(campaign: Path, megaflow: Megaflow, verb: str) -> None:
    before = files(campaign)
    done = megaflow(verb, campaign)
    assert done.returncode == 3
    assert "apptainer: not on PATH; load the site's module" in done.stderr
    assert "slurm.check: false" in done.stderr
    assert files(campaign) == before
    campaign.write_text(campaign.read_text() + "slurm: {setup: [module load apptainer]}\n")
    assert "apptainer" not in megaflow("check", campaign).stderr


@pytest.mark.usefixtures("own_checks")
@pytest.mark.parametrize(("verb", "package"), [("check", "mpi4py"), ("plan", "aiohttp"), ("run", "mpi4py")])
def test_a_missing_package_of_pods_is_found_before_anything_is_made(
    campaign: Path, verb: str, package: str, tmp_path: Path
) -> None:
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    (lacking / f"{package}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{package}'\")\n")
    path = os.pathsep.join([str(lacking), os.environ.get("PYTHONPATH", "")])
    before = files(campaign)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "megaflow_hpc", verb, str(campaign)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3
    assert f"No module named '{package}'; pip install \"megaflow-hpc[run]\"" in done.stderr
    assert files(campaign) == before


@pytest.mark.usefixtures("own_checks")
def test_check_asks_for_the_type_of_mpi_as_run_does(campaign: Path, slurm: Path, megaflow: Megaflow) -> None:
    write_program(slurm / "srun", "echo 'MPI plugin types are...\n\tnone'")
    assert "srun --mpi=list offers none of pmi2, pmix" in megaflow("check", campaign).stderr


def test_a_place_for_runs_that_cannot_hold_one_is_found_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "daos"
    place.mkdir()
    campaign = tmp_path / "campaign.yaml"
    campaign.write_text(f"name: x\ntasks: []\nmodel: {{path: m}}\nrun_dir: {place}/deep/runs\n")
    real = mounts.why_no_links
    refused = list[Path]()

    def why_no_links(folder: Path) -> str:
        refused.append(folder)
        return "Operation not supported" if folder.is_relative_to(place) else real(folder)

    assert not [line for line in facade.check(campaign).site if "hard links" in line]
    monkeypatch.setattr(mounts, "why_no_links", why_no_links)
    [line] = [line for line in facade.check(campaign).site if "hard links" in line]
    assert str(place / "deep" / "runs") in line
    assert refused == [place]
    with pytest.raises(ConfigError, match="has no hard links"):
        facade.Campaign.from_yaml(campaign).plan(launcher="local")
    assert [*place.iterdir()] == []
    if os.getuid():
        for mode in (0o555, 0o000):
            place.chmod(mode)
            assert [line for line in facade.check(campaign).site if f"{place} is not writable" in line]
        place.chmod(0o755)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("tasks/one/task.toml", "tasks/*"),
        ("mine.jsonl", "mine.jsonl"),
        ("tasks/swe-gym.jsonl", "tasks/swe-gym.jsonl"),
        ("tasks/terminal-bench-2/one/task.toml", "tasks/terminal-bench-2/*"),
        ("tasks/README.md", ""),
    ],
)
def test_init_finds_the_tasks_that_are_there_also_imported_ones(tmp_path: Path, file: str, source: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("")
    assert Starter.of(tmp_path).tasks == source


def test_paths_of_built_in_agents_are_relative_to_the_campaign_file(
    make_campaign: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    campaign = make_campaign(1, agent="{name: replay, args: {messages_file: said.json}}")
    (campaign.parent / "said.json").write_text("[]")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (agent,) = Campaign.from_yaml(campaign).plan(launcher="local").record.policies["replay"].agents
    assert agent["args"] == {"messages_file": str(campaign.parent / "said.json")}
