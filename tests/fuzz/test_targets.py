"""Run each target on its known inputs, its seeds, and up to a hundred hostile inputs, always the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from tests.fuzz import servers
from tests.fuzz.contract import Target
from tests.fuzz.inputs import hostile
from tests.fuzz.targets import TARGETS


def explore(target: Target, examples: int, *, derandomize: bool) -> None:
    """Feed a target. Hypothesis raises the smallest input that is a defect."""
    run = given(hostile(target))(lambda data: target.feed(data))
    for data in (*target.known(), *target.seeds()):
        run = example(data)(run)
    settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(run)()


@pytest.fixture(autouse=True)
def stopped_servers() -> Iterator[None]:
    yield
    servers.stop_all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible nested set")  # pathspec compiles what a task wrote
@pytest.mark.timeout(240)  # an input may never end
@pytest.mark.parametrize("name", TARGETS)
def test_hostile_bytes_are_refused_or_read(name: str) -> None:
    explore(TARGETS[name], TARGETS[name].examples, derandomize=True)
