"""Losses, importance weights and columns from papers: by hand, and in a training with real, tiny models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # each waits for torch

LOSSES = r'''
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from megaflow_hpc.config.sections import Method
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training.trainer.columns import ColumnSequence, FrozenModels, UnusableRollout, _call
from megaflow_hpc.training.trainer.model import ProcessGroup
from megaflow_hpc.config.training import CLIPS, TrainingConfig
from megaflow_hpc.training.trainer import recipes
from megaflow_hpc.training.trainer.losses import Loss, Tokens, policy_loss
from megaflow_hpc.training.trainer.probe import check
from tests.support.trainer_scripts import refusal

totals = SimpleNamespace(tokens=3, sequences=2, samples=2)


def run(function, importance="none", columns={}, clip=(0.2, 0.2), length=None, engine=-1.0):
    """The loss and its gradient of two sequences: 3 tokens with 2 to train on, and 2 with 1."""
    new = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
    tensor = lambda *values: torch.tensor(values, dtype=torch.float64)
    batch = Tokens(
        offsets=torch.tensor([0, 3, 5]), mask=torch.tensor([0, 1, 1, 0, 1]).bool(),
        proximal=tensor(0, -1.1, -1.9, 0, -0.6), engine=tensor(float("nan"), engine, -2.5, 0, -0.7),
        advantages=tensor(0, 1, 1, 0, -0.5), weights=torch.ones(5, dtype=torch.float64),
        rollout_tokens=torch.tensor([2, 1]), columns={name: tensor(*values) for name, values in columns.items()},
    )
    loss = Loss(function, clip, importance=importance, length=length)
    share, _ = policy_loss(loss, new, new.detach().abs(), batch, totals)
    share.backward()
    return [float(share.detach()), new.grad.tolist()]


def refused(**fields):
    return refusal(lambda: run(own(**fields), columns=frozen), Exception)


def weights(importance):
    """The importance weights, read from the gradient of a loss that they multiply."""
    own = lambda new, entropies, batch, totals: ((new * batch.importance).sum(), {})
    return [run(own, importance)[1][index] for index in (1, 2, 4)]


frozen = {"reference": (0, -1.2, -2.0, 0, -0.1)}
own = lambda **fields: lambda *values: recipes.kl_to_reference(*values, **fields)
found = {
    "kl": run(own(beta=0.5), columns=frozen),
    "kl_0": run(own(beta=0.0), columns=frozen),
    "decoupled": run(lambda *v: recipes.decoupled(*v, column="reference"), columns=frozen),
    "exact_old": run(lambda *v: recipes.exact_old(*v, column="reference"), columns=frozen),
    "distill": run(lambda *v: recipes.distill(*v, column="reference"), columns=frozen),
    "likelihood": run(recipes.likelihood),
    "dpo": run(recipes.dpo, columns={"pairs": (0, 0.7, 0.7, 0, 0.7)}),
    "kinds": {
        kind: [run(own(beta=0.0, kind=kind, **length), columns=frozen), run(kind, clip=CLIPS[kind], **length)]
        for kind in ("ppo", "grpo", "dr_grpo", "gspo", "dapo", "cispo", "rloo")
        for length in [{"length": 7} if kind == "dr_grpo" else {}]
    },
    "one clip": [run(own(beta=0.0, clip=0.1), columns=frozen), run("dapo", clip=(0.1, 0.1))],
    "refused": [refused(kind="m2po"), refused(importance="sequence"), refused(entropy=0.1), refused(kind="dr_grpo")],
    "infinite": run("dapo", lambda batch: (batch.proximal - batch.engine).exp(), engine=float("-inf"))[0],
    "icepop": weights(lambda batch: recipes.icepop(batch, high=1.2)),
    "truncated": [weights(partial(recipes.truncated, most=1.2, level=level)) for level in ("token", "sequence")],
    "geometric": weights(lambda batch: recipes.geometric(batch, 1.3)),
}
models = FrozenModels(
    SimpleNamespace(run=RunDir(Path("none")), policy="p"), SimpleNamespace(source=Path("base")), ProcessGroup(),
    SimpleNamespace(plan=SimpleNamespace(version=9)), {0: {0}, 7: {2, 1}},
)
found["removed"] = []
for version in (0, 7, 8):
    try:
        found["removed"].append(str(models.folder(version)))
    except UnusableRollout as error:
        found["removed"].append([error.rollouts, str(error)])
    except ConfigError as error:
        found["removed"].append(str(error))
one = np.ones(3, np.float32)
sequence = ColumnSequence(0, 0, 0, np.ones(3, np.int32), np.ones(3, np.uint8), one, np.zeros(3, np.int32), one)
attached = Method(name="tests.training.trainer.own_losses:attached")
found["attached"] = refusal(lambda: _call(attached, [sequence], models))
where = "megaflow_hpc.training.trainer.recipes"
for name, column in {"sapo": "", "kl_to_reference": "reference", "decoupled": "average", "exact_old": "old",
                     "distill": "teacher", "likelihood": "", "dpo": "pairs"}.items():
    args = {"url": "http://h", "model": "m"} if column == "teacher" else {}
    columns = {column: {"name": f"{where}:{column}", "args": args}} if column else {}
    for importance in ("token", f"{where}:icepop", f"{where}:geometric"):
        policy = {"loss": {"kind": f"{where}:{name}"}, "columns": columns, "importance": importance}
        check(TrainingConfig.model_validate({"policies": {"default": policy}}))
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(LOSSES, tmp_path_factory.mktemp("losses"))
    return result


NEW, PROXIMAL, ENGINE = (-1.0, -2.0, -0.5), (-1.1, -1.9, -0.6), (-1.0, -2.5, -0.7)
REFERENCE, ADVANTAGES = (-1.2, -2.0, -0.1), (1.0, 1.0, -0.5)
"""Of the three tokens to train on."""


def dapo(new: float, before: float, advantage: float) -> float:
    ratio = math.exp(new - before)
    return -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)


def test_kl_to_a_reference(found: dict[str, Any]) -> None:
    base = sum(map(dapo, NEW, PROXIMAL, ADVANTAGES)) / 3
    kl = sum(math.exp(r - n) - (r - n) - 1 for n, r in zip(NEW, REFERENCE, strict=True)) / 3
    assert found["kl_0"][0] == pytest.approx(base)
    assert found["kl"][0] == pytest.approx(base + 0.5 * kl)
    # the gradient of k3 by log p is 1 - exp(r - n)
    slopes = [0.5 * (1 - math.exp(r - n)) / 3 for n, r in zip(NEW, REFERENCE, strict=True)]
    differences = np.array(found["kl"][1]) - np.array(found["kl_0"][1])
    assert differences[[1, 2, 4]] == pytest.approx(slopes)


def test_a_kind_within_another_loss_is_the_built_in_one(found: dict[str, Any]) -> None:
    for kind, (within, built_in) in {**found["kinds"], "one clip": found["one clip"]}.items():
        assert within[0] == pytest.approx(built_in[0], abs=1e-12), kind
        assert within[1] == pytest.approx(built_in[1], abs=1e-12), kind
    whole_minibatch, importance, entropy, length = found["refused"]
    assert "kind: m2po: bounds the ratios of a whole minibatch" in whole_minibatch
    assert "importance: expected kind, clip or length" in importance
    assert "entropy: expected kind, clip or length" in entropy
    assert "dr_grpo needs length" in length


def test_ratios_to_an_average_and_weights_of_it(found: dict[str, Any]) -> None:
    weights = [min(math.exp(r - e), 2.0) for r, e in zip(REFERENCE, ENGINE, strict=True)]
    values = [w * dapo(n, r, a) for w, n, r, a in zip(weights, NEW, REFERENCE, ADVANTAGES, strict=True)]
    assert found["decoupled"][0] == pytest.approx(sum(values) / 3)


def test_weights_of_the_age_alone(found: dict[str, Any]) -> None:
    weights = [min(math.exp(p - r), 2.0) for p, r in zip(PROXIMAL, REFERENCE, strict=True)]
    values = [w * dapo(n, p, a) for w, n, p, a in zip(weights, NEW, PROXIMAL, ADVANTAGES, strict=True)]
    assert found["exact_old"][0] == pytest.approx(sum(values) / 3)


def test_distillation(found: dict[str, Any]) -> None:
    values = [math.exp(n - p) * (r - p) for n, p, r in zip(NEW, PROXIMAL, REFERENCE, strict=True)]
    assert found["distill"][0] == pytest.approx(-sum(values) / 3)


def test_likelihood_of_what_passed(found: dict[str, Any]) -> None:
    assert found["likelihood"] == [
        pytest.approx((1.0 + 2.0 - 0.25) / 3),
        [0, -1 / 3, -1 / 3, 0, pytest.approx(0.5 / 3)],
    ]


def test_dpo(found: dict[str, Any]) -> None:
    slope = 0.1 / (1 + math.exp(0.1 * 0.7)) / 2
    assert np.array(found["dpo"][1])[[1, 2, 4]] == pytest.approx([-slope, -slope, slope / 2])


def test_weights_of_an_infinite_log_probability_are_no_mistake_of_the_function(found: dict[str, Any]) -> None:
    assert not math.isfinite(found["infinite"])


def test_a_version_that_is_removed_costs_the_rollouts_that_it_sampled(found: dict[str, Any]) -> None:
    base, (rollouts, cause), unknown = found["removed"]
    assert (base, rollouts) == ("base", [1, 2])
    assert "version 7 of p is no longer stored (there are none)" in cause
    assert "version 8 of p is no longer stored" in unknown


def test_a_column_that_numpy_cannot_read_is_refused_by_name(found: dict[str, Any]) -> None:
    assert "own_losses:attached: the column of sequence 0 of rollout 0 is Tensor" in found["attached"]


def test_icepop_masks_and_geometric_importance(found: dict[str, Any]) -> None:
    # proximal - engine: -0.1, 0.6, 0.1
    assert found["icepop"] == pytest.approx([math.exp(-0.1), 0.0, math.exp(0.1)])
    assert found["truncated"] == [
        pytest.approx([math.exp(-0.1), 1.2, math.exp(0.1)]),
        pytest.approx([1.2, 1.2, math.exp(0.1)]),
    ]
    assert found["geometric"] == pytest.approx([math.exp(0.25)] * 2 + [math.exp(0.1)])


COLUMNS = r'''
import json, shutil, sys
from pathlib import Path
import numpy as np
import torch
from launchers.tiny_model import make
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import versions
from megaflow_hpc.training.dataflow import Dataflow, Step
from megaflow_hpc.training.plan import Commit, StepPlan
from megaflow_hpc.training.trainer.columns import sequences_of
from megaflow_hpc.training.trainer.model import join, load
from tests.support.trainer_scripts import Engine, train
from tests.support.training import meanwhile, training_run

WHERE = "megaflow_hpc.training.trainer.recipes"
TRAINING = {
    "policies": {"default": {
        "dtype": "float32", "microbatch": 64, "optimizer": {"lr": 1e-3},
        "columns": {name: f"{WHERE}:{name}" for name in ("reference", "average", "old", "pairs")},
        "advantage": {"kind": "megaflow_hpc.training.recipes:pairs"},
        "loss": {"kind": f"{WHERE}:kl_to_reference"},
    }},
    "batch": 2, "staleness": 0, "steps": 4, "checkpoint_every": 1,
}


def judged(model, flow, plan):
    """The log-probabilities of a step's tokens under a model, sequence after sequence."""
    parts = []
    for s in sequences_of(flow, Step(flow, plan)):
        tokens, where = torch.from_numpy(s.tokens.astype(np.int64)), torch.from_numpy(s.mask.nonzero()[0])
        with torch.no_grad():
            parts.append(model(tokens, torch.arange(len(tokens)), [0, len(tokens)], where)[0].numpy())
    return np.concatenate(parts)


