"""The engine server's life: health, registration, refusal, drain, restart, failure with a cause."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import OpenLease
from megaflow_hpc.ledger.leader import SCALER, Leader
from megaflow_hpc.model.engines import adapters
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.process import EngineProcess, cause, is_lasting
from megaflow_hpc.model.engines.scripted.script import Script
from megaflow_hpc.model.gateway.router import Router
from megaflow_hpc.model.server.registration import assignment
from megaflow_hpc.monitor.status import servers as shown_servers
from megaflow_hpc.rundir.record import ServerRecord
from tests.support.serving import Servers, ask, chat, descendants, in_loop, listeners, listening
from tests.support.split_engine import SplitEngine
from tests.support.waiting import until

ANSWER = {"default": ["fine"]}
SLOW = {"tasks": [{"when": "hello", "answers": [{"text": "late", "delay_s": 1.5}]}]}


def test_it_registers_answers_listed_paths_with_the_key_alone_and_unregisters_when_told(servers: Servers) -> None:
    servers.script(ANSWER)
    record = servers.record(0)
    assert record["server"] == "default.0"
    assert record["heartbeat"] == 1
    assert record["template"] == "", "it cannot render"
    assert len(record["tls_fingerprint"]) == 64
    assert stat.S_IMODE(servers.file(0).stat().st_mode) == 0o600

    async def scenario() -> None:
        for key in (None, "", "wrong", record["key"][:-1]):
            assert await chat(record, key) == 401
            assert await ask(record, "GET", "/health", key) == 401
        key = record["key"]
        for method, path in (("GET", "/docs"), ("POST", "/collective_rpc"), ("GET", "/v1/chat/completions")):
            assert await ask(record, method, path, key) == 404
        assert await ask(record, "GET", "/v1/../docs", key) == 404
        assert await ask(record, "GET", "/v1/models", key) == 200
        assert await chat(record, key) == 200

    asyncio.run(scenario())
    assert listeners(servers.processes[0].pid)[0] == [int(record["url"].rpartition(":")[2])]
    tree = [servers.processes[0].pid, *descendants(servers.processes[0].pid)]
    assert len(tree) >= 3
    assert record["key"] not in "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in tree)
    servers.signal(0, signal.SIGTERM)
    assert servers.processes[0].wait(15) == 0
    assert not list(servers.run.endpoints.iterdir())


@in_loop
async def test_it_tells_what_its_chat_template_does_to_earlier_messages(servers: Servers) -> None:
    async with listening(SplitEngine(Script(), "m").application()) as port:
        options = {"model": "m", "protocol": "split"}
        servers.start({"engine": "external", "base_url": f"http://127.0.0.1:{port}", "args": options}, "default")
        record = await asyncio.to_thread(servers.record, 0)
    assert (record["protocol"], record["template"]) == ("split", "append-only")
    assert [row["template"] for row in shown_servers(servers.run, False)] == ["append-only"]


def test_what_is_in_flight_is_answered_before_it_leaves(servers: Servers) -> None:
    servers.script(SLOW, "default", "--poll-s", "0.05", "--beat-s", "0.05")
    record = servers.record(0)

    async def scenario() -> int:
        late = asyncio.create_task(chat(record, record["key"]))
        await asyncio.to_thread(servers.await_load, 0, 1)
        servers.signal(0, signal.SIGUSR2)
        while servers.file(0).exists():
            await asyncio.sleep(0.01)
        assert not late.done()
        assert await chat(record, record["key"]) == 503
        return await late

    assert asyncio.run(scenario()) == 200
    assert servers.processes[0].wait(15) == 0


def test_a_crashed_engine_is_started_again_until_the_campaign_is_finished(servers: Servers) -> None:
    servers.script(ANSWER)
    record = servers.record(0)
    lifeline, guardian, engine = sorted(descendants(servers.processes[0].pid))
    assert b"engines.lifeline" not in Path(f"/proc/{engine}/cmdline").read_bytes()
    os.kill(engine, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while (again := servers.record(0))["started_at"] == record["started_at"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert again["url"] == record["url"]
    assert asyncio.run(chat(again, again["key"])) == 200
    assert not any(Path(f"/proc/{pid}").exists() for pid in (lifeline, guardian))
    (servers.run.ledger / "finished").touch()
    assert servers.processes[0].wait(20) == 0


def test_causes_that_may_pass_are_tried_again_and_end_in_status(servers: Servers, tmp_path: Path) -> None:
    """Three starts in a row, then the cause in one line of ``status``."""
    program = tmp_path / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'torch.OutOfMemoryError: CUDA out of memory.' >&2\nexit 1\n")
    program.chmod(0o755)
    section = {"engine": "vllm", "path": "model", "python": str(program)}
    servers.start(section)
    assert servers.processes[0].wait(120) == 1
    failed = json.loads((servers.run.endpoints / "default.0.failed.json").read_text())
    assert failed["cause"] == "out of GPU memory: torch.OutOfMemoryError: CUDA out of memory."
    assert (servers.run.logs / "default.0.engine.log").read_text().count("CUDA out of memory") == 3
    (shown,) = shown_servers(servers.run, over=False)
    assert shown["state"] == "failed"
    assert shown["cause"] == failed["cause"]


@pytest.mark.slow
def test_it_leaves_when_the_run_directory_is_deleted(servers: Servers) -> None:
    servers.script(ANSWER, "default", "--poll-s", "0.05")
    servers.record(0)
    shutil.rmtree(servers.run.path)
    assert servers.processes[0].wait(15) == 0


def test_it_leaves_when_nobody_asks_any_more_but_not_before_somebody_did(servers: Servers) -> None:
    servers.script(ANSWER, "default", "--idle-s", "0.2", "--poll-s", "0.05")
    record = servers.record(0)
    with pytest.raises(subprocess.TimeoutExpired):
        servers.processes[0].wait(1)
    lease = OpenLease(servers.run, "learner")
    lease.put()
    assert asyncio.run(chat(record, record["key"])) == 200
    with pytest.raises(subprocess.TimeoutExpired):
        servers.processes[0].wait(1)  # a trainer's step takes long, and it will ask again
    lease.close()
    assert servers.processes[0].wait(15) == 0


@pytest.mark.slow
def test_in_slurm_it_leaves_for_want_of_requests_only_where_somebody_brings_it_back(servers: Servers) -> None:
    """Its exit status makes the batch script requeue and hold the element."""
    file = servers.run.path / "script.yaml"
    file.write_text("default: [fine]")
    section = {"engine": "scripted", "script": str(file)}
    servers.start(section, "default", "--idle-s", "0.2", "--poll-s", "0.05", SLURM_ARRAY_JOB_ID="7")
    record = servers.record(0)
    assert asyncio.run(chat(record, record["key"])) == 200
    with pytest.raises(subprocess.TimeoutExpired):
        servers.processes[0].wait(1)
    scaler = Leader(servers.run, SCALER, "somebody")
    deadline = time.monotonic() + 60
    while servers.processes[0].poll() is None and time.monotonic() < deadline:
        assert scaler.hold()
        time.sleep(0.1)
    assert servers.processes[0].wait(15) == 75
    assert not servers.file(0).exists()


def test_array_elements_find_their_policy() -> None:
    run = [ServerRecord("a", {}), ServerRecord("b", {})]
    assert assignment(run, 1, None).name == "b.1"
    assert assignment(run, None, "b").name == "b.1"
    with pytest.raises(ConfigError, match="no model server 2: the campaign has 2"):
        assignment(run, 2, None)
    with pytest.raises(ConfigError, match="is of policy 'a'"):
        assignment(run, 0, "b")


def test_engine_options_become_flags() -> None:
    options = {"max_model_len": 8, "enforce-eager": True, "no": False, "none": None, "x": {"a": 1}, "l": [1, 2]}
    flags = adapters.flags(adapters.options_of({"args": options}))
    assert flags == [
        "--max-model-len",
        "8",
        "--enforce-eager",
        "--x",
        '{"a": 1}',
        "--l",
        "1",
        "2",
    ]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("a\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\nTraceback", "out of GPU memory"),
        ("OSError: [Errno 98] Address already in use", "its port was taken"),
        ("OSError: x does not appear to have a file named config.json", "the model cannot be found"),
        ("noise\nValueError: odd thing\nEngineDeadError: See stack trace", "ValueError: odd thing"),
        ("", "it printed nothing"),
        ("WARNING 01-01 10:00:00 [x.py:1] No module named 'vllm._C'\nRuntimeError: boom", "RuntimeError: boom"),
        ("Error: No such option: --frce-model", "it does not know an option"),
        ("ERROR 01-01 10:00:00 [c.py:1] ValueError: No available memory for the cache blocks.", "out of GPU memory"),
        (
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find a cached snapshot folder. To enable downloads "
            "online, pass 'local_files_only=False' as input.",
            "the model is not in the node's cache, and an engine fetches nothing: huggingface_hub",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, The "
            "architecture X is not known. [type=value_error]\n    For further information visit https://errors",
            "1 validation error for ModelConfig Value error, The architecture X is not known. [type=value_error]",
        ),
        ("ValueError: " + "x " * 500 + "and so it is too large", "and so it is too large"),
    ],
)
def test_a_log_gives_one_readable_cause(log: str, expected: str) -> None:
    found = cause(log, 1)
    assert expected in found
    assert "\n" not in found
    assert len(found) < 700


def test_the_cause_is_read_above_the_tracebacks_of_all_requests_in_flight(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    core = "(EngineCore pid=7) ERROR 01-01 10:00:00 [core.py:1] "
    dead = (
        "(APIServer pid=6) ERROR 01-01 10:00:00 [e.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore ended\n"
    )
    log.write_text(
        f"{core}EngineCore encountered a fatal error.\n{core}Traceback (most recent call last):\n"
        f"{core}RuntimeError: CPU Generator does not use offset\n{dead * 10_000}  warnings.warn('leaked')\n"
    )
    engine = EngineProcess(Launch(), log)
    assert engine.cause() == "RuntimeError: CPU Generator does not use offset"
    log.write_text("")
    assert engine.cause() == "it printed nothing"


@pytest.mark.parametrize(
    ("log", "lasting"),
    [
        ("safetensors_rust.SafetensorError: Error while deserializing header: header too large", True),
        ("OSError: pass 'local_files_only=False'", True),
        ("(EngineCore pid=7) ERROR 01-01 10:00:00 [x.py:1] ValueError: Model architectures ['X'] are not known", True),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", True),
        ("ValueError: Free memory on device (2/80 GiB) on startup is less than desired", False),
        ("RuntimeError: NCCL error", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("", False),
    ],
)
def test_a_cause_that_no_other_start_would_mend_is_known(log: str, lasting: bool) -> None:
    assert is_lasting(cause(log, 1)) == lasting


def engine_that_says(folder: Path, text: str) -> dict[str, Any]:
    """A model section whose engine prints ``text`` and ends; each start adds a line to ``starts``."""
    folder.mkdir()
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho >> {folder}/starts\necho '{text}' >&2\nexit 1\n")
    program.chmod(0o755)
    return {"engine": "vllm", "path": "/nowhere", "gpus": 0, "python": str(program)}


def test_an_engine_that_cannot_start_says_why_while_it_tries_and_ends_at_once_where_it_never_will(
    servers: Servers, tmp_path: Path
) -> None:
    servers.start(engine_that_says(tmp_path / "never", "ValueError: no such architecture"), "never")
    servers.start(engine_that_says(tmp_path / "later", "RuntimeError: NCCL error"), "later", "--backoff-s", "30")
    assert servers.processes[0].wait(60) == 2
    failed = json.loads((servers.run.endpoints / "never.0.failed.json").read_text())
    assert failed["policy"] == "never"
    assert "url" not in failed
    until(lambda: len(shown_servers(servers.run, over=False)) == 2, "both are shown")
    later, never = shown_servers(servers.run, over=False)
    log = str(servers.run.logs / "never.0.engine.log")
    why = "exit code 1: ValueError: no such architecture"
    assert (never["state"], never["cause"], never["log"]) == ("failed", why, log)
    assert (tmp_path / "never" / "starts").read_text() == "\n"
    assert (later["state"], later["cause"]) == ("starting", "start 1 of 3: exit code 1: RuntimeError: NCCL error")
    servers.signal(1, signal.SIGTERM)
    assert servers.processes[1].wait(60) == 0
    assert [shown["server"] for shown in shown_servers(servers.run, over=False)] == ["never.0"]
    router = Router()
    router.update(servers.records())
    assert f"{why} (log: {log})" in router.describe("never")


def test_a_model_section_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    for section in ({"engine": "vllm"}, {"engine": "external"}, {"engine": "none"}, {"engine": "vllm", "python": "/x"}):
        with pytest.raises(ConfigError):
            adapters.launch(section, "p", tmp_path)
