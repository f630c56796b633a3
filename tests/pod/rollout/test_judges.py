"""Judges: a task's score asks a model that its agent cannot reach, and a judge that is down gives no verdict."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml
from aiohttp import web

from megaflow_hpc import open_trajectories
from megaflow_hpc.config.model import TokenPrice
from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.errors import ConfigError, ModelServiceError, UserCodeError
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ScriptedTask
from megaflow_hpc.model.gateway.engine_call import Reply
from megaflow_hpc.model.gateway.protocols import _reward
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.judges import Judges
from megaflow_hpc.tasks.formats import VerificationContext, format_of
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.judging import Blocking, Judge, Rubric, transcript
from megaflow_hpc.tasks.steps import prepare, verify
from megaflow_hpc.types import ModelEndpoint, Network, Verdict
from tests.support.campaigns import run_local, verb
from tests.support.harbor_tasks import write_task
from tests.support.waiting import until

TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
RUBRIC = """\
criteria:
  - {name: right, text: The answer is 4., weight: 3}
  - {name: polite, text: The answer is polite.}
"""


class Engines:
    """One engine for the policy and one for each judge, with answers by pattern."""

    def __init__(self, **answers: dict[str, str]) -> None:
        self._answers = answers
        self._runners: list[web.AppRunner] = []

    async def __aenter__(self) -> ModelGateway:
        self.gateway = ModelGateway(wait_s=1, policies=["default"], judges=["grader", "second"])
        await self.gateway.start()
        self._records: list[dict[str, str]] = []
        for policy, answers in self._answers.items():
            tasks = tuple(
                ScriptedTask(re.compile(pattern), (ScriptedAnswer(text),)) for pattern, text in answers.items()
            )
            runner = web.AppRunner(ScriptedEngine(Script(tasks), policy).application(), access_log=None)
            await runner.setup()
            self._runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.add(policy, f"http://127.0.0.1:{runner.addresses[0][1]}")
        return self.gateway

    def add(self, policy: str, url: str, **more: str) -> None:
        """Let an engine at an address answer for a policy."""
        self._records.append({"server": f"{policy}.0", "policy": policy, "url": url, "model_name": policy, **more})
        self.gateway.update_endpoints(self._records)

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.stop()
        for runner in self._runners:
            await runner.cleanup()


async def say(endpoint: ModelEndpoint, model: str) -> str:
    """Make one call as an agent does; return the answer or the status."""
    body = {"model": model, "messages": [{"role": "user", "content": "who are you?"}]}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
    return str(answer["choices"][0]["message"]["content"]) if response.status == 200 else str(response.status)


async def test_agents_cannot_call_judges_and_judges_keys_end_with_the_verification() -> None:
    answers = {"default": {"": "the agent's model"}, "grader": {"": "the grader"}, "second": {"": "second"}}
    async with Engines(**answers) as gateway:
        agent = await gateway.open("t/default/0", "default")
        assert await say(agent, "grader") == "the agent's model"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {agent.api_key}"}) as session:
            async with session.get(f"{agent.base_url}/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["default"]
        judges = Judges(gateway, "t/default/0", ["grader", "second"])
        async with judges.open() as judge:
            assert judge.endpoint.api_key != agent.api_key
            assert await judge.ask("who?") == "the grader"
            assert await judge.ask("who?", model="second") == "second"
            assert await judge.ask(TALK, model="default") == "the agent's model"
            assert list(gateway.activity()) == ["t/default/0"], "live views list agents alone"
        assert await say(judge.endpoint, "grader") == "401"
        recording = await gateway.close("t/default/0")
        assert len(recording.turns) == 1, "a judge's calls are not the rollout's"
        (artifact,) = judges.artifacts()
        calls = json.loads(artifact.data)
        assert [call["model"] for call in calls] == ["grader", "second", "default"]
        assert calls[0]["messages"][-1]["content"] == "the grader"
        assert all(call["sampled_tokens"] > 0 for call in calls)


@pytest.mark.parametrize("swallowed", [False, True])
async def test_a_judge_that_is_down_gives_no_verdict(swallowed: bool) -> None:
    """Even if the task's code hides the failure."""
    async with Engines(default={"": "x"}) as gateway:
        judges = Judges(gateway, "t/default/0", ["grader"])

        async def score() -> None:
            async with judges.open() as judge:
                try:
                    await judge.ask("who?")
                except ModelServiceError:
                    if not swallowed:
                        raise UserCodeError("my own error") from None

        with pytest.raises(ModelServiceError, match="judge"):
            await score()
        assert judges.artifacts() == []


