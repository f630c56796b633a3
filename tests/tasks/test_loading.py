"""Harbor directories and Dockerfiles: what is read, and the messages about mistakes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.loading import load_tasks, summarise
from megaflow_hpc.types import Limits, Task
from tests.support.harbor_tasks import TOML, resolve_images, write_task


def test_a_task_is_read_with_its_limits_and_survives_json(tmp_path: Path) -> None:
    task = read_harbor_task(write_task(tmp_path))
    assert (task.id, task.image, task.workdir, task.instruction) == ("one", "org/base:1", "/app", "Fix it.\n")
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.network) == (120.0, 30.0, "gateway")
    assert task.limits == Limits(memory_mb=2048, cpus=2.0, disk_mb=500)
    assert task.metadata["difficulty"] == "easy"
    assert HarborData.of(task).verifier.env == {"MODE": "strict"}
    assert HarborData.of(task).upload_environment
    assert Task.from_dict(task.to_dict()) == task


def test_the_later_schema_and_host_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "t1")
    monkeypatch.setenv("MEGAFLOW_TASK_ENV", "OTHER, TOKEN_OF_TEST")
    toml = """\
    schema_version = "1.4"
    [task]
    name = "org/one"
    [environment]
    docker_image = "i"
    network_mode = "public"
    memory_mb = 64
    [environment.env]
    A = "${ABSENT_OF_TEST:-dflt}"
    [verifier]
    environment_mode = "separate"
    [verifier.env]
    B = "${TOKEN_OF_TEST}-${ABSENT_OF_TEST:-dflt}"
    """
    task = read_harbor_task(write_task(tmp_path, toml=textwrap.dedent(toml)))
    assert (task.network, task.limits.memory_mb, dict(task.env)) == (None, 64, {"A": "dflt"})
    rules = HarborData.of(task).verifier
    assert (rules.env, rules.secrets) == ({"B": "t1-dflt"}, ["t1"])


@pytest.mark.parametrize("section", ["environment", "solution", "verifier"])
def test_a_variable_of_the_users_goes_to_no_sandbox_in_which_an_agent_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "t1")
    monkeypatch.setenv("MEGAFLOW_TASK_ENV", "TOKEN_OF_TEST")
    toml = f'[environment]\ndocker_image = "i"\n[{section}.env]\nA = "${{TOKEN_OF_TEST:-none}}"\n'
    with pytest.raises(ConfigError, match=rf"task\.toml:4: \[{section}\.env\] A .*separate.* remove TOKEN_OF_TEST"):
        read_harbor_task(write_task(tmp_path, toml=toml))
    monkeypatch.setenv("MEGAFLOW_TASK_ENV", "")
    read_harbor_task(write_task(tmp_path, "other", toml))


def test_an_image_with_a_dockerfile_takes_only_its_workdir(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "i"\n'
    text = "FROM a AS b\nWORKDIR /x\nFROM b\nWORKDIR /srv\nWORKDIR app\nRUN <<END\nrm -rf /\nEND\n"
    task = read_harbor_task(write_task(tmp_path, toml=toml, dockerfile=text))
    assert (task.image, task.workdir, HarborData.of(task).upload_environment) == ("i", "/srv/app", False)


def test_a_dockerfile_that_only_names_its_base_needs_no_build(tmp_path: Path) -> None:
    text = 'ARG TAG=12\nFROM debian:${TAG}\nENV A="x y"\nWORKDIR /w\nCMD ["sh"]\n'
    task = read_harbor_task(write_task(tmp_path, toml="", dockerfile=text))
    assert (task.image, task.workdir, dict(task.env)) == ("debian:12", "/w", {"A": "x y"})
    assert not HarborData.of(task).dockerfile


def test_tasks_with_equal_dockerfiles_share_an_image_and_others_do_not(tmp_path: Path) -> None:
    text = "FROM debian:12\nCOPY data /data\n"
    paths = [write_task(tmp_path, name, "", text) for name in ("a", "b", "c")]
    for path, data in zip(paths, ("1", "1", "2"), strict=True):
        (path / "environment" / "data").write_text(data)
    images = [read_harbor_task(path).image for path in paths]
    assert images[0] == images[1] != images[2]
    assert images[0].startswith("debian:12+")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("timeout_sec = 120.0", 'timeout_sec = "long"'),
            r"task\.toml:5: \[agent\] timeout_sec = 'long': expected a number",
        ),
        (
            ("timeout_sec = 30", "timeout_sec = -1"),
            r"task\.toml:7: \[verifier\] timeout_sec = -1: expected a number above 0",
        ),
        (('memory = "2G"', 'memory = "lots"'), r"task\.toml:13: .*memory = 'lots': expected a size"),
        (('workdir = "/app"', 'workdir = "app"'), r"task\.toml:11: .*workdir = 'app': expected an absolute path"),
        (
            ('"strict"', '"${HOME}"'),
            r"task\.toml:8: .*expected none of your variables.* \"separate\", or give a default in the task",
        ),
        (("cpus = 2", "gpus = 1"), r"task\.toml:12: .*gpus = 1: expected none"),
        (("allow_internet = false", 'network_mode = "some"'), r"task\.toml:15: .*network_mode = 'some'"),
        (("[metadata]", "[metadata"), r"task\.toml: not valid TOML"),
        (('docker_image = "org/base:1"', ""), r"neither \[environment\] docker_image nor environment/Dockerfile"),
        (
            ("[agent]", '[[steps]]\nname = "a/b"\n[agent]'),
            r"task\.toml:5: \[steps\] name = 'a/b': expected the name",
        ),
        (
            ('version = "1.0"', 'schema_version = "1.5"'),
            r"task\.toml:1: schema_version = '1\.5': .* at most 1\.4",
        ),
        (("cpus = 2", 'os = "windows"'), r"task\.toml:12: .*os = 'windows': expected linux"),
        (("cpus = 2", 'mcp_servers = [{name = "m"}]'), r"task\.toml:12: .*url = None: expected an address"),
        (('version = "1.0"', 'artifacts = ["../x"]'), r"task\.toml:1: artifacts = '\.\./x': expected a path without"),
        (
            ('version = "1.0"', 'artifacts = [{source = "/x", service = "db"}]'),
            r"task\.toml:1: .*service = 'db': expected main",
        ),
        (
            ("[agent]", '[[verifier.collect]]\ncommand = "dump"\nservice = "db"\n[agent]'),
            r"task\.toml:6: \[verifier\.collect\] service = 'db': expected main",
        ),
    ],
)
def test_a_wrong_task_names_file_line_value_and_remedy(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in TOML
    with pytest.raises(ConfigError, match=said):
        read_harbor_task(write_task(tmp_path, toml=TOML.replace(*change, 1)))


def test_a_task_without_tests_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    (task / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"one/tests/test\.sh: missing; .* add tests/test\.sh"):
        read_harbor_task(task)


def test_a_task_cannot_do_without_a_file_that_its_harborignore_leaves_out(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    (task / "tests" / ".harborignore").write_text("*.sh\n")
    with pytest.raises(
        ConfigError, match=r"one/tests/test\.sh: needed, but excluded by a \.harborignore; .*'!test\.sh'"
    ):
        read_harbor_task(task)
    (task / "tests" / ".harborignore").write_text("*.sh\n!test.sh\n")
    read_harbor_task(task)
    (task / "tests" / ".harborignore").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"tests/\.harborignore: cannot be read as UTF-8"):
        read_harbor_task(task)


def test_sources_are_globbed_filtered_and_limited(tmp_path: Path) -> None:
    for name in ("c", "a", "b", "d-slow"):
        write_task(tmp_path / "tasks", name)
    (tmp_path / "tasks" / "README").write_text("not a task")
    (tmp_path / "tasks" / "notes").mkdir()
    source: dict[str, Any] = {"path": "tasks/*", "include": (), "exclude": ("*-slow",), "limit": 2}
    assert [task.id for task in load_tasks([source], tmp_path)] == ["a", "b"]
    assert [task.id for task in load_tasks(["tasks/a", {"path": "tasks/*", "include": ["d*"]}], tmp_path)] == [
        "a",
        "d-slow",
    ]


def test_reasons_for_leaving_tasks_out_are_counted() -> None:
    messages = ["x.jsonl:9: odd", *(f"x.jsonl:{n}: empty: again" for n in range(1, 5)), *(f"y: {n}" for n in range(20))]
    lines = summarise(messages)
    assert lines[:2] == ["x.jsonl:1: empty: again (and 3 more)", "x.jsonl:9: odd"]
    assert (len(lines), lines[-1]) == (11, "… and 12 further reasons")
    assert summarise([]) == []


def test_duplicate_ids_name_both_paths_and_an_empty_set_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "x", "same")
    write_task(tmp_path / "y", "same")
    with pytest.raises(ConfigError, match=r"same is used twice: .*/x/same and .*/y/same"):
        load_tasks(["x/*", "y/*"], tmp_path)
    (tmp_path / "old" / "t").mkdir(parents=True)
    (tmp_path / "old" / "t" / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(ConfigError, match=r"old/t/task\.yaml: .*harbor task migrate -i .*/old/t -o OUTPUT"):
        load_tasks(["old/*"], tmp_path)
    write_task(tmp_path / "old", "new")
    left_out: list[str] = []
    assert [task.id for task in load_tasks(["old/*"], tmp_path, left_out=left_out)] == ["new"]
    assert [line.partition(": ")[0] for line in left_out] == [f"{tmp_path}/old/t/task.yaml"]
    strict = {"path": "old/*", "exclude": ["t"], "strict": True}
    assert [task.id for task in load_tasks([strict], tmp_path, left_out=left_out)] == ["new"]
    for source, said in (("z/*", "no Harbor task directory"), ("x", r"write x/\*"), ("t.jsonl", "t.jsonl")):
        with pytest.raises(ConfigError, match=said):
            load_tasks([source], tmp_path)
    with pytest.raises(ConfigError, match=r"include \['nope'\] and exclude \[\] leave no valid task"):
        load_tasks([{"path": "x/*", "include": ["nope"]}], tmp_path)


def test_an_image_that_is_not_mapped_names_task_and_remedy(tmp_path: Path) -> None:
    task = read_harbor_task(write_task(tmp_path))
    with pytest.raises(
        ConfigError, match=r"environment\.images: image 'org/base:1', which .*one/task\.toml needs, is not mapped"
    ):
        resolve_images([task], {"other": "x.sif"}, tmp_path, store=tmp_path / "store")
    with pytest.raises(ConfigError, match=r"org/base:1: .*/x\.sif: no such file"):
        resolve_images([task], {"org/base:1": "x.sif"}, tmp_path, store=tmp_path / "store")
    (tmp_path / "x.sif").mkdir()  # an unpacked image may have any name
    found = resolve_images([task], {"org/base:1": "x.sif"}, tmp_path, store=tmp_path / "store")
    assert found == {"org/base:1": str(tmp_path / "x.sif")}
    assert not (tmp_path / "store").exists()


def test_a_task_with_a_loop_of_links_is_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    for name in ("good", "loop"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "environment").mkdir()
        (tmp_path / name / "task.toml").write_text("[environment]\n")
        (tmp_path / name / "instruction.md").write_text("Do.")
        (tmp_path / name / "tests" / "test.sh").write_text("true\n")
    (tmp_path / "good" / "environment" / "Dockerfile").write_text("FROM x\n")
    (tmp_path / "loop" / "environment" / "Dockerfile").symlink_to("Dockerfile")
    left_out: list[str] = []
    assert [task.id for task in load_tasks([f"{tmp_path}/*"], "/", left_out=left_out)] == ["good"]
    assert [line.partition(": ")[0] for line in left_out] == [str(tmp_path / "loop")]
