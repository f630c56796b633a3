"""What a campaign may take at once: its quotas, the site's caps over them, and how they are shared out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.config.quotas import Caps, QuotasConfig, check_scale, gateways, settle, site_caps, slots_of_rank
from megaflow_hpc.config.slurm import PodsConfig
from megaflow_hpc.errors import ConfigError

FILE = "caps: {slots: 64, requests_per_s: 100, pods: 4}\nusers: {alice: {slots: 128}}\n"


def test_a_users_own_caps_stand_in_the_place_of_the_common_ones(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(FILE)
    alice, source = site_caps("alice", file)
    bob, _ = site_caps("bob", file)
    assert (alice.slots, alice.requests_per_s, bob.slots, source) == (128, 100, 64, str(file))


def test_no_site_file_is_no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaflow_hpc.config.quotas.SITE_FILE", Path("/nowhere/site.yaml"))
    monkeypatch.delenv("MEGAFLOW_SITE_FILE", raising=False)
    assert site_caps() == (Caps(), "")


def test_a_variable_does_not_replace_the_sites_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, mine = tmp_path / "site.yaml", tmp_path / "mine.yaml"
    own.write_text("caps: {slots: 8}")
    mine.write_text("caps: {slots: 8000}")
    monkeypatch.setattr("megaflow_hpc.config.quotas.SITE_FILE", own)
    monkeypatch.setenv("MEGAFLOW_SITE_FILE", str(mine))
    assert site_caps()[0].slots == 8


@pytest.mark.parametrize("text", ["caps: {slots: none}", "caps: [", "cap: {}"])
def test_a_broken_site_file_is_an_error_and_not_no_cap(tmp_path: Path, text: str) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"site\.yaml: the site file cannot be used"):
        site_caps("bob", tmp_path / "site.yaml")


@pytest.mark.parametrize(
    ("quotas", "pods", "servers", "named"),
    [
        ({"slots": 65}, {}, 1, r"quotas\.slots: 65 is more than this site lets a campaign take \(64, /s\)"),
        ({"requests_per_s": 100.5}, {}, 1, r"quotas\.requests_per_s: 100\.5"),
        ({}, {"count": 3, "pools": [{"count": 2}]}, 1, r"slurm\.pods \(of all pools\): 5"),
        ({}, {}, 3, r"servers \(of all policies\): 3"),
        ({"in_flight": 3}, {"count": 4}, 1, r"quotas\.in_flight: 3 shared out over 4 worker ranks"),
        ({"slots": 5}, {"count": 2, "ranks_per_node": 4}, 1, r"quotas\.slots: 5 shared out over 6 worker ranks"),
    ],
)
def test_what_a_campaign_may_not_have_is_refused_by_name(
    quotas: dict[str, Any], pods: dict[str, Any], servers: int, named: str
) -> None:
    caps = Caps(slots=64, requests_per_s=100, pods=4, servers=2)
    with pytest.raises(ConfigError, match=named):
        settle(QuotasConfig(**quotas), PodsConfig(**pods), servers, caps, "/s")


def test_where_a_campaign_says_nothing_the_cap_holds() -> None:
    caps = Caps(slots=64, requests_per_s=100)
    held = settle(QuotasConfig(requests_per_s=10), PodsConfig(), 1, caps, "/s")
    assert held == QuotasConfig(requests_per_s=10, slots=64)


def test_a_campaign_whose_quotas_are_shared_out_cannot_get_more_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaflow_hpc.config.quotas.site_caps", lambda: (Caps(pods=6), "/s"))
    check_scale(6, PodsConfig(count=2), QuotasConfig())
    check_scale(2, PodsConfig(count=2), QuotasConfig(slots=8))
    with pytest.raises(ConfigError, match="shared out among 2 pods"):
        check_scale(3, PodsConfig(count=2), QuotasConfig(slots=8))
    with pytest.raises(ConfigError, match=r"--pods 7: more than this site"):
        check_scale(7, PodsConfig(count=2), QuotasConfig())


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), st.integers(1, 500), st.integers(1, 64))
def test_all_ranks_together_never_run_more_than_the_slots(
    count: int, nodes: int, ranks: int, slots: int, wanted: int
) -> None:
    pods = PodsConfig(count=count, nodes=nodes, ranks_per_node=ranks)
    if slots < gateways(pods):
        with pytest.raises(ConfigError):
            settle(QuotasConfig(slots=slots), pods, 1, Caps(), "")
        return
    each = slots_of_rank(wanted, QuotasConfig(slots=slots), pods)
    assert 1 <= each <= wanted
    assert each * gateways(pods) <= slots
    assert slots_of_rank(wanted, QuotasConfig(), pods) == wanted
