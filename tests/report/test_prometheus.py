"""Prometheus' own parser reads the metrics, and their values are the figures."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from megaflow_hpc.report.figures import figures_of
from megaflow_hpc.report.files import prometheus_text
from megaflow_hpc.rundir.layout import RunDir
from tests.support.reports import ATTACK


def test_metrics_are_understood_and_are_the_figures(attacked: RunDir, better: RunDir) -> None:
    figures = [figures_of(attacked.path), figures_of(better.path), figures_of(better.trajectories.parent)]
    families = {family.name: family for family in text_string_to_metric_families(prometheus_text(figures))}
    samples = [sample for family in families.values() for sample in family.samples]
    assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) == len(samples), "no sample comes twice"
    assert all(family.documentation for family in families.values())
    for family in families.values():
        assert family.name.startswith("megaflow_")
        assert (family.type == "counter") == all(s.name.endswith("_total") for s in family.samples), family.name
    stored = families["megaflow_rollouts_stored"].samples
    values = {(s.labels["run"], s.labels["policy"], s.labels["status"]): s.value for s in stored}
    assert values["attacked", "first", "completed"] == 22
    assert values["better (2)", "first", "completed"] == values["better (3)", "first", "completed"] == 24
    assert {s.labels["campaign"] for s in stored} == {f"evil {ATTACK}", "better"}, "names come back as they were"
