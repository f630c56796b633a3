"""What a campaign may take at once: its quotas, the site's caps over them, and how they are shared out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.config.quotas import Caps, QuotasConfig, check_scale, settle, site_caps
from megaflow_hpc.config.slurm import PodsConfig
from megaflow_hpc.errors import ConfigError

FILE = "caps: {in_flight: 64, requests_per_s: 100, pods: 4}\nusers: {alice: {in_flight: 128}}\n"


def test_a_users_own_caps_replace_the_common_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(FILE)
    monkeypatch.setattr("megaflow_hpc.config.quotas.SITE_FILE", file)
    monkeypatch.setenv("LOGNAME", "alice")
    alice, source = site_caps()
    monkeypatch.setenv("LOGNAME", "bob")
    bob, _ = site_caps()
    assert (alice.in_flight, alice.requests_per_s, bob.in_flight, source) == (128, 100, 64, str(file))


def test_no_site_file_is_no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaflow_hpc.config.quotas.SITE_FILE", Path("/nowhere/site.yaml"))
    monkeypatch.delenv("MEGAFLOW_SITE_FILE", raising=False)
    assert site_caps() == (Caps(), "")


def test_a_variable_does_not_replace_the_sites_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, mine = tmp_path / "site.yaml", tmp_path / "mine.yaml"
    own.write_text("caps: {pods: 8}")
    mine.write_text("caps: {pods: 8000}")
    monkeypatch.setattr("megaflow_hpc.config.quotas.SITE_FILE", own)
    monkeypatch.setenv("MEGAFLOW_SITE_FILE", str(mine))
    assert site_caps()[0].pods == 8


@pytest.mark.parametrize("text", ["caps: {pods: none}", "caps: [", "cap: {}"])
def test_a_broken_site_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "site.yaml").write_text(text)
    monkeypatch.setattr("megaflow_hpc.config.quotas.SITE_FILE", tmp_path / "site.yaml")
    with pytest.raises(ConfigError, match=r"site\.yaml: the site file cannot be used"):
        site_caps()


@pytest.mark.parametrize(
    ("quotas", "pods", "servers", "named"),
    [
        ({"in_flight": 65}, {}, 1, r"quotas\.in_flight: 65 is more than this site allows a campaign \(64, /s\)"),
        ({"requests_per_s": 100.5}, {}, 1, r"quotas\.requests_per_s: 100\.5"),
        ({}, {"count": 3, "pools": [{"count": 2}]}, 1, r"slurm\.pods \(of all pools\): 5"),
        ({}, {}, 3, r"servers \(of all policies\): 3"),
        ({"in_flight": 3}, {"count": 4}, 1, r"quotas\.in_flight: 3 shared out over 4 worker ranks"),
        ({"in_flight": 5}, {"count": 2, "ranks_per_node": 4}, 1, r"quotas\.in_flight: 5 shared out over 6 worker"),
    ],
)
def test_what_a_campaign_may_not_have_is_refused_by_name(
    quotas: dict[str, Any], pods: dict[str, Any], servers: int, named: str
) -> None:
    caps = Caps(in_flight=64, requests_per_s=100, pods=4, servers=2)
    with pytest.raises(ConfigError, match=named):
        settle(QuotasConfig(**quotas), PodsConfig(**pods), servers, caps, "/s")


def test_where_a_campaign_says_nothing_the_cap_holds() -> None:
    caps = Caps(in_flight=64, requests_per_s=100)
    held = settle(QuotasConfig(requests_per_s=10), PodsConfig(), 1, caps, "/s")
    assert held == QuotasConfig(requests_per_s=10, in_flight=64)


def test_a_campaign_whose_quotas_are_shared_out_cannot_get_more_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaflow_hpc.config.quotas.site_caps", lambda: (Caps(pods=6), "/s"))
    check_scale(6, PodsConfig(count=2), QuotasConfig())
    check_scale(2, PodsConfig(count=2), QuotasConfig(in_flight=8))
    with pytest.raises(ConfigError, match="shared out among 2 pods"):
        check_scale(3, PodsConfig(count=2), QuotasConfig(in_flight=8))
    with pytest.raises(ConfigError, match=r"--pods 7: more than this site"):
        check_scale(7, PodsConfig(count=2), QuotasConfig())
