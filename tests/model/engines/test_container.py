"""An engine in an Apptainer image: what it can see, which variables it gets, and that it leaves nothing behind."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megaflow_hpc
from megaflow_hpc.campaign import plan
from megaflow_hpc.config import parse
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines import adapters, launch, lifeline
from tests.support.serving import Servers, answer_to, conversation, descendants, in_loop

SOURCES = Path(megaflow_hpc.__file__).parents[1]


def of_the_package(script: Path, base_sif: Path) -> dict[str, Any]:
    """The scripted engine in an image that has only Python. This package and its dependencies are bound into the
    image."""
    interpreters = [] if sys.base_prefix == "/usr" else [sys.base_prefix]
    binds = [sys.prefix, str(SOURCES), *interpreters]
    model = {"engine": "scripted", "script": str(script), "image": str(base_sif), "python": sys.prefix}
    return {**model, "binds": [f"{path}:{path}:ro" for path in binds], "gpus": 0}


def engine_of(wrapper: int) -> int:
    """The engine's own process."""
    for pid in descendants(wrapper):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if words[1:3] == [b"-m", b"megaflow_hpc.model.engines.scripted"]:
            return pid
    raise AssertionError("no engine")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory with a short path, because a server ignores longer ones for its sockets."""
    with tempfile.TemporaryDirectory(prefix="mf-", dir="/tmp") as folder:
        yield Path(folder)


@in_loop
async def test_an_engine_in_an_image_answers_is_told_little_and_leaves_nothing(
    servers: Servers, scratch: Path, tmp_path: Path, base_sif: Path
) -> None:
    script = tmp_path / "script.yaml"
    script.write_text("default: [from the image]")
    told = {"VLLM_CACHE_ROOT": "/somewhere", "SECRET": "of the shell", "APPTAINER_BINDPATH": "/etc:/stray"}
    servers.start(of_the_package(script, base_sif), "default", MEGAFLOW_SCRATCH=str(scratch), **told)
    async with servers.gateway() as gateway:
        model = await gateway.open("t/p/0", "default")
        answer = await answer_to(model, {"messages": conversation("hello")})
        assert answer["choices"][0]["message"]["content"] == "from the image"
    engine = engine_of(servers.processes[0].pid)
    inside = Path(f"/proc/{engine}/root")
    environment = dict(line.split("=", 1) for line in Path(f"/proc/{engine}/environ").read_text().split("\0") if line)
    (private,) = scratch.iterdir()
    assert environment["VLLM_CACHE_ROOT"] == "/somewhere"
    assert environment["HOME"] == f"{private}/home"
    assert environment[lifeline.MARK]  # by which the guardian of a killed lifeline finds the engine
    assert not {"SECRET", "APPTAINER_BINDPATH"} & set(environment)
    assert not (inside / "stray").exists()
    assert (inside / "etc/debian_version").read_text().startswith("12")
    assert not (inside / str(Path.home().relative_to("/")) / ".bash_history").exists()
    servers.signal(0, signal.SIGTERM)
    assert servers.processes[0].wait(30) == 0
    assert list(scratch.iterdir()) == []
    assert not Path(f"/proc/{engine}").exists()


def test_the_command_line_shows_an_image_what_it_needs_and_no_value_of_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is laid out as in a hub's cache: links to files in another directory."""
    program, sif, blobs, snapshot, private = (tmp_path / n for n in ("apptainer", "e.sif", "blobs", "snapshot", "p"))
    for folder in (blobs, snapshot, private, tmp_path / "weights"):
        folder.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    sif.touch()
    (blobs / "abc").touch()
    (snapshot / "model.safetensors").symlink_to(blobs / "abc")
    monkeypatch.setenv("MEGAFLOW_APPTAINER", str(program))
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    model = {"engine": "vllm", "path": str(snapshot), "gpus": 2, "image": str(sif), "binds": ["/data:/data:ro"]}
    found = adapters.launch(model, "solver", private, [tmp_path / "weights", tmp_path / "missing"])
    words = found.command
    here, end = [str(program), "-q", "exec", "--cleanenv"], words.index(str(sif))
    assert words[:4] == here
    assert "--nv" in words[:end]
    binds = [words[n + 1] for n in range(end) if words[n] == "--bind"]
    read_only = [f"{path}:{path}:ro" for path in (snapshot, blobs, tmp_path / "weights")]
    assert binds == [str(private), *read_only, "/data:/data:ro"]
    assert words[end + 1 : end + 4] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[-2:] == ["--uds", f"{private}/engine.sock"]
    assert "secret" not in " ".join(words)
    given = {name: found.env[f"APPTAINERENV_{name}"] for name in ("HF_TOKEN", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE")}
    assert given == {"HF_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "2,3", "HF_HUB_OFFLINE": "1"}
    (tmp_path / "a,b").mkdir()
    with pytest.raises(ConfigError, match="a path with a comma"):
        adapters.launch({**model, "path": str(tmp_path / "a,b")}, "solver", private)
    with pytest.raises(ConfigError, match=r"nowhere\.sif does not exist on this node"):
        adapters.launch({**model, "image": "/nowhere.sif"}, "solver", private)


@pytest.mark.parametrize(
    ("devices", "gpus", "flags"),
    [(["nvidiactl"], 1, ["--nv"]), (["kfd"], 1, ["--rocm"]), ([], 1, ["--nv"]), (["nvidiactl"], 0, [])],
)
def test_the_drivers_of_the_nodes_gpus_are_brought_in(
    tmp_path: Path, devices: list[str], gpus: int, flags: list[str]
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    assert launch.gpu_flags({"gpus": gpus}, tmp_path) == flags


def test_an_external_engine_has_no_image() -> None:
    with pytest.raises(ConfigError, match="image: engine external starts nothing"):
        parse({"name": "x", "model": {"engine": "external", "base_url": "http://x/v1", "image": "/x"}, "pool": {}})


def test_a_plan_names_the_image_wherever_the_campaign_file_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARED", "/shared")
    (tmp_path / "e.sif").touch()
    (tmp_path / "script.yaml").write_text("default: [x]")
    model = {"engine": "scripted", "script": "script.yaml", "image": "e.sif", "binds": ["$SHARED/data:/data:ro"]}
    also = [{"image": str(tmp_path / "e.sif"), "gpus": 4}]
    made = plan.make(parse({"name": "x", "model": {**model, "also": also}, "pool": {}}), tmp_path, str)
    assert [server.model["image"] for server in made.servers] == [str(tmp_path / "e.sif")] * 2
    assert {tuple(server.model["binds"]) for server in made.servers} == {("/shared/data:/data:ro",)}
    with pytest.raises(ConfigError, match=r"model\.image: 'f\.sif' does not exist"):
        plan.make(parse({"name": "x", "model": {**model, "image": "f.sif"}, "pool": {}}), tmp_path, str)
