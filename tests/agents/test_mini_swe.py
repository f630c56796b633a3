"""mini-swe-agent with the scripted engine, the real gateway and real commands."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers.solutions import script_from_patch
from megaflow_hpc.agents import create
from megaflow_hpc.agents.mini_swe import MiniSweAgent
from megaflow_hpc.errors import ConfigError, ModelServiceError, SandboxError
from megaflow_hpc.host.wire import pack, unpack
from megaflow_hpc.trajectory import Recording
from megaflow_hpc.types import AgentResult, CallBudget, Task
from tests.support.local_sandbox import LocalSandbox
from tests.support.scripted import block
from tests.support.serving import Engines, Servers
from tests.support.waiting import until_async

PATCH = "--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-print(1 - 1)\n+print(1 + 1)\n"


def make_task() -> Task:
    return Task(id="sum", instruction="m.py prints the wrong sum", image="base", path="/nowhere")


async def roll(
    servers: Servers | Engines,
    sandbox: LocalSandbox,
    *,
    budget: CallBudget | None = None,
    wait_s: float = 300.0,
    **spec: Any,
) -> tuple[AgentResult, Recording]:
    agent = create({"name": "mini-swe-agent", **spec})
    async with servers.gateway(wait_s=wait_s) as gateway:
        model = await gateway.open("sum/default/0", "default", budget=budget)
        result = await agent.run(make_task(), sandbox, model)
        return result, await gateway.close("sum/default/0")


def test_it_repairs_a_file_and_every_token_is_recorded(engines: Engines, tmp_path: Path) -> None:
    engines.script({"tasks": [script_from_patch("wrong sum", PATCH)]})
    sandbox = LocalSandbox(tmp_path / "box")
    (sandbox.work / "m.py").write_text("print(1 - 1)\n")
    result, recording = asyncio.run(roll(engines, sandbox))
    assert (result.status, result.exit_code, result.error) == ("completed", 0, "")
    assert (sandbox.work / "m.py").read_text() == "print(1 + 1)\n"
    assert [t.finish_reason for t in recording.turns] == ["stop"] * 3
    assert len(recording.sequences) == 1
    assert recording.messages == result.messages
    sequence = recording.sequences[0]
    text = bytes(t for t, m in zip(sequence.tokens, sequence.loss_mask, strict=True) if m and t < 256).decode()
    assert text == "".join(m["content"] for m in result.messages if m["role"] == "assistant")
    assert [m["role"] for m in result.messages[:4]] == ["system", "user", "assistant", "user"]
    assert "<returncode>0</returncode>" in result.messages[3]["content"]


def test_a_limit_of_turns_truncates(engines: Engines, tmp_path: Path) -> None:
    engines.script({"default": [block("echo on")]})
    result, recording = asyncio.run(roll(engines, LocalSandbox(tmp_path / "box"), max_turns=4))
    assert (result.status, result.exit_code) == ("truncated", 0)
    assert len(recording.turns) == 4


def test_the_gateways_budget_truncates(engines: Engines, tmp_path: Path) -> None:
    engines.script({"default": [block("echo on")]})
    sandbox = LocalSandbox(tmp_path / "box")
    result, recording = asyncio.run(roll(engines, sandbox, budget=CallBudget(calls=3)))
    assert result.status == "truncated"
    assert len(recording.turns) == 3


def test_a_full_context_truncates(engines: Engines, tmp_path: Path) -> None:
    engines.script({"default": [block("seq 300")]}, max_model_len=7000)
    result, recording = asyncio.run(roll(engines, LocalSandbox(tmp_path / "box")))
    assert result.status == "truncated"
    assert "maximum context length" in result.error
    assert recording.turns


def test_answers_without_a_command_end_it_as_its_own_failure(engines: Engines, tmp_path: Path) -> None:
    engines.script({"default": ["I do not know"]})
    result, recording = asyncio.run(roll(engines, LocalSandbox(tmp_path / "box")))
    assert (result.status, result.exit_code, result.error) == ("completed", 1, "RepeatedFormatError")
    assert len(recording.turns) == 3
    assert len(recording.sequences) == 1, "an answer in the wrong format stays in the conversation"


def test_a_command_that_hangs_or_prints_what_is_no_text_is_reported_to_the_model(
    engines: Engines, tmp_path: Path
) -> None:
    submit = block("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done")
    odd = block("printf '\\377\\376'; echo oops >&2; exit 3")
    engines.script({"default": [block("echo before; sleep 60"), odd, submit]})
    result, _ = asyncio.run(roll(engines, LocalSandbox(tmp_path / "box"), args={"command_timeout_s": 0.5}))
    assert (result.status, result.exit_code) == ("completed", 0)
    hung, printed = result.messages[3]["content"], result.messages[5]["content"]
    assert "ended after 0.5 seconds" in hung
    assert "before" in hung
    assert "<returncode>3</returncode>" in printed
    assert "oops" in printed


def test_a_model_that_no_engine_serves_is_not_the_agents_failure(servers: Servers, tmp_path: Path) -> None:
    late = {"text": block("echo on >> log"), "delay_s": 60.0}
    number = servers.script({"default": [block("echo on >> log"), late]})
    sandbox = LocalSandbox(tmp_path / "box")

    async def scenario() -> None:
        rolling = asyncio.create_task(roll(servers, sandbox, wait_s=1.0))
        await until_async((sandbox.work / "log").exists, "the first command has run")
        servers.signal(number, signal.SIGKILL)
        await rolling

    with pytest.raises(ModelServiceError):
        asyncio.run(scenario())


def test_a_lost_sandbox_is_not_the_agents_failure(engines: Engines, tmp_path: Path) -> None:
    engines.script({"default": [block("echo on >> log")]})
    sandbox = LocalSandbox(tmp_path / "box")

    async def scenario() -> None:
        rolling = asyncio.create_task(roll(engines, sandbox))
        await until_async((sandbox.work / "log").exists, "the first command has run")
        await sandbox.stop()
        await rolling

    with pytest.raises(SandboxError):
        asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "now"),
    [("mini-swe-agent", True), ("tests.support.careful_agent:Careful", False)],
)
def test_a_suspended_rollout_goes_on_at_another_gateway_as_one_sequence(
    servers: Servers, tmp_path: Path, name: str, now: bool
) -> None:
    """The second answer is late: the agent waits for it, or the call is given up by ``now`` and repeated."""
    slow = {"text": block("echo two >> log"), "delay_s": 2.0}
    submit = block("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done")
    answers = [block("echo one >> log"), slow, block("echo three >> log"), submit]
    servers.script({"default": answers}, "default", "--poll-s", "0.05", "--beat-s", "0.05")
    sandbox = LocalSandbox(tmp_path / "box")

    async def first() -> tuple[dict[str, Any], dict[str, Any]]:
        agent = create({"name": name})
        async with servers.gateway() as gateway:
            model = await gateway.open("sum/default/0", "default", seed=7)
            running = asyncio.create_task(agent.run(make_task(), sandbox, model))
            await until_async((sandbox.work / "log").exists, "the first command has run")
            await asyncio.to_thread(servers.await_load, 0, 1)
            assert gateway.suspend("sum/default/0", now=now), "it waits for the slow answer"
            result = await running
            assert result.state is not None
            recorded = gateway.suspended("sum/default/0")
            assert recorded is not None
            return unpack(pack(result.state)), unpack(pack(recorded))

    async def second(state: dict[str, Any], recorded: dict[str, Any]) -> tuple[AgentResult, Recording]:
        agent = create({"name": name})
        agent.resume(state)  # type: ignore[attr-defined]
        async with servers.gateway() as gateway:
            model = await gateway.open("sum/default/0", "default", seed=7, recorded=recorded)
            return await agent.run(make_task(), sandbox, model), await gateway.close("sum/default/0")

    state, recorded = asyncio.run(first())
    done = ["one"] if now else ["one", "two"]
    assert (sandbox.work / "log").read_text().split() == done
    assert len(recorded["recording"]["turns"]) == len(done)
    result, recording = asyncio.run(second(state, recorded))
    assert (result.status, result.error) == ("completed", "")
    assert (sandbox.work / "log").read_text().split() == ["one", "two", "three"]
    assert len(recording.turns) == 4
    assert len(recording.sequences) == 1, "what was sampled before is context, token by token"
    assert recording.messages == result.messages
    assert [message["role"] for message in result.messages].count("assistant") == 4


CONFIGURATION = """\
agent: {system_template: "You solve tasks.", instance_template: "{{task}}"}
environment: {interpreter: ["bash", "-c"], env: {PAGER: cat}}
model:
  observation_template: "{{output.output}}"
  format_error_template: "one command, please"
