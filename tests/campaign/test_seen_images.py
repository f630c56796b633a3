"""A campaign whose agent sees images: recorded once, scored with them, shown, and replayed without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import open_trajectories
from megaflow_hpc.trajectories import validate
from megaflow_hpc.trajectory import Trajectory, shown_images
from tests.support.campaigns import cli, run_local
from tests.support.samples import image

TASK = """\
class Look:
    image = "none"
    instruction = "Click what is new."

    async def score(self, sandbox, messages):
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        return float(len(urls) == 2 and all(url.startswith("data:image/png;base64,") for url in urls))
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
        for url in SCREENS[:self.most]:
            image = {"type": "image_url", "image_url": {"url": url}}
            messages.append({"role": "user", "content": [{"type": "text", "text": "now:"}, image]})
            for old in [m for m in messages if isinstance(m["content"], list)][:-2]:
                old["content"] = "dropped"
            answer = ask(model, {"model": model.model_name, "messages": messages})
            messages.append({"role": "assistant", "content": answer["message"]["content"]})
"""
SCREENS = [image(320, 200, number // 2) for number in range(8)]


def campaign(folder: Path, model: dict[str, Any], **agent: Any) -> dict[str, Any]:
    (folder / "look.py").write_text(TASK)
    (folder / "sees.py").write_text(AGENT)
    (folder / "screens.json").write_text(json.dumps([screen.url for screen in SCREENS]))
    learning = Path(__file__).parents[2] / "launchers" / "learning" / "shell_agent.py"
    (folder / "shell_agent.py").write_text(learning.read_text())
    (folder / "answers.yaml").write_text(yaml.safe_dump({"default": ["click(1, 2)"]}))
    fields = {"name": "look", "tasks": ["look:Look"], "agent": {"name": "sees:Sees", **agent}, "model": model}
    (folder / "campaign.yaml").write_text(yaml.safe_dump(fields))
    result, done = run_local(folder / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    return result


def only(result: dict[str, Any]) -> Trajectory:
    with open_trajectories(result["run"]) as store:
        (row,) = store
        return row.trajectory()


@pytest.mark.slow
def test_a_campaign_with_images_is_recorded_scored_shown_and_replayed(tmp_path: Path) -> None:
    first = campaign(tmp_path, {"engine": "scripted", "script": "answers.yaml"})
    assert validate(Path(first["run"], "trajectories.h5")) == []
    seen = only(first)
    assert (seen.status, seen.reward, seen.error) == ("completed", 1.0, "")
    assert list(seen.images) == [screen.sha256 for screen in SCREENS[::2]]
    shown = [[span.image for span in sequence.images] for sequence in seen.sequences]
    assert shown[0] == [SCREENS[0].sha256] * 2, "the second prompt extends the first"
    pairs = [[SCREENS[n].sha256, SCREENS[n + 1].sha256] for n in range(1, 7)]
    assert shown[1:] == pairs, "a window that moves begins a sequence at each call"
    assert len(shown_images(seen.messages)) > len(seen.images)
    text = cli("show", first["run"], "0").stdout
    assert "images    4, shown 14 times" in text
    assert f"now:\n{SCREENS[-1].label}" in text
    stored = sum(len(screen.data) for screen in SCREENS[::2])
    journals = sum(path.stat().st_size for path in Path(first["run"], "journal").iterdir())
    assert journals < 1.1 * stored + 20_000

    again = only(campaign(tmp_path, {"engine": "replay", "path": first["run"]}))
    assert again.images == seen.images
    assert [one.images for one in again.sequences] == [one.images for one in seen.sequences]
    assert [one.tokens for one in again.sequences] == [one.tokens for one in seen.sequences]
    assert again.messages == seen.messages


@pytest.mark.slow
def test_a_rollout_with_more_images_than_its_limit_is_truncated_and_keeps_what_it_had(tmp_path: Path) -> None:
    room = 1.5 * len(SCREENS[0].data) / 1e6
    seen = only(campaign(tmp_path, {"engine": "scripted", "script": "answers.yaml"}, max_image_mb=room))
    assert seen.status == "truncated"
    assert "agent.max_image_mb allows" in seen.error
    assert (list(seen.images), len(seen.turns)) == ([SCREENS[0].sha256], 2)
