"""The validator names every broken invariant, and the documentation lists the columns of the schema."""

from __future__ import annotations

import shutil

import h5py
import numpy as np
import pytest

from megaflow_hpc.trajectories import gather, validate
from megaflow_hpc.trajectories.hdf5.schema import markdown
from tests.support.places import ROOT
from tests.support.samples import commit, run_dir, trajectory


def put(path, row, value):
    def change(file):
        file[path][row] = value

    return change


def replace(path, values, **options):
    def change(file):
        del file[path]
        file.create_dataset(path, data=values, **options)

    return change


def remove(path):
    def change(file):
        del file[path]

    return change


def shorten(path):
    return lambda file: file[path].resize((len(file[path]) - 1,))


def unsampled(file):
    return int(np.flatnonzero(file["tokens/loss_mask"][:] == 0)[0])


def sampled(file):
    return int(np.flatnonzero(file["tokens/loss_mask"][:] == 1)[0])


def token(column, pick, value):
    def change(file):
        file[f"tokens/{column}"][pick(file)] = value

    return change


BROKEN = {
    "/tokens/logprob: is missing": remove("tokens/logprob"),
    "root attribute campaign is missing": lambda file: file.attrs.__delitem__("campaign"),
    "/tokens/id: type int64, expected int32": replace("tokens/id", np.zeros(3, np.int64)),
    "/trajectories/node: type int32, expected UTF-8": replace("trajectories/node", np.zeros(8, np.int32)),
    "/tokens/id: is not a one-dimensional": replace("tokens/id", np.zeros((2, 2), np.int32)),
    "/trajectories/agent: 7 entries, expected 8": shorten("trajectories/agent"),
    "/trajectories/turn_offset: 8 entries, expected 9": shorten("trajectories/turn_offset"),
    "/sequences/token_offset: decreases": put("sequences/token_offset", 1, 10**6),
    "/trajectories/message_offset: runs from [1]": put("trajectories/message_offset", 0, 1),
    "/trajectories/id: row 1: 'task/default/0' occurs twice": put("trajectories/id", 1, "task/default/0"),
    "/trajectories/status: row 2: 'done'": put("trajectories/status", 2, "done"),
    "/trajectories/reward: row 7: 1.0 though failed": put("trajectories/reward", 7, 1.0),
    "/trajectories/turns: row 0: 9": put("trajectories/turns", 0, 9),
    "/rewards/tests: float64": replace("rewards/tests", np.zeros(8)),
    "/sequences/trajectory: row 0": put("sequences/trajectory", 0, 5),
    "/turns/sequence: row 0: 99": put("turns/sequence", 0, 99),
    "/turns/sequence: row 0: a sequence of another": put("turns/sequence", 0, 1),
    "/turns: row 0: tokens": put("turns/token_end", 0, 10**6),
    "/messages/parent: row 2: 0, expected -1 to -1": put("messages/parent", 2, 0),
    "/messages/parent: row 3: 1, expected -1 to 0": put("messages/parent", 3, 1),
    "/turns/message: row 0: 2, expected -1 to 1": put("turns/message", 0, 2),
    "/turns/message: row 3: 1, the answer of an earlier call": put("turns/message", 3, 1),
    "/turns/started_by: row 2: 1, expected -1 to 0": put("turns/started_by", 2, 1),
    "/tokens/id: row 3: negative": put("tokens/id", 3, -1),
    "/tokens/loss_mask: row": token("loss_mask", unsampled, 2),
    "negative with a log-probability": token("logprob", unsampled, -1.0),
    "1 without a log-probability": token("logprob", sampled, np.nan),
    "/tokens/weight_version: row": token("weight_version", sampled, -1),
    "not -1 without a log-probability": token("weight_version", unsampled, 4),
    "/messages: message 0: not JSON": put("messages/json", 0, ord("x")),
    "/sequences/expert_offset: row 1: ": put("sequences/expert_layers", 1, 4),
    "/artifacts/trajectory: row 0: 99": put("artifacts/trajectory", 0, 99),
    "/artifacts/trajectory: decreases at row 1": put("artifacts/trajectory", 0, 7),
    "/images/bytes: image 0: not what": put("images/bytes", 24, 77),
    "/images/sha256: an image occurs twice": lambda file: put("images/sha256", 1, file["images/sha256"][0])(file),
    "/images/width: image 0: no pixels": put("images/width", 0, 0),
    "/image_uses/image: row 0: 99": put("image_uses/image", 0, 99),
    "/image_spans: row 1: tokens": put("image_spans/start", 1, 10**6),
    "/image_spans: row 0: tokens": put("image_spans/length", 0, 10**6),
    "/image_spans/image: row 0: 4, not an image of": put("image_spans/image", 0, 4),
}


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    run = run_dir(tmp_path_factory.mktemp("validate") / "run")
    last = trajectory(7, status="failed")
    commit(run, "a", *((0, 0, trajectory(n)) for n in range(7)), (0, 0, last))
    return gather(run)


@pytest.fixture
def path(gathered, tmp_path):
    return shutil.copy(gathered, tmp_path)


def test_a_gathered_file_is_valid(path):
    assert validate(path) == []


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_invariant_is_named(path, message):
    with h5py.File(path, "r+") as file:
        BROKEN[message](file)
    problems = validate(path)
    assert any(message in problem for problem in problems), problems


def test_the_documentation_lists_the_columns_as_written():
    page = ROOT / "docs" / "reference" / "trajectory-format.md"
    assert markdown() in page.read_text()
