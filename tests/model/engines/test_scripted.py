from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launchers.solutions import script_from_patch
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines.scripted.script import Script, load


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_answers_follow_the_task_and_the_turn(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("from a file")
    script = load(
        write(tmp_path / "s.yaml", "tasks:\n- {when: 'bug (7)', answers: [a, {file: b.txt}]}\ndefault: [none]\n")
    )
    first = [{"role": "system", "content": "x"}, {"role": "user", "content": "fix bug (7) now"}]
    later = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "?"}]
    assert script.answer(first).text == "a"
    assert script.answer(later).text == "from a file"
    assert script.answer([*later, {"role": "assistant", "content": "b"}]).text == "from a file"
    assert script.answer([{"role": "user", "content": "bug 7"}]).text == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [{answers: [a]}]", r"tasks\[0\]: needs answers and one of when"),
        ("tasks: [{pattern: '(', answers: [a]}]", r"tasks\[0\]: .*unterminated"),
        ("tasks: [{when: a, answers: [{file: none.txt}]}]", "none.txt: No such file"),
        ("tasks: [{when: a, answers: [{txt: b}]}]", "expected a string, or a mapping"),
        ("tasks: [{when: a, answers: [{tools: [{arguments: {}}]}]}]", r"tasks\[0\]: expected a call"),
        ("tasks: [{when: a, answers: [{tool: t, arguments: 3}]}]", r"tasks\[0\]: expected a call"),
        ("- a", "expected only the keys tasks and default"),
        ("a: [", "not YAML"),
    ],
)
def test_mistakes_in_a_script_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(tmp_path / "s.yaml", text))


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_a_scripted_patch_applies(tmp_path: Path, tool: str) -> None:
    (tmp_path / "m.py").write_text("a = 1\nb = 'END_OF_PATCH'\nc = 3\n")
    patch = "--- a/m.py\n+++ b/m.py\n@@ -1,3 +1,3 @@\n-a = 1\n+a = '$HOME `x`'\n b = 'END_OF_PATCH'\n c = 3\n"
    entry = script_from_patch("m is wrong", patch)
    block = entry["answers"][1].split("```mswea_bash_command\n")[1].removesuffix("\n```")
    if tool == "patch":
        block = block.replace("command -v git", "false")
    subprocess.run(["sh", "-ec", block.replace("/tmp/fix.patch", str(tmp_path / "fix"))], cwd=tmp_path, check=True)
    assert (tmp_path / "m.py").read_text().startswith("a = '$HOME `x`'\n")


def test_an_empty_script_answers(tmp_path: Path) -> None:
    assert load(write(tmp_path / "s.yaml", "{}")).default == Script().default


def test_a_tool_is_called_only_where_it_is_offered(tmp_path: Path) -> None:
    text = "tasks: [{when: bug, answers: [{text: I look., tool: ls, arguments: {path: /}}, done]}]"
    script = load(write(tmp_path / "s.yaml", text))
    first = [{"role": "user", "content": "a bug"}]
    answer = script.answer(first, ["ls", "edit"])
    assert (answer.text, [(call.name, call.arguments) for call in answer.calls]) == ("I look.", [("ls", {"path": "/"})])
    assert script.answer(first, ["edit"]) == Script().default[0]
