"""The real programs, unmodified, repair a file by their own tools in a sandbox that reaches only the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.agents import create
from megaflow_hpc.agents.command import MCP_FILES, PACKAGES
from megaflow_hpc.errors import ConfigError
from tests.support.campaigns import run_local
from tests.support.programs import (
    OLD,
    REPAIR,
    SOLVED,
    SUB_AGENTS,
    calc_task,
    delegation,
    documented_apis,
    repair,
    used_apis,
)
from tests.support.services import MCP, write_compose_task


def write_campaign(folder: Path, base_sif: Path, name: str, policies: Mapping[str, tuple[Any, Any]]) -> Path:
    """Writes a campaign of the tasks in ``folder``, with the agent and the engine's script of each policy."""
    models = {}
    for policy, (agent, script) in policies.items():
        (folder / f"{policy}.yaml").write_text(yaml.safe_dump(script))
        models[policy] = {"engine": "scripted", "script": f"{policy}.yaml", "agent": agent}
    campaign = {
        "name": name,
        "tasks": "tasks/*",
        "agent": "nop",
        "models": models,
        "environment": {"network": "gateway", "images": {"base": str(base_sif)}},
    }
    path = folder / "campaign.yaml"
    path.write_text(yaml.safe_dump(campaign))
    return path


@pytest.mark.slow
def test_each_program_repairs_a_file_and_is_recorded_as_one_sequence(
    tmp_path: Path, base_sif: Path, make_task: Callable[..., Path]
) -> None:
    """Each is a policy of one campaign. One more may make two calls, which suffice for the repair.

    The table of agents and APIs in docs/how-to/agents.md is compared with these runs.
    """
    calc_task(make_task, tmp_path, SOLVED)
    scripts = {agent: {"tasks": [{"when": REPAIR, "answers": repair(agent)}]} for agent in PACKAGES}
    policies: dict[str, tuple[Any, Any]] = {agent: (agent, script) for agent, script in scripts.items()}
    policies["short"] = ({"name": "codex", "max_turns": 2}, scripts["codex"])
    result, _ = run_local(write_campaign(tmp_path, base_sif, "cli-agents", policies))
    with open_trajectories(result["run"]) as store:
        found = {t.policy: t for t in store}
        short = found.pop("short")
        assert (short.status, short.reward, len(short.turns)) == ("truncated", 1.0, 2)
        assert short.error == "this rollout has made its 2 model calls"
        assert {p: (t.status, t.reward, t.error) for p, t in found.items()} == {
            agent: ("completed", 1.0, "") for agent in PACKAGES
        }
        for agent, trajectory in found.items():
            assert [turn.sequence for turn in trajectory.turns] == [0, 0, 0], agent
            assert trajectory.constrained == 0, f"{agent} asks for sampling that is not trained on"
            (sequence,) = trajectory.sequences
            mask = np.asarray(sequence.loss_mask, bool)
            assert (trajectory.inexact, mask.any()) == (0, True), agent
            assert np.isfinite(np.asarray(sequence.logprobs)[mask]).all(), agent
            assert trajectory.messages[-1]["content"] == "add() adds now."
            assert [bool(m.get("tool_calls")) for m in trajectory.messages if m["role"] == "assistant"] == [1, 1, 0]
            assert used_apis(trajectory) == documented_apis(agent)


@pytest.mark.slow
def test_a_programs_sub_agent_is_recorded_below_the_call_that_started_it(
    tmp_path: Path, base_sif: Path, make_task: Callable[..., Path]
) -> None:
    """Some start it in the background, so that its first call comes when its tool has returned."""
    calc_task(make_task, tmp_path, "true")
    policies = {agent: (agent, {"tasks": delegation(agent)}) for agent in SUB_AGENTS}
    policies["foreground"] = ("claude-code", {"tasks": delegation("claude-code", run_in_background=False)})
    result, done = run_local(write_campaign(tmp_path, base_sif, "sub-agents", policies))
    with open_trajectories(result["run"]) as store:
        assert set(store.column("policy")) == {*policies}, done.stderr
        for row in store:
            asking, reading = row.conversations
            assert (asking.depth, asking.started_by, asking.turns.count(0)) == (0, None, 1), row.policy
            assert (reading.depth, reading.started_by) == (1, 0), row.policy
            assert OLD in json.dumps(reading.messages), "the sub-agent has read the file"
            assert "It subtracts." in json.dumps(asking.messages[-2]), "its report has reached the other agent"


MCP_TASK = """\
version = "1.0"
[agent]
timeout_sec = 150.0
[environment]
docker_image = "base"
workdir = "/app"
[[environment.mcp_servers]]
name = "vault"
transport = "streamable-http"
url = "http://tools:8000/mcp"
"""


@pytest.mark.slow
def test_each_program_calls_a_tool_of_the_tasks_mcp_server(tmp_path: Path, base_sif: Path) -> None:
    """The tool's answer is in the conversation, so the program has reached the service and passed its result on."""
    compose = "services: {tools: {image: base, command: [python3, -c, SERVER], healthcheck: {test: 'true'}}}"
    server = json.dumps(MCP.replace("$", "$$"))
    write_compose_task(
        tmp_path / "tasks", "vault", compose.replace("SERVER", server), {}, "true", "true", toml=MCP_TASK
    )
    call = {"text": "I ask.", "tool": "mcp__vault__secret", "arguments": {}}
    policies = {agent: (agent, {"default": [call, {"text": "Done."}]}) for agent in MCP_FILES}
    result, done = run_local(write_campaign(tmp_path, base_sif, "mcp", policies))
    with open_trajectories(result["run"]) as store:
        for trajectory in store:
            assert (trajectory.status, trajectory.error) == ("completed", ""), done.stderr
            told = [message for message in trajectory.messages if "the secret is 4711" in json.dumps(message)]
            assert told, (trajectory.policy, trajectory.messages)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, "either command .* or preset"),
        ({"command": "true", "preset": "codex"}, "either command .* or preset"),
        ({"preset": "swe-agent"}, "preset 'swe-agent': expected one of aider"),
        ({"preset": "codex", "toolbox": "/nowhere"}, r"/nowhere contains nothing, expected @openai/codex@\S+; run"),
        ({"preset": "openhands", "toolbox": "/nowhere"}, r"expected openhands-sdk@\S+; .*agents.sh openhands, or"),
    ],
)
def test_a_preset_that_cannot_run_is_refused_with_the_remedy(args: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        create({"name": "command", "args": args})
