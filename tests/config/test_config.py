"""The campaign file: what is accepted, and what is said about what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc import config
from megaflow_hpc.errors import ConfigError

MINIMAL = "name: fix-bugs\ntasks: tasks/*\nagent: oracle\n"


def load(tmp_path: Path, text: str) -> config.CampaignConfig:
    path = tmp_path / "campaign.yaml"
    path.write_text(text)
    return config.load(path)


def complaint(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_status == 2
    return message.removeprefix(f"{tmp_path}/")


def test_everything_but_name_tasks_and_agent_has_a_default(tmp_path: Path) -> None:
    campaign = load(tmp_path, MINIMAL)
    assert campaign.tasks[0].path == "tasks/*"
    assert campaign.environment.network == "gateway"
    assert list(campaign.policies()) == ["oracle"]


STABLE = """\
name: fix-bugs
run_dir: runs
tasks: [{path: "tasks/*", include: [], exclude: [], limit: null}]
agent: {name: mini-swe-agent, max_turns: null, timeout_s: null, args: {}}
samples: 8
model: {engine: vllm, path: /models/m, servers: [1, 4], gpus: 1, args: {}}
environment: {network: gateway, images: {name: docker://name}}
slurm:
  account: null
  setup: []
  pods: {partition: null, count: 1, nodes: 1, ranks_per_node: null, slots_per_rank: null, cpus_per_rank: null,
         mem: null, time: null}
  servers: {partition: null, time: null}
limits: {core_hours: null, gpu_hours: null, wall: null}
"""
"""Keys that other programs write. They change only with a migration."""


def test_the_stable_part_of_the_campaign_file_is_read(tmp_path: Path) -> None:
    campaign = load(tmp_path, STABLE)
    assert campaign.model is not None
    assert campaign.model.servers == (1, 4)
    assert campaign.slurm.pods.ranks_per_node == 2


def test_options_of_sbatch_are_keys_of_their_section_and_stay_so_in_a_run() -> None:
    options = {"account": "0123", "mem-per-cpu": "2G", "disable-turbomode": True, "--image": "a plugin's"}
    fields = {"name": "x", "tasks": "t", "agent": "nop", "slurm": {**options, "pods": {"--qos": "long", "time": 5}}}
    fields["slurm"]["mem_per_cpu"] = fields["slurm"].pop("mem-per-cpu")
    campaign = config.parse(fields)
    assert (campaign.slurm.extra, campaign.slurm.pods.extra) == (options, {"qos": "long"})
    stored = campaign.model_dump(mode="json")
    assert stored["slurm"]["mem-per-cpu"] == "2G"
    assert config.parse(stored) == config.resolved(config.CampaignConfig, stored) == campaign


def test_an_engine_pool_of_an_earlier_version_is_read() -> None:
    fields = {"name": "x", "model": {"path": "m"}, "pool": {"in_flight": 2, "weights": {"ada": 3}}}
    campaign = config.resolved(config.CampaignConfig, fields)
    assert (campaign.pool, campaign.quotas.in_flight) == ({"ada": 3}, 2)


def test_models_of_an_earlier_version_are_read() -> None:
    also = [{"engine": "external", "base_url": "http://h", "api": "gemini"}]
    api = {"engine": "external", "base_url": "http://h", "api": "openai", "also": also}
    fields = {"name": "x", "tasks": ["t"], "agent": ["nop"], "models": {"a": api, "b": {"pool": "/runs/p"}}}
    models = config.resolved(config.CampaignConfig, fields).models
    assert [kind.engine for kind in models["a"].kinds()] == ["openai", "gemini"]
    assert (models["a"].is_external, models["b"].engine, models["b"].pool) == (True, "pool", "/runs/p")


def test_options_of_sbatch_in_a_run_of_an_earlier_version_are_read() -> None:
    slurm = {"account": "lab", "extra": {"qos": "low"}, "layout": "arrays", "pods": {"extra": {"nice": 5}, "zone": 1}}
    slurm["pods"]["pools"] = [{"cluster": "far", "extra": {}}]
    campaign = config.resolved(config.CampaignConfig, {"name": "x", "tasks": ["t"], "agent": ["nop"], "slurm": slurm})
    assert campaign.slurm.extra == {"account": "lab", "qos": "low"}
    assert campaign.slurm.pods.extra == {"nice": 5}
    assert campaign.slurm.pods.pools[0].cluster == "far"


def test_a_list_of_agents_gives_a_policy_each(tmp_path: Path) -> None:
    campaign = load(tmp_path, MINIMAL.replace("oracle", "[oracle, nop]"))
    assert {name: [agent.name for agent in policy.agents] for name, policy in campaign.policies().items()} == {
        "oracle": ["oracle"],
        "nop": ["nop"],
    }


def test_a_policy_may_bring_its_own_agent_samples_and_tasks(tmp_path: Path) -> None:
    text = "samples: 4\nmodels:\n  a: {path: m}\n  b: {engine: scripted, script: s, samples: 1, agent: nop}\n"
    policies = load(tmp_path, MINIMAL + text).policies()
    assert (policies["a"].samples, policies["a"].agents[0].name) == (4, "oracle")
    assert (policies["b"].samples, policies["b"].agents[0].name) == (1, "nop")


def test_agents_of_one_policy_have_names_of_their_own(tmp_path: Path) -> None:
    agents = "agent: [{as: careful, name: 'm:A', share: 2}, 'm:A', nop]\n"
    text = "name: x\ntasks: t\nsamples: 2\nmodel: {path: m}\ntraining: {policies: {default: {}}}\n" + agents
    campaign = load(tmp_path, text)
    (policy,) = campaign.policies().values()
    assert [(agent.title, agent.short_title, agent.share) for agent in policy.agents] == [
        ("careful", "careful", 2),
        ("m:A", "A", 1),
        ("nop", "nop", 1),
    ]
    again = config.parse(campaign.model_dump(mode="json"))
    assert again == campaign, "as in run.json"


def test_shares_go_with_judges_which_have_no_agents(tmp_path: Path) -> None:
    text = (
        "name: x\ntasks: t\nsamples: 2\nagent: [{name: nop, share: 2}, oracle]\n"
        "models: {default: {path: m}, grader: {path: g, judge: true}}\ntraining: {policies: {default: {}}}\n"
    )
    campaign = load(tmp_path, text)
    policies = campaign.policies()
    assert (policies["grader"].samples, policies["grader"].agents, campaign.judges()) == (0, (), ("grader",))
    for wrong, expected in (
        ("models: {grader: {path: g, judge: true}}\n", "needs another model to judge"),
        ("model: {path: g, judge: true}\n", "needs another model to judge"),
        (text[text.index("models") :].replace("default: {}", "grader: {}"), "is a judge, whose tokens are not"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load(tmp_path, f"name: x\ntasks: t\nsamples: 2\nagent: nop\n{wrong}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("agent: [nop, nop]\n", r"agents \['nop', 'nop'\] are not distinct.*\{as: careful, name: nop\}"),
        ("agent: ['a:X', 'b:X']\nmodel: {path: m}\n", "not distinct"),
        ("agent: nop\nmodels: {p: {path: m, agent: [nop, nop]}}\n", "not distinct"),
        ("agent: [{name: nop, as: a/b}]\n", "'a/b' must be letters"),
        ("agent: [{name: nop, as: a+b}]\n", r"'a\+b' must be letters"),
        ("agent: [{name: nop, share: 0}]\n", "share 0: expected a number above 0"),
        ("agent: [nop, {name: oracle, share: 2}]\nmodel: {path: m}\n", "share: policy 'default' is not trained"),
    ],
)
def test_wrong_lists_of_agents(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path, f"name: x\ntasks: t\n{text}")


def test_a_time_is_text_and_not_a_number_to_base_60(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL + "slurm: {pods: {time: 1:30:00}}\n").slurm.pods.time == "1:30:00"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + "sample: 3\n", "campaign.yaml:4: unknown key 'sample'; did you mean 'samples'?"),
        (
            MINIMAL + "slurm:\n  pods:\n    partion: x\n",
            "campaign.yaml:6: unknown key 'slurm.pods.partion'; did you mean",
        ),
        (MINIMAL + "samples: many\n", "campaign.yaml:4: samples 'many': expected a whole number of at least 1"),
        (MINIMAL + "samples: 0\n", "campaign.yaml:4: samples 0: expected a whole number of at least 1"),
        ("name: x\nagent: nop\n", "campaign.yaml:1: 'tasks' is missing; add it"),
        (MINIMAL.replace("agent:", "agnet:"), "campaign.yaml:3: unknown key 'agnet'; did you mean 'agent'?"),
        (MINIMAL.replace("fix-bugs", "fix bugs"), "campaign.yaml:1: name 'fix bugs': 'fix bugs' must be letters"),
        (MINIMAL + "name: y\n", "campaign.yaml:4: not valid YAML: key 'name' is given twice"),
        (MINIMAL + "model: {engine: vllm}\n", "campaign.yaml:4: model: engine vllm needs 'path'"),
        (
            MINIMAL + "slurm: {pods: {mem: 0G}}\n",
            "campaign.yaml:4: slurm.pods.mem '0G': write a number and its unit, such as 16G, or 0 for all memory",
        ),
        (
            MINIMAL + "slurm: {pods: {mem_gb: 4}}\n",
            "campaign.yaml:4: slurm.pods.mem_gb 4: write mem with a unit, such as mem: 16G",
        ),
        (
            MINIMAL + "slurm: {gather: {extra: {mem: 8G}}}\n",
            "campaign.yaml:4: slurm.gather: extra: write its options directly into the section, such as qos: long",
        ),
        (
            MINIMAL + "slurm: {pods: {extra: {mem: 8G}}}\n",
            "campaign.yaml:4: slurm.pods: extra: write its options directly into the section, such as qos: long",
        ),
        (
            MINIMAL + "slurm:\n  constrain: gpu\n",
            "campaign.yaml:5: unknown key 'slurm.constrain'; did you mean 'constraint'?",
        ),
        (
            MINIMAL + "slurm: {pods: {rank_per_node: 3}}\n",
            "campaign.yaml:4: unknown key 'slurm.pods.rank_per_node'; did",
        ),
        (
            MINIMAL + "slurm: {pods: {cpus-per-rank: 3}}\n",
            "campaign.yaml:4: unknown key 'slurm.pods.cpus-per-rank'; did",
        ),
        (
            MINIMAL + "slurm: {gather: {time: soon}}\n",
            "campaign.yaml:4: slurm.gather.time 'soon': 'soon' is not",
        ),
        (MINIMAL + "slurm: {pods: {time: soon}}\n", "campaign.yaml:4: slurm.pods.time 'soon': 'soon' is not a time"),
        (
            MINIMAL + "slurm: {pods: {mem: false}}\n",
            "campaign.yaml:4: slurm.pods.mem False: write a number and its unit",
        ),
        (MINIMAL + "slurm: {mem-per-cpu: .inf}\n", "campaign.yaml:4: slurm.mem-per-cpu inf: write a number and its"),
        (MINIMAL + "slurm: {servers: {mem: 64}}\n", "campaign.yaml:4: slurm.servers.mem 64: write a number and its"),
        (MINIMAL + "limits: {wall: .inf}\n", "campaign.yaml:4: limits.wall inf: expected a number above 0"),
        (
            MINIMAL + "pool:\n  a: 0\n",
            "campaign.yaml:5: pool.a 0: expected a number above 0",
        ),
        (
            MINIMAL + "models: {a: {path: m, servers: {min: 1, max: 4}}}\n",
            "campaign.yaml:4: models.a.servers: expected a number of servers, or [min, max] such as [1, 4]",
        ),
        (MINIMAL + "x: [\n", "campaign.yaml:5: not valid YAML"),
        ("- a\n", "campaign.yaml: holds a list; expected keys such as tasks: and agent:"),
    ],
)
def test_an_error_names_file_line_value_and_remedy(tmp_path: Path, text: str, expected: str) -> None:
    assert complaint(tmp_path, text).startswith(expected)


@pytest.mark.parametrize("section", ["pods", "servers", "trainer", "gather", "pools"])
@pytest.mark.parametrize("value", ["-3", "0", "'0'", "0:00:00", "0-0", "'-3'"])
def test_a_walltime_in_which_nothing_can_run_is_refused(tmp_path: Path, section: str, value: str) -> None:
    inner = f"{{time: {value}}}"
    slurm = f"{{pods: {{pools: [{inner}]}}}}" if section == "pools" else f"{{{section}: {inner}}}"
    said = complaint(tmp_path, f"{MINIMAL}slurm: {slurm}\n")
    key = "pods.pools.0" if section == "pools" else section
    assert said.startswith(f"campaign.yaml:4: slurm.{key}.time ")
    assert value.strip("'") in said
    assert said.endswith("; write minutes (30), HH:MM:SS or D-HH:MM:SS")


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ("{path: m, thoughts: keep}", ""),
        ("{engine: external, base_url: http://h/v1, thoughts: keep}", ""),
        ("{engine: pool, path: p, thoughts: keep}", ""),
        ("{engine: sglang, path: m, thoughts: template}", ""),
        ("{engine: sglang, path: m, thoughts: keep}", "engine sglang; use vllm, or leave it out"),
        ("{path: m, thoughts: keep, also: [{engine: sglang}]}", "engine sglang; use vllm, or leave it out"),
        ("{path: m, thoughts: drop}", "model.thoughts 'drop': expected"),
    ],
)
def test_thoughts_are_kept_only_by_engines_that_can(tmp_path: Path, model: str, refused: str) -> None:
    text = MINIMAL + f"model: {model}\n"
    if refused:
        assert refused in complaint(tmp_path, text)
    else:
        (tmp_path / "campaign.yaml").write_text(text)
        config.load(tmp_path / "campaign.yaml")


@pytest.mark.parametrize(("servers", "expected"), [("3", (3, 3)), ("[1, 4]", (1, 4)), ("[0, 4]", (0, 4))])
def test_servers_are_a_number_or_bounds(tmp_path: Path, servers: str, expected: tuple[int, int]) -> None:
    campaign = load(tmp_path, f"{MINIMAL}model: {{path: m, servers: {servers}}}\n")
    assert campaign.model is not None
    assert campaign.model.servers == expected


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.yaml: cannot be read"):
        config.load(tmp_path / "absent.yaml")


def test_every_field_is_in_the_schema() -> None:
    assert set(config.schema()["properties"]) == set(config.CampaignConfig.model_fields)


def test_every_field_is_described_in_the_schema() -> None:
    sections = {"": config.schema(), **config.schema()["$defs"]}
    bare = [f"{section}.{name}" for section, told in sections.items() for name in _undescribed(told)]
    assert bare == []


def _undescribed(section: dict[str, Any]) -> list[str]:
    return [name for name, told in section.get("properties", {}).items() if not {"description", "$ref"} & set(told)]