async def test_an_outage_of_one_of_two_judges_is_no_verdict() -> None:
    """Even if score goes on with the other judge."""
    async with Engines(grader={"": "yes"}) as gateway:
        judges = Judges(gateway, "t/default/0", ["grader", "second"])

        async def score() -> None:
            async with judges.open() as judge:
                with contextlib.suppress(ModelServiceError):
                    await judge.ask("who?", model="second")
                assert await judge.ask("who?", model="grader") == "yes"

        with pytest.raises(ModelServiceError, match="judge: HTTP 503"):
            await score()


class Endpoint:
    """Answers every request with one status, after some time."""

    def __init__(self, status: int = 200, delay_s: float = 0.0, finish: str = "stop") -> None:
        self._status, self._delay_s, self._finish = status, delay_s, finish

    async def finish(self, request: web.Request) -> tuple[float, str]:
        return self._delay_s, self._finish

    async def __aenter__(self) -> Judge:
        async def answer(request: web.Request) -> web.Response:
            delay_s, finish = await self.finish(request)
            await asyncio.sleep(delay_s)
            choice = {"message": {"content": "yes"}, "finish_reason": finish}
            return web.json_response({"choices": [choice]}, status=self._status)

        application = web.Application()
        application.router.add_post("/v1/chat/completions", answer)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return Judge(ModelEndpoint(f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1", "key", "a"), ["a"])

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


@pytest.mark.parametrize(
    ("endpoint", "error", "infrastructure"),
    [
        (Endpoint(402), ModelServiceError, True),
        (Endpoint(404), ModelServiceError, True),
        (Endpoint(429), ModelServiceError, True),
        (Endpoint(500), ModelServiceError, True),
        (Endpoint(400), UserCodeError, False),
        (Endpoint(finish="length"), UserCodeError, False),
        (Endpoint(delay_s=5), TimeoutError, True),
    ],
    ids=["unpaid", "unknown", "busy", "broken", "invalid", "cut", "hangs"],
)
async def test_only_a_wrong_request_is_the_fault_of_score(
    endpoint: Endpoint, error: type[Exception], infrastructure: bool
) -> None:
    async with endpoint as judge:
        with pytest.raises(error):
            await asyncio.wait_for(judge.ask("a"), 1)
        assert bool(judge.unanswered) == infrastructure


def test_a_plain_score_may_return_a_rubrics_coroutine_and_a_blocking_call_in_the_loop_is_refused(
    tmp_path: Path,
) -> None:
    judge = StandIn(lambda *_: "yes")

    async def main() -> dict[str, float]:
        loop = asyncio.get_running_loop()
        with pytest.raises(UserCodeError, match="write the method as async def"):
            Blocking(judge, loop).ask("who?")
        return await rubric(tmp_path).score(Blocking(judge, loop), TALK)

    assert asyncio.run(main())["reward"] == 1.0


ASKING = """\
[environment]
docker_image = "base"
workdir = "/app"
[verifier]
timeout_sec = 60
[verifier.env]
ANTHROPIC_API_KEY = "${ANTHROPIC_API_KEY}"
OPENAI_API_KEY = "${OPENAI_API_KEY}"
MODEL_NAME = "claude-haiku-4-5"
"""
ASKING_TEST = """\
echo 1 > /logs/verifier/reward.txt
python3 - <<'END'
import json, os, urllib.request

def post(url, key, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **key})
    return json.loads(urllib.request.urlopen(request).read())

body = {"model": os.environ["MODEL_NAME"], "max_tokens": 9, "messages": [{"role": "user", "content": "Is it 4?"}]}
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
one = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", key, body)["choices"][0]["message"]["content"]
key = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
two = post(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", key, body)["content"][0]["text"]
print(one, two, os.environ["MEGAFLOW_JUDGE"], os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"])
json.dump({"reward": 1.0, "right": float(one == two == "yes")}, open("/logs/verifier/reward.json", "w"))
END
"""


@pytest.mark.slow
@pytest.mark.parametrize("network", ["none", "gateway", "host"])
def test_tests_ask_judges_by_variables_of_theirs(rootfs: str, scratch: Path, tmp_path: Path, network: Network) -> None:
    """Even if the agent's sandbox has no network. The agent has neither address nor key."""

    async def main() -> tuple[Verdict, str, Judges, str]:
        async with Engines(default={"": "x"}, grader={"4": "yes"}) as gateway, ApptainerProvider(scratch) as provider:
            judges = Judges(gateway, "t/default/0", ["grader"], {"grader": TokenPrice(1e6, 0)})
            spec = SandboxSpec(rootfs, workdir=task.workdir, env=task.env, network=network)
            async with await provider.start(spec) as sandbox:
                await prepare(task, sandbox)
                seen = (await sandbox.exec("env")).stdout
                verdict = await verify(task, sandbox, VerificationContext(fresh=True, judge=judges.open))
                key, url = verdict.output.split()[3:5]
                outside = f"http://127.0.0.1:{gateway.port}{urlsplit(url).path}"
                return verdict, seen, judges, await say(ModelEndpoint(outside, key, ""), "")

    path = write_task(tmp_path, toml=ASKING)
    (path / "tests" / "test.sh").write_text(ASKING_TEST)
    task = read_harbor_task(path)
    assert format_of(task).asks_judge(task)
    verdict, seen, judges, status = asyncio.run(main())
    assert (verdict.error, verdict.rewards) == ("", {"reward": 1.0, "right": 1.0}), verdict.output
    assert verdict.output.startswith("yes yes grader sk-")
    assert "API_KEY" not in seen
    assert status == "401"
    calls = judges.calls()
    assert [call["model"] for call in calls] == ["grader", "grader"]
    assert all(call["usd"] == call["prompt_tokens"] > 0 for call in calls)


@pytest.mark.slow
async def test_a_judge_of_tests_that_is_down_gives_no_verdict(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    """Although the tests wrote a reward."""
    path = write_task(tmp_path, toml=ASKING)
    (path / "tests" / "test.sh").write_text(ASKING_TEST.replace("\nEND", "\nEND\necho 1 > /logs/verifier/reward.txt"))
    task = read_harbor_task(path)
    async with Engines(default={"": "x"}) as gateway, ApptainerProvider(scratch) as provider:
        context = VerificationContext(fresh=True, judge=Judges(gateway, "t/default/0", ["grader"]).open)
        async with await provider.start(SandboxSpec(rootfs, workdir="/app", network="gateway")) as sandbox:
            await prepare(task, sandbox)
            with pytest.raises(ModelServiceError, match="judge: "):
                await verify(task, sandbox, context)
            with pytest.raises(ConfigError, match="its tests ask a judge"):
                await verify(task, sandbox)


async def test_a_judge_that_wants_payment_gives_no_verdict_to_tests() -> None:
    """Although another judge answers afterwards."""

    async def unpaid(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no credit"}}, status=402)

    application = web.Application()
    application.router.add_post("/{path:.*}", unpaid)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engines = Engines(grader={"": "yes"})
    async with engines as gateway:
        engines.add("second", url)
        judges = Judges(gateway, "t/default/0", ["grader", "second"])

        async def ask() -> None:
            async with judges.open() as judge:
                assert await say(judge.endpoint, "second") == "402"
                assert await say(judge.endpoint, "grader") == "yes"

        with pytest.raises(ModelServiceError, match=r"second.*HTTP 402"):
            await ask()
    await runner.cleanup()


async def test_a_reward_model_rates_conversations_and_does_not_vote(tmp_path: Path) -> None:
    """In the form of vLLM's answers; tests/model/engines/test_reward_model.py asks vLLM itself."""

    async def classify(request: web.Request) -> web.Response:
        body = await request.json()
        assert (body["model"], body["use_activation"]) == ("rater", False)
        probs = [0.5 * len(body["messages"]), 1.0][: 1 if len(body["messages"]) < 3 else 2]
        data = [{"index": 0, "label": None, "probs": probs, "num_classes": len(probs)}]
        return web.json_response({"id": "c", "data": data, "usage": {"prompt_tokens": 7, "total_tokens": 7}})

    application = web.Application()
    application.router.add_post("/classify", classify)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engines = Engines(grader={"": "yes"})
    async with engines as gateway:
        engines.add("second", f"http://127.0.0.1:{runner.addresses[0][1]}", protocol="reward", model_name="rater")
        judges = Judges(gateway, "t/default/0", ["second", "grader"], {}, ["second"])
        async with judges.open() as judge:
            assert (judge.models, judge.reward_models) == (("grader",), ("second",))
            assert await judge.reward(TALK) == 1.0
            waiting = Blocking(judge, asyncio.get_running_loop())
            assert await asyncio.to_thread(waiting.reward, TALK[:1]) == 0.5
            assert await rubric(tmp_path).score(judge, TALK) == {"reward": 1.0, "right": 1.0, "polite": 1.0}
        assert [call["model"] for call in judges.calls()] == ["second", "second", "grader", "grader"]
        assert judges.calls()[0]["prompt_tokens"] == 7

        async def ask() -> None:
            async with judges.open() as judge:
                await judge.reward([*TALK, *TALK])

        with pytest.raises(UserCodeError, match="it must be a model with one class"):
            await ask()
        only = Judges(gateway, "t/default/0", ["second"], {}, ["second"])
        async with only.open() as judge:
            with pytest.raises(UserCodeError, match="no judge of the campaign answers in words"):
                await judge.ask("who?")
            with pytest.raises(UserCodeError, match="a rubric needs a judge that answers in words"):
                await rubric(tmp_path).score(judge, TALK)
    await runner.cleanup()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null"])
def test_a_reward_that_is_no_number_is_no_answer(value: str) -> None:
    """It would make the reward 0, although the judge is at fault."""
    reply = Reply(json.loads(f'{{"data": [{{"probs": [{value}]}}], "usage": {{"prompt_tokens": 7}}}}'))
    call: Any = SimpleNamespace(server=SimpleNamespace(model_name="rater", name="rater.0"))
    with pytest.raises((TypeError, ValueError)):
        _reward(call, reply)


class StandIn(Judge):
    """Answers by a function instead of a model."""

    def __init__(self, answer: Any, models: tuple[str, ...] = ("a",)) -> None:
        super().__init__(ModelEndpoint("", "", ""), models)
        self.answer, self.asked = answer, list[Any]()

    async def ask(self, messages: Any, model: str = "", **options: Any) -> str:
        self.asked.append((messages, model, options))
        return str(self.answer(messages, model))


def rubric(tmp_path: Path, text: str = RUBRIC) -> Rubric:
    (tmp_path / "rubric.yaml").write_text(text)
    return Rubric.read(tmp_path / "rubric.yaml")


def test_a_rubric_weighs_its_criteria(tmp_path: Path) -> None:
    judge = StandIn(lambda question, model: "It is 4.\n\n**Yes.**\n" if "answer is 4" in question else "Curt.\nNo")
    rewards = asyncio.run(rubric(tmp_path, RUBRIC + "options: {max_tokens: 9}\n").score(judge, TALK))
    assert rewards == {"reward": 0.75, "right": 1.0, "polite": 0.0}
    question, model, options = judge.asked[0]
    assert (model, options) == ("a", {"max_tokens": 9})
    mark = re.search(r"lines (\w+) is", question)
    assert mark is not None
    assert question.split(mark[1])[2] == "\nuser: 2 + 2?\nassistant: 4\n"
    assert mark[1] not in judge.asked[1][0], "no conversation can contain the mark"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["yes", "yes", "no"], 1.0),
        (["yes", "no", "no"], 0.0),
        (["yes", "", "no"], 0.0),
        (["gibberish"] * 3, 0.0),
        (["yes, there is no mistake"] * 3, 0.0),
    ],
)
def test_the_majority_of_votes_decides(tmp_path: Path, answers: list[str], expected: float) -> None:
    rest = iter(answers)
    one = "criteria: [{name: right, text: The answer is 4.}]\nvotes: 3\n"
    rewards = asyncio.run(rubric(tmp_path, one).score(StandIn(lambda *_: next(rest)), TALK))
    assert rewards == {"reward": expected, "right": expected}


async def test_a_vote_that_is_cut_off_is_the_fault_of_score_while_others_run(tmp_path: Path) -> None:
    """A judge answers all votes before the error is raised, so that none of them counts as unanswered."""

    class Cut(Endpoint):
        async def finish(self, request: web.Request) -> tuple[float, str]:
            cut = "polite" not in (await request.json())["messages"][0]["content"]
            return (0.0, "length") if cut else (0.5, "stop")

    async with Cut() as judge:
        with pytest.raises(UserCodeError, match="reached max_tokens"):
            await rubric(tmp_path).score(judge, TALK)
        assert judge.unanswered == ""


def test_judges_that_disagree_are_no(tmp_path: Path) -> None:
    judge = StandIn(lambda question, model: "yes" if model == "a" else "no", ("a", "b"))
    assert asyncio.run(rubric(tmp_path).score(judge, TALK))["reward"] == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("criteria: []\n", "expected distinct names"),
        ("criteria: [{name: a, text: x}, {name: a, text: y}]\n", "expected distinct names"),
        ("criteria: [{name: reward, text: x}]\n", "none of them 'reward'"),
        ("criteria: [{name: a, text: x, weight: -1}]\n", "positive weights"),
        ("criteria: [{name: a, text: x, wieght: 1}]\n", "wieght"),
        ("criteria: [{name: a, text: x}]\nvotes: 0\n", "votes of at least 1"),
        ("criteria: [{name: a, text: x}]\noptions: {stream: true}\n", "options: stream is set for each vote"),
        ("criteria: {\n", "expected criteria"),
    ],
)
def test_wrong_rubrics(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        rubric(tmp_path, text)


def test_a_transcript_shows_tools_and_leaves_out_the_middle() -> None:
    call = {"function": {"name": "bash", "arguments": '{"c": "ls"}'}}
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    assert transcript(talk) == 'user: go\n\nassistant: \n  calls bash({"c": "ls"})'
    long = transcript([{"role": "user", "content": "a" * 100_000 + "b" * 100_000}])
    assert len(long) < 61_000
    assert "[…]" in long


TASK = """\
from pathlib import Path
from megaflow_hpc.tasks.judging import Rubric

RUBRIC = Rubric.read(Path(__file__).with_name("rubric.yaml"))

class Sum:
    image = "base"
    instruction = "What is 2 + 2? Answer in words."

    async def score(self, sandbox, messages, judge):
        return await RUBRIC.score(judge, messages)

class Returns(Sum):
    def score(self, sandbox, messages, judge):
        return RUBRIC.score(judge, messages)

class Plain(Sum):
    def score(self, sandbox, messages, judge):
        return float(judge.ask(messages[-1]["content"]) == "four it is")

class Hides(Sum):
    image = "none"

    async def score(self, sandbox, messages, judge):
        try:
            return float(await judge.ask(messages[-1]["content"]) == "four it is")
        except Exception:
            return 0.0
"""
AGENT = """\
import json, urllib.request
from megaflow_hpc.types import AgentResult

class Asks:
    async def run(self, task, sandbox, model):
        body = {"model": "grader", "messages": [{"role": "user", "content": task.instruction}]}
        request = urllib.request.Request(model.base_url + "/chat/completions", json.dumps(body).encode(),
            {"Authorization": "Bearer " + model.api_key, "Content-Type": "application/json"})
        urllib.request.urlopen(request).read()
"""


def judged(tmp_path: Path, base_sif: Path, grader: dict[str, Any]) -> Path:
    """Write a campaign whose tasks are judged."""
    (tmp_path / "sums.py").write_text(TASK)
    (tmp_path / "asks.py").write_text(AGENT)
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    (tmp_path / "agent.yaml").write_text(yaml.safe_dump({"default": ["It is four."]}))
    answers = [{"when": "The answer is 4.", "answers": ["yes"]}, {"when": "polite", "answers": ["no"]}]
    (tmp_path / "grader.yaml").write_text(yaml.safe_dump({"tasks": answers, "default": ["four it is"]}))
    fields = {
        "name": "judged",
        "tasks": ["sums:Sum", "sums:Plain", "sums:Returns"],
        "agent": "asks:Asks",
        "models": {"default": {"engine": "scripted", "script": "agent.yaml"}, **grader},
        "environment": {"network": "gateway", "images": {"base": str(base_sif)}},
    }
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(fields))
    return tmp_path / "campaign.yaml"


