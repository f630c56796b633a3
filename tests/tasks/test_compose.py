"""Harbor's docker-compose.yaml and MCP servers: what becomes a service, and what is refused with its line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.types import HealthCheck, Limits, McpServer, Service, Task
from tests.support.services import SHOP_COMPOSE, SHOP_FILES, TASK_TOML, write_compose_task

MANY = """
# merged over the definition of main
services:
  main:
    depends_on: [web]
    environment: {SHOP: "http://web:80"}
  db:
    image: ${DB:-redis:7}
    command: redis-server --save "" --appendonly no
    environment: {NAME: value, PRICE: $$5, DEBUG: false}
    volumes: ["data:/data", "/cache"]
    ports: ["6379:6379", "127.0.0.1:16380:6380/tcp", "53:53/udp"]
    mem_limit: 512m
    restart: always
    healthcheck: {test: redis-cli ping, interval: 500ms, timeout: 1m30s, retries: 2, start_period: 2m}
  web:
    image: nginx
    entrypoint: ["/entry.sh"]
    expose: [80]
    user: "1000"
    working_dir: /srv
    depends_on: {db: {condition: service_healthy}}
    deploy: {resources: {limits: {cpus: "0.5", memory: 1g}}}
    healthcheck: {disable: true, test: [CMD, "false"]}
