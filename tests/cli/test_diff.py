"""The verb ``diff``."""

from __future__ import annotations

import json

from tests.support.samples import commit, run_dir, trajectory


def test_diff_says_where_two_rollouts_part(megaflow, tmp_path):
    run = run_dir(tmp_path / "run")
    same = [{"role": "user", "content": "mend it"}]
    one = trajectory(5, messages=[*same, {"role": "assistant", "content": "a\nb\nc"}])
    told = [*same, {"role": "assistant", "content": "a\nx \x1b[2J\nc"}, {"role": "user", "content": "go on"}]
    other = trajectory(5, id="task/default/6", sample_index=6, reward=0.0, node="node-2", messages=told)
    other.sequences[0].tokens[3] += 1
    commit(run, "a", (0, 0, one), (0, 0, other))
    result = megaflow("diff", run, "task/default/5", "task/default/6")
    assert (result.returncode, result.stderr) == (0, "")
    for words in (
        "- task/default/5",
        "+ task/default/6",
        "reward        1  →  0",
        "node          node-1  →  node-2",
        "messages      2  →  3",
        "tokens        differ from sequence 0, token 3: ",
        "the first 1 messages are the same",
        "[1] assistant",
        "  -b",
        "  +x \\x1b[2J",
        "[2] - → user",
        "  +go on",
    ):
        assert words in result.stdout
    assert "\x1b" not in result.stdout
    assert "task_id" not in result.stdout
    shown = json.loads(megaflow("diff", run, "0", "1", "--json").stdout)
    assert shown["fields"]["reward"] == [1.0, 0.0]
    assert (shown["tokens"]["sequence"], shown["tokens"]["token"]) == (0, 3)
    assert shown["tokens"]["ids"][1] == shown["tokens"]["ids"][0] + 1
    assert [entry["message"] for entry in shown["messages"]["different"]] == [1, 2]
    equal = megaflow("diff", run, "0", "0").stdout
    assert "tokens        the same" in equal
    assert "the same conversation" in equal
    assert megaflow("diff", run, "0", "nobody").returncode == 2


def test_diff_of_a_file_that_is_none_of_ours_names_it_and_the_remedy(refused, tmp_path):
    foreign = tmp_path / "notes.h5"
    foreign.write_text("no HDF5")
    assert f"{foreign}: not an HDF5 file; expected a trajectories.h5 (see: megaflow-hpc gather RUN)" in refused(
        "diff", foreign, "0", "1"
    )