ranks = join()
run = RunDir(Path("run"))
if ranks.first and not run.path.exists():
    make(Path("tiny"), layers=1)
    training_run(run.path, TRAINING, tasks=2, samples=4, model=str(Path("tiny").absolute()))
ranks.barrier()
if sys.argv[1] == "train":
    pods = Engine(run)
    with meanwhile(pods.work):
        metrics, _ = train(run, ranks)
    flow = Dataflow(run)
    kept = {v.ordinal: v.path for v in versions(run, "default")}
    plan = flow.files.read(StepPlan, 3)
    columns = {name: np.concatenate([s for r in rows for s in r]) for name, rows in flow.files.columns(plan).items()}
    engine = np.concatenate([s.logprobs for s in sequences_of(flow, Step(flow, plan))])
    sampled = np.concatenate([s.mask for s in sequences_of(flow, Step(flow, plan))]) == 1
    apart = lambda name, values: float(np.abs(columns[name] - values)[sampled].max())
    new, base = judged(load(kept[2], "float32"), flow, plan), judged(load("tiny", "float32"), flow, plan)
    mean, states = load("tiny", "float32"), [pods.models[number].state_dict() for number in (0, 1, 2)]
    mean.load_state_dict({n: 0.81 * states[0][n] + 0.09 * states[1][n] + 0.1 * states[2][n] for n in states[0]})
    ours, sums = list(sequences_of(flow, Step(flow, plan))), {}
    for s, part in zip(ours, np.split(new - base, np.cumsum([len(s.tokens) for s in ours])[:-1])):
        sums[s.group] = sums.get(s.group, 0.0) + float((part * s.advantages).sum())
    pairs = np.concatenate([np.full(len(s.tokens), sums[s.group]) for s in ours])
    commit = flow.files.read(Commit, 3)
    print(json.dumps({
        "kl": [m["loss/reference_kl"] for m in metrics],
        "moved": float(np.abs(new - base)[sampled].max()),
        "old": [apart("old", engine), apart("old", new)],
        "reference": apart("reference", base),
        "average": apart("average", judged(mean, flow, plan)),
        "pairs": apart("pairs", pairs),
        "digest": commit.columns == flow.files.columns_digest(3),
        "kept": sorted(kept),
        "files": sorted(path.name for path in (flow.files.path / "columns").iterdir()),
        "averages": len(list((flow.files.path / "averages").iterdir())),
    }))
