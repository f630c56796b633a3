"""The trainer detects whether tokens were sampled as the engine reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks

SCRIPT = """
import json
import torch
from megaflow_hpc.training.trainer.losses import Loss, Tokens, policy_loss, sampling

torch.manual_seed(3)
TOKENS, WORDS = 20000, 60
logits = torch.randn(TOKENS, WORDS) * 2
later = logits + torch.randn(TOKENS, WORDS) * 0.3  # of weights some steps on


class Totals:
    tokens = sequences = samples = TOKENS


def top_p(scores, share):
    chances, order = scores.softmax(-1).sort(-1, descending=True)
    out = chances.cumsum(-1) - chances > share
    return scores.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)


def z(drawn_from, reported, trainer, temperature=1.0, forged=None, mask=None):
    '''Tokens are drawn from one distribution, reported as of another, and judged by a third.'''
    tokens = torch.multinomial(drawn_from.softmax(-1), 1) if forged is None else forged
    scores = (trainer / temperature).log_softmax(-1)
    new, entropies = scores.gather(-1, tokens)[:, 0], -(scores.exp() * scores).sum(-1)
    engine = reported.log_softmax(-1).gather(-1, tokens)[:, 0]
    mask = torch.ones(TOKENS, dtype=torch.bool) if mask is None else mask
    ones, offsets = torch.ones(TOKENS), torch.tensor([0, TOKENS // 3, TOKENS])
    batch = Tokens(offsets, mask, new.detach(), engine, ones, ones, offsets.diff())
    _, sums = policy_loss(Loss("dapo"), new, entropies, batch, Totals)
    found = sampling(sums)
    return [found["sampling_z"], found["sampling_temperature"]]


half = torch.arange(TOKENS) % 2 == 0
cold_half = torch.where(half[:, None], logits / 0.3, logits)
found = {
    "honest": z(logits, logits, logits),
    "stale": z(logits, logits, later),
    "temperature 0.3": z(logits / 0.3, logits, logits),
    "temperature 0.3, stale": z(logits / 0.3, logits, later),
    "temperature 0.9": z(logits / 0.9, logits, logits),
    "temperature 1.5": z(logits / 1.5, logits, logits),
    "temperature 0.3 of a policy that has it": z(logits / 0.3, logits / 0.3, logits, temperature=0.3),
    "temperature 1 of a policy that has 0.7": z(logits, logits / 0.7, logits, temperature=0.7),
    "temperature 0.3, as the engine reports": z(logits / 0.8, logits / 0.8, logits),
    "top-p 0.95": z(top_p(logits, 0.95), logits, logits),
    "forged": z(None, logits, logits, forged=torch.randint(WORDS, (TOKENS, 1))),
    "half of it cold and masked": z(cold_half, logits, logits, mask=~half),
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = run_ranks(SCRIPT, tmp_path_factory.mktemp("sampling"))
    return result


@pytest.mark.parametrize(
    "case",
    [
        "honest",
        "stale",
        "temperature 0.3 of a policy that has it",
        "temperature 0.3, as the engine reports",
        "half of it cold and masked",
    ],
)
def test_tokens_that_were_drawn_as_reported_are_not_doubted(found: dict[str, Any], case: str) -> None:
    z, temperature = found[case]
    assert abs(z) < 5
    assert temperature == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("case", ["temperature 0.3", "temperature 0.3, stale", "temperature 0.9", "top-p 0.95"])
def test_a_lower_temperature_or_a_cut_distribution_is_seen(found: dict[str, Any], case: str) -> None:
    z, temperature = found[case]
    assert z > 6
    assert temperature < 0.97


@pytest.mark.parametrize("case", ["temperature 1.5", "forged", "temperature 1 of a policy that has 0.7"])
def test_a_higher_temperature_or_forged_text_is_seen(found: dict[str, Any], case: str) -> None:
    z, temperature = found[case]
    assert z < -6
    assert temperature > 1.03


def test_near_1_the_estimate_is_the_temperature(found: dict[str, Any]) -> None:
    assert found["temperature 0.9"][1] == pytest.approx(0.9, abs=0.03)


def test_the_model_divides_its_logits_by_the_temperature(tiny_model: Path, tmp_path: Path) -> None:
    script = """
import json, sys
import torch
from megaflow_hpc.training.trainer.model import load
policy = load(sys.argv[1], "float32")
tokens = torch.arange(1, 30) * 7 % policy.words
where = torch.arange(1, 29)
logits = policy.causal(input_ids=tokens[None], use_cache=False).logits[0].float()[:-1]
found = []
for temperature in (1.0, 0.5, 1.7):
    policy.temperature = temperature
    scores, entropies = policy(tokens, torch.arange(29), [0, 29], where)
    every = (logits / temperature).log_softmax(-1)
    own = every.gather(-1, tokens[1:, None])[:, 0]
    found.append(float((scores[where] - own).abs().max()))
    found.append(float((entropies[where] + (every.exp() * every).sum(-1)).abs().max()))
print(json.dumps(found))
"""
    assert max(run_ranks(script, tmp_path, tiny_model)) < 1e-4
