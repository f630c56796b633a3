"""Training on demonstrations before any rollout exists: the command, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT
from tests.support.samples import image
from tests.support.torch_ranks import engine_python, run_ranks
from tests.support.vision import PLACEHOLDER

pytestmark = pytest.mark.slow  # each waits for torch

MAKE = """
import json
from pathlib import Path
from launchers.tiny_model import make
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer.warm_start import examples

FORGETFUL = %r
make(Path("tiny"), layers=1)
found = examples(Path("tiny"), Path("demonstrations.jsonl"))
template = Path("tiny", "chat_template.jinja")
original = template.read_text()
template.write_text(FORGETFUL)
apart = examples(Path("tiny"), Path("demonstrations.jsonl"))[:2]
template.write_text(original)
errors = []
for name in ("empty", "bad"):
    try:
        examples(Path("tiny"), Path(f"{name}.jsonl"))
    except ConfigError as error:
        errors.append(str(error))
print(json.dumps([found, apart, errors]))
"""
FORGETFUL = """{% for message in messages %}\
{% if message.role == 'user' or loop.last %}{{ message.role }}: {{ message.content }};{% endif %}\
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
"""A chat template that leaves earlier answers out."""


def warm_start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [engine_python(), "-m", "megaflow_hpc.training.trainer.warm_start", "tiny", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)


def test_a_model_learns_demonstrations(tmp_path: Path) -> None:
    turns = [("user", "add 1 2"), ("assistant", "3"), ("user", "add 2 2"), ("assistant", "4")]
    line = json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
    (tmp_path / "demonstrations.jsonl").write_text(f"{line}\n" * 4)
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    found, apart, (empty, bad) = run_ranks(MAKE % FORGETFUL, tmp_path)
    assert found == [found[0]] * 4, "an example for each conversation"
    tokens, written, shown = found[0]
    assert bytes(tokens[place] for place in written if tokens[place] < 256) == b"3\n4\n", "the assistant's alone"
    assert shown == []
    assert len(apart) == 2, "the second answer's prompt does not contain the first"
    assert "empty.jsonl: has no message of an assistant" in empty
    assert "bad.jsonl:1: KeyError('messages'); expected" in bad
    done = warm_start(
        tmp_path, "demonstrations.jsonl", "models/out", "--epochs=8", "--batch=4", "--lr=3e-3", "--dtype=float32",
        "--microbatch=100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 2
    names = {path.name for path in (tmp_path / "models" / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert [path.name for path in tmp_path.glob("models/.out*")] == []
    assert "out: exists already" in warm_start(tmp_path, "demonstrations.jsonl", "models/out").stderr
    misplaced = warm_start(tmp_path, "demonstrations.jsonl", "demonstrations.jsonl/out")
    assert misplaced.returncode == 2
    assert "demonstrations.jsonl: " in misplaced.stderr
    assert "choose another place for OUT" in misplaced.stderr
    spoiled = warm_start(tmp_path, "demonstrations.jsonl", "spoiled", "--epochs=4", "--lr=1e30", "--dtype=float32")
    assert spoiled.returncode == 2
    assert "the gradient is not finite; use a lower --lr; nothing was written" in spoiled.stderr
    assert not (tmp_path / "spoiled").exists()


SEEING = """
import json
from pathlib import Path
from launchers.tiny_model import make
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer.warm_start import examples

make(Path("tiny"), layers=1, vision=True)
(tokens, written, shown), = examples(Path("tiny"), Path("demonstrations.jsonl"))
errors = []
for name in ("lost", "text"):
    try:
        examples(Path("tiny"), Path(f"{name}.jsonl"))
    except ConfigError as error:
        errors.append(str(error))
print(json.dumps([tokens, written, [list(span) for span, _ in shown], errors]))
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
    tokens, written, shown, (lost, text) = run_ranks(SEEING, tmp_path)
    assert [(length, sha256) for _, length, sha256 in shown] == [(2, first.sha256), (1, second.sha256)]
    assert all(tokens[start : start + length] == [PLACEHOLDER] * length for start, length, _ in shown)
    assert bytes(tokens[place] for place in written if tokens[place] < 256) == b"noise\nmore\n"
    assert "lost.jsonl:1: the image 'no.png' cannot be read" in lost
    assert "text.jsonl:1" in text
    with (tmp_path / "demonstrations.jsonl").open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    done = warm_start(
        tmp_path, "demonstrations.jsonl", "models/out", "--epochs=8", "--batch=2", "--lr=3e-3", "--dtype=float32"
    )
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "models" / "out" / "processor_config.json").exists()