@pytest.mark.slow
def test_a_campaign_with_a_judge(tmp_path: Path, base_sif: Path) -> None:
    grader = {"engine": "scripted", "script": "grader.yaml", "judge": True, "price": [1.0, 2.0]}
    result, done = run_local(judged(tmp_path, base_sif, {"grader": grader}))
    assert done.returncode == 0, done.stderr
    assert list(result["models"]) == ["grader"], "the policy has no price"
    use = result["models"]["grader"]
    assert use["calls"] == 5
    assert use["usd"] == pytest.approx((use["prompt_tokens"] + 2 * use["sampled_tokens"]) / 1e6)
    assert json.loads(verb("status", result["run"], "--json").stdout)["models"] == result["models"]
    with open_trajectories(result["run"]) as store:
        rows = {row.id: row.trajectory() for row in store}
    assert set(rows) == {"Sum/default/0", "Plain/default/0", "Returns/default/0"}
    for name in ("Sum", "Returns"):
        assert rows[f"{name}/default/0"].rewards == {"reward": 0.75, "right": 1.0, "polite": 0.0}
    assert rows["Plain/default/0"].reward == 1.0
    for trajectory in rows.values():
        assert [sequence.policy for sequence in trajectory.sequences] == ["default"]
        assert trajectory.messages[-1]["content"] == "It is four.", "the agent asked for the grader in vain"
        (calls,) = [json.loads(one.data) for one in trajectory.artifacts if one.name == "judge.json"]
        assert {call["model"] for call in calls} == {"grader"}
        (cost,) = [json.loads(one.data) for one in trajectory.artifacts if one.name == "cost.json"]
        assert cost["grader"]["usd"] == pytest.approx(sum(call["usd"] for call in calls))