"""


@pytest.mark.parametrize(
    ("environment", "variable"),
    [({"interpreter": ["bash", "-c"], "env": {"PAGER": "testbed"}}, "PAGER"), ({}, "CONDA_DEFAULT_ENV")],
    ids=["interpreter", "BASH_ENV"],
)
def test_commands_run_as_the_configuration_says(
    engines: Engines, tmp_path: Path, environment: dict[str, Any], variable: str
) -> None:
    """With its interpreter, or in the environment that an image of SWE-bench puts into ``BASH_ENV``."""
    (tmp_path / "bashrc").write_text("export CONDA_DEFAULT_ENV=testbed\n")
    own = yaml.safe_load(CONFIGURATION)
    own["environment"] = environment or {"env": {"BASH_ENV": str(tmp_path / "bashrc")}}
    own["model"]["action_regex"] = r"```bash\s*\n(.*?)\n```"
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(own))
    command = f"[[ ${variable} == testbed ]] && echo bash > understood"
    answers = [f"I look.\n\n```bash\n{line}\n```" for line in (command, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    engines.script({"default": answers})
    sandbox = LocalSandbox(tmp_path / "box")
    result, _ = asyncio.run(roll(engines, sandbox, args={"config": str(path)}))
    assert (result.status, result.error) == ("completed", "")
    assert (sandbox.work / "understood").read_text() == "bash\n"


def test_a_configuration_for_tool_calls_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"
    path.write_text(CONFIGURATION + "# no action_regex here\n")
    with pytest.raises(ConfigError, match=r"tools\.yaml: has neither model\.action_regex nor mswea_bash_command"):
        create({"name": "mini-swe-agent", "args": {"config": str(path)}})


def test_limits_of_the_configuration_apply_unless_the_campaign_gives_them(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    own = yaml.safe_load(CONFIGURATION)
    own["agent"]["step_limit"] = 7
    own["environment"]["timeout"] = 2.5
    own["model"] |= {"action_regex": "x", "model_kwargs": {"temperature": 0.0, "drop_params": True}}
    path.write_text(yaml.safe_dump(own))
    agent = MiniSweAgent(config=str(path))
    assert (agent.max_turns, agent.command_timeout_s, agent.model_options) == (7, 2.5, {"temperature": 0.0})
    agent = MiniSweAgent(max_turns=3, command_timeout_s=9, model={"temperature": 1.0}, config=str(path))
    assert (agent.max_turns, agent.command_timeout_s, agent.model_options) == (3, 9, {"temperature": 1.0})
    agent = MiniSweAgent()
    assert (agent.max_turns, agent.command_timeout_s, agent.model_options) == (None, 120, {})
