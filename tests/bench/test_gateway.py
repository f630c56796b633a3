"""The benchmark of the gateway in its short form: what it counts, not how fast."""

from __future__ import annotations

import argparse

from tests.bench import gateway


def test_every_call_is_recorded_and_figures_stand_beside_the_direct_calls() -> None:
    parser = argparse.ArgumentParser()
    gateway.add_arguments(parser)
    words = ["--shapes", "instant", "--rounds", "1", "--seconds", "0.5", "--clients", "4"]
    arguments = parser.parse_args(words)
    arguments.peers = False
    figures = {figure.name: figure for figure in gateway.run(arguments, lambda _: None)}
    rate = next(f for name, f in figures.items() if name.startswith("completions, "))
    assert rate.value > 0
    assert [peer.name for peer in rate.peers] == ["direct"]
    (recorded,) = (f for name, f in figures.items() if name.startswith("recorded ids"))
    assert recorded.value == 1.0
    assert recorded.n > 0
