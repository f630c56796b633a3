"""The page is one file that a real browser shows without a network, and what campaigns hold cannot act in it."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megaflow_hpc.report.charts.every import charts_of
from megaflow_hpc.report.charts.pictures import pictures
from megaflow_hpc.report.comparison import compare
from megaflow_hpc.report.figures import Loaded
from megaflow_hpc.report.page import page
from megaflow_hpc.report.timeline import bars_of
from megaflow_hpc.rundir.layout import RunDir
from tests.support.browser import visit
from tests.support.reports import ATTACK, POLICIES


@pytest.fixture(scope="module")
def shown(attacked: RunDir, better: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on both runs."""
    with Loaded(attacked.path) as one, Loaded(better.path) as other:
        runs = [one, other]
        differences = compare([run.figures for run in runs])
        bars = [bars_of(run.rollouts, run.events, run.threshold) for run in runs]
        charts = charts_of([run.figures for run in runs], bars, differences)
        path = tmp_path_factory.mktemp("page") / "index.html"
        path.write_text(page(runs, charts, differences))
    return path


class Markup(HTMLParser):
    """Elements that are in a page, their attributes, and its text outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._script else data


def test_nothing_in_the_file_points_elsewhere_and_no_text_is_markup(shown: Path) -> None:
    text = shown.read_text()
    assert len(text) < 1_500_000
    markup = Markup()
    markup.feed(text)
    names = {tag for tag, _ in markup.elements}
    assert not names & {"img", "svg", "iframe", "object", "embed", "link", "form", "base"}
    for tag, attributes in markup.elements:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert not {"src", "srcset", "action", "data"} & attributes.keys(), (tag, attributes)
        assert attributes.get("href", "#").startswith("#"), (tag, attributes)
    scripts = [attributes for tag, attributes in markup.elements if tag == "script"]
    assert sum(attributes.get("type") is None for attributes in scripts) == 2, "the library and the page's own"
    policy = next(a["content"] for t, a in markup.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy.partition("style-src")[0]
    assert "document.title='OWNED'" in markup.text, "it is shown, as text"
    assert "\x1b" not in text, "what steers is shown as an escape"
    assert "\u202e" not in text
    assert "{{ 7*7 }}" in markup.text


def test_a_browser_shows_it_without_a_network_and_runs_nothing_of_the_campaigns(shown: Path, tmp_path: Path) -> None:
    found = visit(shown, "rollout=0%3Atask3%2Ffirst%2F3", tmp_path)
    assert 'data-ready="yes"' in found.dom
    assert found.console == []
    assert found.asked_for == []
    other = tmp_path / "other.html"
    other.write_text("<img src='http://127.0.0.1:9/picture.png'><script>console.log('heard')</script>")
    control = visit(other, "", tmp_path)
    assert control.asked_for, "what a page asks for is seen"
    assert len(control.console) >= 1
    charts = re.findall(r'data-chart="(\d+)"[^>]*', found.dom)
    assert len(charts) >= 8
    assert found.dom.count('data-drawn="light"') == len(charts), "every chart is drawn"
    title = re.search(r"<title>(.*?)</title>", found.dom, re.S)
    assert title is not None
    assert title[1].startswith("evil ")
    assert title[1] != "OWNED"
    reader = found.dom[found.dom.index('id="reader"') :]
    reader = reader[: reader.index("</main>")]
    known = html.escape(
        ATTACK.replace("\x1b", "\\u001b").replace("\x07", "\\u0007").replace("\u202e", "\\u202e"), False
    )
    assert reader.count(known) >= 4, "the messages, the names and arguments of its calls"
    assert f"48 of {48 + 24} " not in found.dom
    assert "72 of 72 rollouts" in found.dom


def test_pictures_are_pngs_of_every_chart(attacked: RunDir) -> None:
    with Loaded(attacked.path) as loaded:
        bars = bars_of(loaded.rollouts, loaded.events, loaded.threshold)
        charts = charts_of([loaded.figures], [bars], [])
        files = dict(pictures(charts))
    assert {
        "pass-at-k.png",
        "timeline.png",
        "concurrency.png",
        "phases.png",
        "rewards.png",
        "tokens.png",
    } <= files.keys()
    assert len(files) == len(charts)
    for data in files.values():
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(data) > 5000
    assert {policy for chart in charts for policy in POLICIES if policy in json.dumps(chart.spec)} == set(POLICIES)