else:  # repeat the steps after checkpoint 2
    copy = RunDir(Path(sys.argv[1]))
    if ranks.first:
        shutil.copytree(run.path, copy.path)
        files = copy.path / "training/default"
        for step in (3, 4):
            (files / f"commits/{step:06d}.json").unlink()
            shutil.rmtree(files / f"checkpoints/{step}")
        if sys.argv[1] == "recomputed":
            shutil.rmtree(files / "columns")
        else:  # whatever is not stored with the columns
            shutil.rmtree(files / "averages")
    ranks.barrier()
    try:
        metrics, _ = train(copy, ranks)
        result = [m["loss/reference_kl"] for m in metrics]
    except ConfigError as error:
        result = str(error)
    if ranks.first:
        print(json.dumps(result))
    ranks.leave()
'''


def test_columns_of_earlier_weights_are_computed_once_and_read_again(tmp_path: Path) -> None:
    """The columns of step 3 equal log-probabilities of the base, of version 2, and of a mean computed here."""
    first = run_ranks(COLUMNS, tmp_path, "train")
    assert first["kl"][0] == pytest.approx(0.0, abs=1e-6)
    assert first["kl"][3] > 1e-6
    assert first["moved"] > 1e-3
    for name in ("reference", "average"):
        assert first[name] < 2e-5, name
    assert max(first["old"]) < 2e-5
    assert first["pairs"] < 1e-3
    assert first["digest"]
    assert first["averages"] <= 3
    assert first["files"] == ["000003.npz", "000004.npz"]  # earlier steps are not repeated
    for case in ("stored", "recomputed"):
        assert run_ranks(COLUMNS, tmp_path, case, ranks=2) == pytest.approx(first["kl"][2:], rel=1e-3), case


SERVED = r'''
import json, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from transformers import AutoTokenizer
from launchers.tiny_model import make
from megaflow_hpc.training.trainer import recipes
from megaflow_hpc.training.trainer.columns import ColumnSequence
from tests.support.trainer_scripts import refusal

