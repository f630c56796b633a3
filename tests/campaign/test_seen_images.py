"""A campaign whose agent sees images: recorded once, scored with them, shown, and replayed without an engine."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import h5py
import pytest
import yaml

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.trajectories import validate
from megaflow_hpc.trajectories.journal.frames import read_frames
from megaflow_hpc.trajectory import Trajectory, shown_images
from tests.support.campaigns import forked, rows, run_local, verb
from tests.support.samples import image
from tests.support.waiting import until

SHELL_AGENT = Path(__file__).parents[2] / "launchers" / "learning" / "shell_agent.py"
TASK = """\
class Look:
    image = "none"
    instruction = "Click what is new."

    async def score(self, sandbox, messages):
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        return float(len(urls) == 2 and all(url.startswith("data:image/png;base64,") for url in urls))

class Turned(Look):
    pass
"""
AGENT = """\
import json
from pathlib import Path
from shell_agent import ask

SCREENS = json.loads(Path(__file__).with_name("screens.json").read_text())

class Sees:
    \"\"\"Shows the last two of eight screenshots. Every second is the one before.\"\"\"

    def __init__(self, most=8):
        self.most = most

    async def run(self, task, sandbox, model):
        messages = [{"role": "user", "content": task.instruction}]
        for url in SCREENS[task.id == "Turned" : self.most]:
            image = {"type": "image_url", "image_url": {"url": url}}
            messages.append({"role": "user", "content": [{"type": "text", "text": "now:"}, image]})
            for old in [m for m in messages if isinstance(m["content"], list)][:-2]:
                old["content"] = "dropped"
            answer = ask(model, {"model": model.model_name, "messages": messages})
            messages.append({"role": "assistant", "content": answer["message"]["content"]})
"""
SCREENS = [image(320, 200, number // 2) for number in range(8)]


SCORER = """\
import base64, hashlib

def score(messages, trajectory):
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    files = [base64.b64decode(url.partition(",")[2], validate=True) for url in urls]
    known = [hashlib.sha256(file).hexdigest() in trajectory.images for file in files]
    return {"reward": float(all(known)), "shown": len(known), "stored": len(trajectory.images)}
