"""Training on demonstrations before any rollout exists: the command, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.samples import image
from tests.support.torch_ranks import run_ranks
from tests.support.vision import PLACEHOLDER

pytestmark = pytest.mark.slow  # each waits for torch

SHARED = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from launchers.tiny_model import make
from megaflow_hpc.training.trainer import warm_start
from megaflow_hpc.training.trainer.warm_start import examples
from tests.support.trainer_scripts import refusal


def command(*words):
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        status = warm_start.main(["tiny", *words])
    losses = [json.loads(line)["loss"] for line in out.getvalue().splitlines() if line.startswith("{")]
    return [status, losses, errors.getvalue()]


make(Path("tiny"), layers=1, vision=sys.argv[1] == "vision")
errors = [refusal(lambda: examples(Path("tiny"), Path(f"{name}.jsonl"))) for name in sys.argv[2:]]
LEARN = ("demonstrations.jsonl", "models/out", "--epochs=8", "--lr=3e-3", "--dtype=float32")
"""
MAKE = """
FORGETFUL = %r
found = examples(Path("tiny"), Path("demonstrations.jsonl"))
template = Path("tiny", "chat_template.jinja")
original = template.read_text()
template.write_text(FORGETFUL)
apart = examples(Path("tiny"), Path("demonstrations.jsonl"))[:2]
template.write_text(original)
done = {
    "learned": command(*LEARN, "--batch=4", "--microbatch=100"),
    "there": command("demonstrations.jsonl", "models/out"),
    "misplaced": command("demonstrations.jsonl", "demonstrations.jsonl/out"),
    "spoiled": command("demonstrations.jsonl", "spoiled", "--epochs=4", "--lr=1e30", "--dtype=float32"),
}
print(json.dumps([found, apart, errors, done]))
"""
FORGETFUL = """{% for message in messages %}\
{% if message.role == 'user' or loop.last %}{{ message.role }}: {{ message.content }};{% endif %}\
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
"""A chat template that leaves earlier answers out."""


def test_a_model_learns_demonstrations(tmp_path: Path) -> None:
    turns = [("user", "add 1 2"), ("assistant", "3"), ("user", "add 2 2"), ("assistant", "4")]
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
    (tmp_path / "demonstrations.jsonl").write_text(f"{line}\n" * 4)
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    found, apart, (empty, bad), done = run_ranks(SHARED + MAKE % FORGETFUL, tmp_path, "text", "empty", "bad")
    assert found == [found[0]] * 4, "an example for each conversation"
    tokens, written, shown = found[0]
    assert bytes(tokens[place] for place in written if tokens[place] < 256) == b"3\n4\n", "the assistant's alone"
    assert shown == []
    assert len(apart) == 2, "the second answer's prompt does not contain the first"
    assert "empty.jsonl: has no message of an assistant" in empty
    assert "bad.jsonl:1: KeyError('messages'); expected" in bad
    status, losses, said = done["learned"]
    assert status == 0, said
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2
    names = {path.name for path in (tmp_path / "models" / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert [path.name for path in tmp_path.glob("models/.out*")] == []
    assert "out: exists already" in done["there"][2]
    status, _, said = done["misplaced"]
    assert status == 2
    assert "demonstrations.jsonl: " in said
    assert "choose another place for OUT" in said
    status, _, said = done["spoiled"]
    assert status == 2
    assert "the gradient is not finite; use a lower --lr; nothing was written" in said
    assert not (tmp_path / "spoiled").exists()


SEEING = """
(tokens, written, shown), = examples(Path("tiny"), Path("demonstrations.jsonl"))
text = Path("demonstrations.jsonl").read_text()
Path("demonstrations.jsonl").write_text(text * 2)
print(json.dumps([tokens, written, [list(span) for span, _ in shown], errors, command(*LEARN, "--batch=2")]))
"""


def test_an_image_text_model_learns_demonstrations_with_images(tmp_path: Path) -> None:
    first, second = image(56, 28, 1), image(28, 28, 2)
    (tmp_path / "first.png").write_bytes(first.data)
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in ("first.png", second.url, "no.png", "data:,x")]
    messages = [
        {"role": "user", "content": [parts[0], {"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "noise"},
        {"role": "user", "content": [parts[1]]},
        {"role": "assistant", "content": "more"},
    ]
    (tmp_path / "demonstrations.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    for name, part in (("lost", parts[2]), ("text", parts[3])):
        bad = [{"role": "user", "content": [part]}, messages[1]]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": bad}) + "\n")
    found = run_ranks(SHARED + SEEING, tmp_path, "vision", "lost", "text")
    tokens, written, shown, (lost, text), (status, losses, said) = found
    assert [(length, sha256) for _, length, sha256 in shown] == [(2, first.sha256), (1, second.sha256)]
    assert all(tokens[start : start + length] == [PLACEHOLDER] * length for start, length, _ in shown)
    assert bytes(tokens[place] for place in written if tokens[place] < 256) == b"noise\nmore\n"
    assert "lost.jsonl:1: the image 'no.png' cannot be read" in lost
    assert "text.jsonl:1" in text
    assert status == 0, said
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "models" / "out" / "processor_config.json").exists()