@pytest.mark.slow
def test_a_judge_whose_engine_is_killed_at_random_delays_verdicts_and_invents_none(
    tmp_path: Path, base_sif: Path
) -> None:
    """Although the task's code hides every failure. More than two kills within a minute would end the server."""
    draw, delay_s, kills = random.Random(17), 0.7, 2
    campaign = judged(tmp_path, base_sif, {"grader": {"engine": "scripted", "script": "slow.yaml", "judge": True}})
    (tmp_path / "slow.yaml").write_text(yaml.safe_dump({"default": [{"text": "four it is", "delay_s": delay_s}]}))
    fields = yaml.safe_load(campaign.read_text()) | {"tasks": "sums:Hides", "samples": 40}
    campaign.write_text(yaml.safe_dump({**fields, "slurm": {"pods": {"slots_per_rank": 2}}}))
    with subprocess.Popen(
        [sys.executable, "-m", "megaflow_hpc", "run", campaign, "--launcher", "local", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as running:
        until(lambda: [*tmp_path.glob("runs/*/endpoints/grader.1.json")], "the judge serves")
        (endpoint,) = tmp_path.glob("runs/*/endpoints/grader.1.json")
        for _ in range(kills):
            until(endpoint.exists, "the judge serves")
            time.sleep(draw.uniform(1, 3))
            assert running.poll() is None, "the campaign ended before the kill"
            for pid in engine_pids(str(tmp_path / "slow.yaml")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda: not endpoint.exists(), "its server notices")
        result = json.loads(running.communicate(timeout=240)[0])
    assert (result["state"], result["rollouts"]["completed"]) == ("finished", 40)
    logs = "".join(path.read_text() for path in Path(result["run"], "logs").glob("server-*-local.log"))
    assert logs.count("the engine ended while serving") == kills
    with open_trajectories(result["run"]) as store:
        assert set(store.column("reward")) == {1.0}
        waited = [row for row in store if row.verify_s > 2 * delay_s]
    assert waited, "no verification was under way at a kill"


def engine_pids(script: str) -> list[int]:
    """Returns the processes of the scripted engine that answers from a file."""
    pids = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = place.read_text().split("\0")
            if script in words and "megaflow_hpc.model.engines.scripted" in words:
                pids.append(int(place.parent.name))
    return pids


@pytest.mark.parametrize(
    ("grader", "expected"),
    [
        ({}, "the verification of 3 tasks asks a judge"),
        ({"grader": {"engine": "replay", "path": "x", "judge": True}}, "answers of judges are not recorded"),
        ({"grader": {"engine": "scripted", "script": "grader.yaml", "judge": True, "samples": 2}}, "runs no tasks"),
        ({"grader": {"engine": "scripted", "script": "grader.yaml", "judge": "reward"}}, "serves no reward models"),
    ],
)
def test_wrong_judges_are_refused(tmp_path: Path, base_sif: Path, grader: dict[str, Any], expected: str) -> None:
    done = verb("check", judged(tmp_path, base_sif, grader), "--no-site")
    assert done.returncode == 2
    assert expected in done.stdout + done.stderr