"""


def campaign(folder: Path, model: dict[str, Any], tasks: str = "look:Look", **agent: Any) -> dict[str, Any]:
    (folder / "look.py").write_text(TASK)
    (folder / "sees.py").write_text(AGENT)
    (folder / "screens.json").write_text(json.dumps([screen.url for screen in SCREENS]))
    (folder / "shell_agent.py").write_text(SHELL_AGENT.read_text())
    (folder / "answers.yaml").write_text(yaml.safe_dump({"default": ["click(1, 2)"]}))
    fields = {"name": "look", "tasks": tasks.split(), "agent": {"name": "sees:Sees", **agent}, "model": model}
    (folder / "campaign.yaml").write_text(yaml.safe_dump(fields))
    result, done = run_local(folder / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    return result


def trajectories(run: str) -> dict[str, Trajectory]:
    with open_trajectories(run) as store:
        return {row.id: row.trajectory() for row in store}


def images_of(run: str) -> dict[str, list[tuple[str, str]]]:
    """Returns the digests that name the images of each stored rollout, each with that of its bytes."""
    with open_trajectories(run) as store:
        return {
            row.id: [(name, hashlib.sha256(one.data).hexdigest()) for name, one in row.images.items()] for row in store
        }


@pytest.mark.slow
def test_runs_with_images_are_compared_scored_again_extended_and_reported(tmp_path: Path) -> None:
    """First they are recorded, shown, and replayed without an engine."""
    both = "look:Look look:Turned"
    run = campaign(tmp_path, {"engine": "scripted", "script": "answers.yaml"}, both)["run"]
    distinct = [screen.sha256 for screen in SCREENS[::2]]
    pairs = [(name, name) for name in distinct]
    assert images_of(run) == {"Look/default/0": pairs, "Turned/default/0": pairs}
    assert validate(Path(run, "trajectories.h5")) == []
    recorded = trajectories(run)
    seen = recorded["Look/default/0"]
    assert (seen.status, seen.reward, seen.error) == ("completed", 1.0, "")
    shown = [[span.image for span in sequence.images] for sequence in seen.sequences]
    assert shown[0] == [SCREENS[0].sha256] * 2, "the second prompt extends the first"
    windows = [[SCREENS[n].sha256, SCREENS[n + 1].sha256] for n in range(1, 7)]
    assert shown[1:] == windows, "a window that moves begins a sequence at each call"
    assert len(shown_images(seen.messages)) > len(seen.images)
    text = verb("show", run, "Look/default/0").stdout
    assert "images    4, shown 14 times" in text
    assert f"now:\n{SCREENS[-1].label}" in text
    stored = sum(len(screen.data) for screen in SCREENS[::2])
    journals = sum(path.stat().st_size for path in Path(run, "journal").iterdir())
    assert journals < len(recorded) * (1.1 * stored + 20_000)
    (tmp_path / "replay").mkdir()
    replayed = campaign(tmp_path / "replay", {"engine": "replay", "path": run}, both)["run"]
    for name, again in trajectories(replayed).items():
        first = recorded[name]
        assert (again.images, again.messages) == (first.images, first.messages)
        assert [one.images for one in again.sequences] == [one.images for one in first.sequences]
        assert [one.tokens for one in again.sequences] == [one.tokens for one in first.sequences]

    told = json.loads(verb("diff", run, "Look/default/0", "Turned/default/0", "--json").stdout)
    assert told["tokens"]["sequence"] == 0
    assert told["tokens"]["images"] == [distinct[0], distinct[1]]
    assert told["tokens"]["ids"][0] == told["tokens"]["ids"][1], "placeholders of images of one size are equal"
    assert told["tokens"]["sampled"] == [False, False]
    assert "images" not in told["fields"], "both show four"
    text = verb("diff", run, "Look/default/0", "Turned/default/0").stdout
    assert f"image sha256:{distinct[0][:8]}…  →  image sha256:{distinct[1][:8]}…" in text
    assert all(screen.label in text for screen in SCREENS)

    again = json.loads(forked("reverify", run, "--json").stdout)
    assert (again["scored"], again["mean"], again["changed"], again["unscored"]) == (2, 1.0, 0, {})
    (tmp_path / "scorer.py").write_text(SCORER)
    mine = forked("reverify", run, "--with", str(tmp_path / "scorer.py"), "--json")
    assert json.loads(mine.stdout)["scored"] == 2, mine.stderr
    with open_trajectories(run) as store:
        for row in store:
            assert (row.rewards["scorer"], row.rewards["scorer.shown"], row.rewards["scorer.stored"]) == (1, 2, 4)

    def contents() -> dict[str, str]:
        with open_trajectories(run) as store:
            return {row.id: repr(row.trajectory().to_record()) for row in store}

    before = contents()
    file = yaml.safe_load((tmp_path / "campaign.yaml").read_text())
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump({**file, "samples": 3}))
    assert "added 0 tasks and 4 rollouts" in forked("extend", run).stdout
    done = forked("resume", run, "--launcher", "local")
    assert done.returncode == 0, done.stderr
    assert validate(Path(run, "trajectories.h5")) == []
    after = contents()
    assert {name: after[name] for name in before} == before
    assert images_of(run) == {f"{task}/default/{n}": pairs for task in ("Look", "Turned") for n in range(3)}
    with h5py.File(Path(run, "trajectories.h5")) as stored:
        assert stored["images/sha256"].asstr()[:].tolist() == distinct
        assert len(stored["image_uses/image"]) == 24
    assert json.loads(forked("reverify", run, "--json").stdout)["scored"] == 4

    done = verb("report", run, "--no-pictures")
    assert done.returncode == 0, done.stderr
    page = Path(run, "report", "index.html").read_text()
    assert [page.count(screen.url) for screen in SCREENS] == [1] * 8


LARGE = """\
import hashlib, os, struct, zlib
from base64 import b64encode
from megaflow_hpc.types import Task
from shell_agent import ask

def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

def noise(width, height):
    rows = b"".join(b"\\0" + os.urandom(width) for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows, 0)), chunk(b"IEND", b"")
    return b"\\x89PNG\\r\\n\\x1a\\n" + b"".join(parts)