make(Path("tiny"), layers=1)
tokenizer = AutoTokenizer.from_pretrained("tiny", local_files_only=True, trust_remote_code=False)
shift = 0


class Teacher(BaseHTTPRequestHandler):
    """Answers as vLLM's server does."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/detokenize":
            answer = {"prompt": tokenizer.decode([token + shift for token in body["tokens"]])}
        else:
            assert (body["model"], body["max_tokens"]) == ("large", 1)
            rows = [None, *({str(t): {"logprob": -t / 10, "rank": 1}} for t in body["prompt"][1:])]
            answer = {"choices": [{"prompt_logprobs": rows}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Teacher)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
tokens = np.array([70, 71, 72], np.int32)
zeros = np.zeros(3, np.float32)
sequence = ColumnSequence(0, 0, 0, tokens, np.array([0, 1, 1], np.uint8), zeros, np.zeros(3, np.int32), zeros)
models = SimpleNamespace(base="tiny")
found = [recipes.teacher([sequence], models, url, "large")[0].tolist(), recipes.teacher([], models, url, "large")]
shift = 1
for address in (url, "http://127.0.0.1:1"):
    found.append(refusal(lambda: recipes.teacher([sequence], models, address, "large")))
print(json.dumps(found))
'''


def test_a_teacher_gives_its_log_probabilities_unless_it_has_another_tokenizer(tmp_path: Path) -> None:
    column, nothing, other, gone = run_ranks(SERVED, tmp_path)
    assert column == pytest.approx([0.0, -7.1, -7.2])
    assert nothing == []
    assert "large has another tokenizer than tiny; choose another teacher" in other
    assert "/detokenize: <urlopen error" in gone
    assert "start it, and resume the training" in gone
