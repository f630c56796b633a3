"""The verbs of ``weights`` on runs without running engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli import main
from megaflow_hpc.rundir.marks import FINISHED

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def served(campaign: Path) -> Run:
    """Plan a run with two policies that have scripted engines."""
    (campaign.parent / "answers.yaml").write_text('default: ["42"]\n')
    model = "{engine: scripted, script: answers.yaml}"
    text = campaign.read_text().replace("[oracle, nop]", "mini-swe-agent")
    campaign.write_text(f"{text}models: {{a: {model}, b: {model}}}\n")
    return Campaign.from_yaml(campaign).plan(launcher="local")


def publish(run: Run, *words: str) -> list[str]:
    return ["weights", "publish", str(run.path), *words]


def test_what_cannot_be_published_is_refused_with_the_reason(planned: Run, served: Run, capsys: Capture) -> None:
    model = str(served.path.parent)
    for words, said in (
        (publish(planned, model), "no policy has a model; there are: none"),
        (publish(served, model), "several policies have models; name one with --policy; there are: a, b"),
        (publish(served, model, "--policy", "c"), "no policy 'c' with a model; there are: a, b"),
        (publish(served, model, "--policy", "a"), "has no script.yaml"),
        (publish(served, "/no/model", "--policy", "a"), "/no/model: not a directory"),
        (publish(served, model, "--policy", "a", "--keep", "0"), "--keep: 0: give a whole number of at least 1"),
    ):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_versions_are_listed_with_the_current_one_marked(served: Run, tmp_path: Path, capsys: Capture) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "script.yaml").write_text('default: ["43"]\n')
    assert main(publish(served, str(weights), "--policy", "b")) == 0
    assert capsys.readouterr().out == "1\n"
    assert main(["weights", "list", str(served.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["version"], row["current"], row["servers"]) for row in rows] == [
        ("a", 0, True, 0),
        ("b", 0, False, 0),
        ("b", 1, True, 0),
    ]
    assert main(["weights", "list", str(served.path)]) == 0
    assert "1 *" in capsys.readouterr().out


def test_a_token_that_comes_again_gives_the_version_that_is_there(served: Run, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "script.yaml").write_text('default: ["43"]\n')
    step = publish(served, str(folder), "--policy", "b", "--token", "step-1", "--digest")
    assert [main([*step, "x"]), main([*step, "x"])] == [0, 0]
    assert capsys.readouterr().out == "1\n1\n"
    assert main([*step, "y"]) == 2
    assert "published as version 1 with digest x, not y" in capsys.readouterr().err
    assert main(["weights", "list", str(served.path)]) == 0
    assert "ordinal" in capsys.readouterr().out


def test_weights_are_sent_and_received(served: Run, tmp_path: Path, capsys: Capture) -> None:
    folder, inbox = tmp_path / "weights", tmp_path / "inbox"
    folder.mkdir()
    words = [str(served.path), str(inbox), "--policy"]
    assert main(["weights", "send", *words, "a"]) == 0
    assert main(["weights", "receive", *words, "b"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "policy a: nothing is published yet\nnothing newer than version 0 of the sender\n"
    (folder / "script.yaml").write_text('default: ["43"]\n')
    assert main(publish(served, str(folder), "--policy", "a")) == 0
    assert main(["weights", "send", *words, "a"]) == 0
    assert main(["weights", "receive", *words, "b"]) == 0
    assert capsys.readouterr().out == "1\n1\n2\n"
    assert main(["weights", "receive", *words, "b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": None, "sent": 1, "waiting": ""}
    (served.path / FINISHED).write_text("")
    assert main(["weights", "receive", *words, "b"]) == 2
    assert "is finished, so no engine will load these weights" in capsys.readouterr().err
