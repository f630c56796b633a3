"""Writes MiniWoB++ tasks for the pages in a desktop image (containers/desktop.def).

Each task is one episode, given by a page and a seed. The page runs in a service with its own sandbox, in which the
image's program ``screen`` opens it. The agent's sandbox can only reach this program's port. The tests read the reward
that the page's own script computed, using a key that only the task's directory contains::

    OUTPUT/<page>-s<seed>/
      task.toml            docker_image "desktop"; SCREEN_ADDRESS tells `screen` where the page is
      instruction.md       what the page asks for
      environment/         docker-compose.yaml: the service; Dockerfile: keeps it from being uploaded
      tests/               test.sh asks for the state of the episode
      solution/            solve.sh runs miniwob_oracle.py, for the pages that it can solve
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shlex
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megaflow_hpc.environments.sandbox.provider import ApptainerProvider
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import Refuse
from megaflow_hpc.tasks.sets import miniwob_oracle
from megaflow_hpc.tasks.sets.converters import NewTask

VERSION_FILE = "/opt/miniwob/VERSION"
IMAGE = "desktop"
"""Name with which tasks refer to the image."""
PORT = 7900
SIZE = "504x660"
ZOOM = 3
"""Display pixels per page pixel. Pages are 160 pixels wide and 210 pixels high."""
AGENT_S = 300
EPISODE_S = 86_400
"""Seconds after which the page ends its episode. Much longer than any time limit for the agent, which a campaign can
change."""
LISTING_S = 900.0
MAX_LISTING_BYTES = 64 << 20

TASK = """\
schema_version = "1.2"

[metadata]
source = "MiniWoB++ {version}"
page = "{page}"
seed = {seed}
screen = true

[agent]
timeout_sec = {agent_s}.0

[verifier]
timeout_sec = 60.0

[environment]
docker_image = "{image}"
workdir = "/work"
network_mode = "no-network"

[environment.env]
SCREEN_ADDRESS = "screen:{port}"
"""
INSTRUCTION = """\
{utterance}

The page is on a screen. Only the first outcome counts. If you have a shell: `screen do` clicks, types and takes
screenshots there, in {size} pixels, and `screen tree` lists what is on the page.
"""
COMPOSE = """\
services:
  screen:
    image: {image}
    command: [screen, serve, --listen, "0.0.0.0:{port}", --miniwob, {page}, --seed, "{seed}", --time, "{episode_s}",
      --size, {size}, --zoom, "{zoom}"]
    environment: {{SCREEN_KEY: {key}}}
    expose: ["{port}"]
    mem_limit: 2g
"""
TEST = """\
#!/bin/bash
# The reward is that of the page's own script, at most 1, and 0 before the episode has ended and for a failure.
mkdir -p /logs/verifier
SCREEN_KEY={key} screen episode > /logs/verifier/episode.json || exit 1
python3 -I - <<'END'
import json
with open("/logs/verifier/episode.json") as file:
    reward = json.load(file)["reward"]
with open("/logs/verifier/reward.txt", "w") as file:
    file.write(str(min(1.0, max(0.0, float(reward)))))
END
"""
SOLVE = """\
#!/bin/bash
exec python3 /solution/solve.py {page} {quoted}
"""


_Page = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9-]{0,60}$")]
_Seed = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]
_VERSION = re.compile(r"[0-9][0-9a-z.]{0,30}")


class AskedPage(msgspec.Struct):
    """A line of the output of ``screen utterances``, a program in the image."""

    page: _Page
    seed: _Seed
    utterance: str = ""
    error: str = ""


def read_pages(image: Path, seeds: int) -> tuple[str, list[AskedPage]]:
    """Returns the version of the pages in an image, and the instruction that each page shows for each seed.

    Raises:
        ConfigError: The image has no pages, or its browser does not start.
        SandboxError: The sandbox does not start.
    """

    async def read() -> tuple[str, list[AskedPage]]:
        async with (
            ApptainerProvider() as provider,
            await provider.start(SandboxSpec(str(image), network="none")) as sandbox,
        ):
            version = await sandbox.read(VERSION_FILE)
            if version is None:
                raise ConfigError(
                    f"--image {image}: has no {VERSION_FILE}; name an image built from containers/desktop.def"
                )
            command = ["screen", "utterances", *map(str, range(seeds))]
            output = bytearray()

            def keep(data: bytes) -> bool:
                output.extend(data)
                return len(output) < MAX_LISTING_BYTES

            done = await sandbox.exec(command, timeout_s=LISTING_S, on_output=keep)
            lines = bytes(output).splitlines()
            if done.exit_code:
                raise ConfigError(
                    f"--image {image}: its pages cannot be listed: {b''.join(lines[-1:]).decode()[-300:]}"
                )
            try:
                asked = [msgspec.json.decode(line, type=AskedPage) for line in lines]
                if not _VERSION.fullmatch(text := version.decode().strip()):
                    raise ValueError(f"{VERSION_FILE} has {text[:50]!r}")
            except ValueError as error:  # includes msgspec's errors
                raise ConfigError(f"--image {image}: its pages cannot be listed: {error}") from None
            return text, asked

    return asyncio.run(read())


def write_tasks(image: Path, seeds: int, target: Path, refuse: Refuse) -> str:
    """Writes a task for each page and seed. Returns the pages' version."""
    version, episodes = read_pages(image, seeds)
    for asked in episodes:
        if asked.error or not asked.utterance:
            refuse(ConfigError(f"{asked.page}, seed {asked.seed}: {asked.error or 'asks for nothing'}"))
            continue
        write_task(target, asked, version)
    return version


def write_task(target: Path, asked: AskedPage, version: str) -> None:
    """Writes the task of one episode into a new directory in ``target``."""
    solved = asked.page in miniwob_oracle.PAGES
    values: dict[str, Any] = {
        "version": version,
        "page": asked.page,
        "seed": asked.seed,
        "utterance": asked.utterance,
        "quoted": shlex.quote(asked.utterance),
        "key": secrets.token_hex(16),
        "image": IMAGE,
        "port": PORT,
        "size": SIZE,
        "zoom": ZOOM,
        "agent_s": AGENT_S,
        "episode_s": EPISODE_S,
    }
    templates = {
        "task.toml": TASK,
        "instruction.md": INSTRUCTION,
        "environment/docker-compose.yaml": COMPOSE,
        "environment/Dockerfile": "FROM {image}\n",
        "tests/test.sh": TEST,
        **({"solution/solve.sh": SOLVE} if solved else {}),
    }
    files: dict[str, str | bytes] = {name: text.format(**values) for name, text in templates.items()}
    if solved:
        files["solution/solve.py"] = Path(miniwob_oracle.__file__).read_bytes()
    NewTask(f"{asked.page}-s{asked.seed}", files, f"MiniWoB++ {version}").write(target)