volumes: {data: {}}
"""


def read(root: Path, compose: str, toml: str = TASK_TOML, files: dict[str, str] | None = None) -> Task:
    return read_harbor_task(write_compose_task(root, "one", compose, files or {}, "true", "true", toml))


def test_services_of_images_are_read(tmp_path: Path) -> None:
    task = read(tmp_path, MANY)
    db, web = task.services
    assert db == Service(
        "db",
        "redis:7",
        ("redis-server", "--save", "", "--appendonly", "no"),
        env={"NAME": "value", "PRICE": "$5", "DEBUG": "false"},
        ports=(6379, 6380),
        health=HealthCheck(("/bin/sh", "-c", "redis-cli ping"), 0.5, 90.0, 301.0),
        limits=Limits(memory_mb=536),
    )
    assert (web.entrypoint, web.command, web.ports, web.after) == (("/entry.sh",), (), (80,), ("db",))
    assert (web.user, web.workdir, web.limits) == ("1000", "/srv", Limits(memory_mb=1073, cpus=0.5))
    assert web.health.command == ()
    assert task.env["SHOP"] == "http://web:80"
    assert Task.from_dict(task.to_dict()) == task


def test_a_service_that_is_built_has_the_program_of_its_dockerfile(tmp_path: Path) -> None:
    (shop,) = read(tmp_path, SHOP_COMPOSE, files=SHOP_FILES).services
    assert (shop.command, shop.ports, shop.workdir, shop.base) == (("python3", "shop.py"), (5000,), "/srv", "base")
    assert shop.env == {"GREETING": "hello"}
    assert shop.image.startswith("base+")
    assert Path(shop.dockerfile).name == "Dockerfile"


@pytest.mark.parametrize(
    ("dockerfile", "compose", "entrypoint", "command"),
    [
        ('ENTRYPOINT ["/e"]\nCMD ["c"]', "", ("/e",), ("c",)),
        ('ENTRYPOINT ["/e"]\nCMD ["c"]', "command: d", ("/e",), ("d",)),
        ('ENTRYPOINT ["/e"]\nCMD ["c"]', "entrypoint: f", ("f",), ()),
        ("CMD run it", "", (), ("/bin/sh", "-c", "run it")),
        ('SHELL ["/bin/bash", "-c"]\nENTRYPOINT run', "", ("/bin/bash", "-c", "run"), ()),
    ],
)
def test_entry_points_and_commands_combine_as_in_docker(
    tmp_path: Path, dockerfile: str, compose: str, entrypoint: tuple[str, ...], command: tuple[str, ...]
) -> None:
    text = f"services: {{x: {{build: x, {compose}}}}}"
    (service,) = read(tmp_path, text, files={"x/Dockerfile": f"FROM base\n{dockerfile}\n"}).services
    assert (service.entrypoint, service.command) == (entrypoint, command)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("privileged: true", r":4: services\.db\.privileged: not supported: .*; leave this task out"),
        ("network_mode: host", r":4: services\.db\.network_mode: not supported"),
        ("gpus: all", r":4: services\.db\.gpus: not supported; leave this task out"),
        ("volumes: ['/run/docker.sock:/run/docker.sock']", r":4: services\.db\.volumes: .* no directory can be bound"),
        ("volumes: [{type: bind, source: ./x, target: /x}]", r":4: services\.db\.volumes: .*no directory can be bound"),
        ("environment: [TOKEN]", r":4: services\.db\.environment: TOKEN: services get none of your variables"),
        ("environment: {KEY: '${KEY}'}", r":4: services\.db\.environment: \$\{KEY\}: services get none of your"),
        ("command: 'echo \"'", r":4: services\.db\.command: No closing quotation; write a list"),
        ("depends_on: {main: {}}", r":4: services\.db\.depends_on\.main: services start before the agent's sandbox"),
        ("depends_on: [cache]", r"service 'db' waits for 'cache', which is not a service; known here: db"),
        ("depends_on: [db]", "services db wait for one another"),
        ("depends_on: {x: {condition: service_completed_successfully}}", "condition 'service_completed_successfully'"),
        ("build: ../..", r":4: services\.db\.build\.?.*: '\.\./\.\.' leads out of the task"),
        ("build: {context: ., target: x}", r":4: services\.db\.build\.target: not supported"),
        ("build: nowhere", r"nowhere/Dockerfile: no such file"),
        ("ports: ['8000-8010']", r":4: services\.db\.ports: '8000-8010': expected a port"),
        ("mem_limit: lots", r":4: services\.db\.mem_limit: 'lots': expected a size"),
        (f"mem_limit: {'9' * 400}", r":4: services\.db\.mem_limit: '?9+'?: expected a size"),
        ("cpus: -100", r":4: services\.db\.cpus: -100: expected a number from 0 on"),
        ("cpus: .nan", r":4: services\.db\.cpus: nan: expected a number from 0 on"),
        ("healthcheck: {interval: soon}", r":4: services\.db\.healthcheck\.interval: 'soon': expected a duration"),
        ("healthcheck: {test: [ls]}", r":4: services\.db\.healthcheck\.test: .*begins with CMD"),
        ("deploy: {replicas: 3}", r":4: services\.db\.deploy: 3 replicas"),
        ("services: {main: {privileged: true}}", r":1: services\.main\.privileged: not supported"),
        ("services: {main: {build: other}}", r":1: services\.main\.build: the agent's image"),
        ("services: {main: {command: server}}", r":1: services\.main\.command: the agent's sandbox runs no program"),
        ("services: {DB_: {image: x}}", r":1: services\.DB_: expected a host name"),
        ("services: {localhost: {image: x}}", r":1: services\.localhost: expected a host name"),
        ("services: {db: {}}", r":1: services\.db: neither image nor build"),
        ("services: [db]", r":1: services: expected names with their values"),
        ("include: [other.yaml]", r":1: include: not supported"),
        ("services: {a: {image: x, volumes: ['v:/v']}, b: {image: x, volumes: ['v:/v']}}", "services share no files"),
        ("services: {db: ", "not valid YAML"),
    ],
)
def test_what_needs_more_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    whole = text.startswith(("services", "include"))
    with pytest.raises(ConfigError, match=rf"docker-compose\.yaml.*{said}" if whole else said):
        read(tmp_path, text if whole else f"services:\n  db:\n    image: redis\n    {text}\n")


@pytest.mark.parametrize("check", ["start_period: 9999h", "retries: 999999999", f"interval: {'9' * 400}s"])
def test_no_service_may_take_longer_than_an_hour_to_become_healthy(tmp_path: Path, check: str) -> None:
    text = f"services: {{db: {{image: redis, mem_limit: 0, healthcheck: {{{check}}}}}}}"
    (service,) = read(tmp_path, text).services
    assert service.health.ready_s == 3600
    assert service.limits.memory_mb is None, "0 is no limit"


SERVERS = """
[[environment.mcp_servers]]
name = "vault"
transport = "streamable-http"
url = "http://tools:8000/mcp"
[[environment.mcp_servers]]
name = "local"
transport = "stdio"
command = "python3"
args = ["serve.py"]
"""


def test_mcp_servers_are_read_and_their_ports_are_served(tmp_path: Path) -> None:
    task = read(tmp_path, "services: {tools: {image: tools}}", TASK_TOML + SERVERS)
    assert task.mcp_servers == (
        McpServer("vault", "http://tools:8000/mcp"),
        McpServer("local", transport="stdio", command=("python3", "serve.py")),
    )
    assert task.services[0].ports == (8000,)
    assert Task.from_dict(task.to_dict()) == task


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("tools:8000", "elsewhere:8000"), r"task\.toml:14: .*url = .*: expected the name of a service .*\(tools\)"),
        (('"http://tools:8000/mcp"', '"tools"'), r"task\.toml:14: .*url = 'tools': expected an address"),
        (('command = "python3"', ""), r"task\.toml:.* command = None: expected the program"),
        (('name = "vault"', 'name = "a b"'), r"task\.toml:12: .*name = 'a b': expected letters"),
        (('"stdio"', '"carrier-pigeon"'), r"task\.toml:17: .*transport = 'carrier-pigeon': expected sse"),
        (('"vault"', '"vault"\nheaders = {Authorization = "x"}'), r"task\.toml:13: .*headers = .*: expected none"),
    ],
)
def test_a_wrong_mcp_server_names_its_line(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in SERVERS
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, "services: {tools: {image: tools}}", TASK_TOML + SERVERS.replace(*change))


def test_a_verifier_has_no_services(tmp_path: Path) -> None:
    toml = TASK_TOML.replace("[environment]", 'environment_mode = "separate"\n[environment]')
    task = write_compose_task(tmp_path, "one", SHOP_COMPOSE, SHOP_FILES, "true", "true", toml)
    assert read_harbor_task(task).services
    (task / "tests" / "docker-compose.yaml").write_text(textwrap.dedent(SHOP_COMPOSE))
    with pytest.raises(ConfigError, match=r"tests/docker-compose\.yaml: a verifier has no services"):
        read_harbor_task(task)