class Sees:
    \"\"\"Shows two images of three megabytes, which no other attempt has, and tells their digests.\"\"\"

    async def run(self, task, sandbox, model):
        messages = [{"role": "user", "content": task.instruction}]
        for _ in range(2):
            data = noise(2000, 1500)
            url = "data:image/png;base64," + b64encode(data).decode()
            text = {"type": "text", "text": hashlib.sha256(data).hexdigest()}
            shown = {"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}
            answer = ask(model, {"model": model.model_name, "messages": [*messages, shown]})["message"]["content"]
            messages += [{"role": "user", "content": "dropped"}, {"role": "assistant", "content": answer}]
"""
KILLS, ROLLOUTS = 4, 12


@pytest.mark.slow
def test_pods_killed_while_they_store_large_images_lose_double_and_halve_none(tmp_path: Path) -> None:
    """Every second kill is at a random instant, every other one while a journal grows."""
    (tmp_path / "look.py").write_text(TASK)
    (tmp_path / "large.py").write_text(LARGE)
    (tmp_path / "shell_agent.py").write_text(SHELL_AGENT.read_text())
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": ["click(1, 2)"]}))
    model = {"engine": "scripted", "script": "answers.yaml"}
    fields = {"name": "large", "tasks": ["look:Look"], "samples": ROLLOUTS, "agent": "large:Sees", "model": model}
    fields["slurm"] = {"pods": {"slots_per_rank": 2}}
    (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(fields))
    draw = random.Random(7)
    run = Campaign.from_yaml(tmp_path / "campaign.yaml").submit(launcher="local")

    def written() -> int:
        return sum(path.stat().st_size for path in Path(run.path, "journal").iterdir())

    kills, torn = 0, set()
    while kills < KILLS:
        assert run.local is not None
        pod, before = run.local.pod, written()
        until(lambda p=pod, b=before: written() > b or p.poll() is not None, "a rollout is stored", 90, 0.0005)
        if kills % 2:
            time.sleep(draw.uniform(0, 1.5))
        if pod.poll() is not None:
            break
        os.kill(pod.pid, signal.SIGKILL)
        pod.wait(60)
        run.local.stop()
        kills += 1
        torn |= torn_journals(run)
        run = Run(run.path)
        assert run.resume(launcher="local")
    run.wait(timeout_s=240)
    print(f"{kills} kills, {len(torn)} of them within a record")
    assert kills >= KILLS // 2
    assert {status for status, _ in rows(run.path).values()} == {"completed"}
    assert len(rows(run.path)) == ROLLOUTS
    file = Path(run.path, "trajectories.h5")
    assert validate(file) == []
    told: list[str] = []
    with open_trajectories(file) as store:
        for row in store:
            trajectory = row.trajectory()
            contents = [message["content"] for message in trajectory.messages]
            pairs = [(content[0]["text"], content[1]) for content in contents if isinstance(content, list)]
            assert [f"sha256:{name}" for name, _ in pairs] == [part["image_url"]["url"] for _, part in pairs]
            assert list(trajectory.images) == [name for name, _ in pairs]
            for name, one in trajectory.images.items():
                assert (hashlib.sha256(one.data).hexdigest(), len(one.data) > 3_000_000) == (name, True)
            assert len(pairs) == 2
            told += trajectory.images
    with h5py.File(file) as stored:
        assert stored["images/sha256"].asstr()[:].tolist() == told, "each once, and none of a killed attempt"
    assert len(set(told)) == 2 * ROLLOUTS


def torn_journals(run: Run) -> set[str]:
    """Returns the names of the journals that end in the middle of a record."""
    journals = Path(run.path, "journal").glob("*.journal")
    ends = {path: max((frame.end for frame in read_frames(path)), default=0) for path in journals}
    return {path.name for path, end in ends.items() if end < path.stat().st_size}


@pytest.mark.slow
def test_a_rollout_with_more_images_than_its_limit_is_truncated_and_keeps_what_it_had(tmp_path: Path) -> None:
    room = 1.5 * len(SCREENS[0].data) / 1e6
    model = {"engine": "scripted", "script": "answers.yaml"}
    (seen,) = trajectories(campaign(tmp_path, model, max_image_mb=room)["run"]).values()
    assert seen.status == "truncated"
    assert "agent.max_image_mb allows" in seen.error
    assert (list(seen.images), len(seen.turns)) == ([SCREENS[0].sha256], 2)
