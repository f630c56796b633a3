"""A real browser shows the page without a network, and no text of a campaign can act in it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.report.charts import charts_of
from megaflow_hpc.report.comparison import compare
from megaflow_hpc.report.figures import LoadedRun
from megaflow_hpc.report.files import pictures
from megaflow_hpc.report.page import page
from megaflow_hpc.report.timeline import bars_of
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import gather
from megaflow_hpc.trajectory import Image
from tests.support import samples
from tests.support.browser import visiting
from tests.support.reports import ATTACK, POLICIES


@pytest.fixture(scope="module")
def shown(attacked: RunDir, better: RunDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on both runs."""
    with LoadedRun(attacked.path) as one, LoadedRun(better.path) as other:
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
    asyncio.run(asyncio.wait_for(_look(f"file://{shown}#rollout=task3%2Ffirst%2F3", tmp_path), 120))


async def _look(address: str, scratch: Path) -> None:
    async with visiting(address, scratch) as page:
        await page.until("document.documentElement.dataset.ready")
        assert await page.evaluate("document.documentElement.dataset.ready") == "yes"
        places = "[...document.querySelectorAll('[data-chart]')]"
        assert await page.evaluate(f"{places}.length") >= 8
        drawn = f"{places}.every(e => e.dataset.drawn === document.documentElement.dataset.theme && e.children.length)"
        assert await page.evaluate(drawn)
        # The transcript of the address is open. The attack is shown as text of messages, of their roles and of calls.
        known = ATTACK
        for steering in "\x1b\x07\u202e":
            known = known.replace(steering, f"\\u{ord(steering):04x}")
        assert (await page.evaluate("document.getElementById('reader').textContent")).count(known) >= 4
        assert (
            await page.evaluate("document.querySelectorAll('img, #reader script, #list script, main script').length")
            == 0
        )
        # The list is filtered, sorted and walked through.
        rows = "[...document.querySelectorAll('#list tr[data-row]')]"
        assert await page.evaluate(f"{rows}.length") == 72
        await page.evaluate("document.getElementById('search').value = 'task2 second'")
        await page.evaluate("document.getElementById('search').dispatchEvent(new Event('input'))")
        assert await page.evaluate(f"{rows}.every(r => r.textContent.startsWith('evil')) && {rows}.length") == 4
        seconds = f"{rows}.map(r => Number(r.cells[3].textContent))"
        await page.evaluate("[...document.querySelectorAll('#list th')].find(t => t.textContent === 'seconds').click()")
        found = await page.evaluate(seconds)
        assert found == sorted(found, reverse=True)
        await page.evaluate(f"{rows}[1].click()")
        await page.until(f"{rows}[1].className === 'on'")
        await page.evaluate("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'j', bubbles: true}))")
        await page.until(f"{rows}[2].className === 'on'")
        # A task of the matrix lists its rollouts and opens one. A slow rollout is one click from its transcript.
        await page.evaluate("[...document.querySelectorAll('.matrix a')].find(a => a.textContent === 'task4').click()")
        await page.until(f"{rows}.length === 12 && {rows}.every(r => r.cells[0].title.includes('task4'))")
        slow = "[...document.querySelectorAll('#troubles + .cards td.id a')][1]"
        await page.evaluate(f"{slow}.click()")
        await page.until(f"document.querySelector('#reader h3').textContent === {slow}.textContent")
        assert "1 failed" in await page.evaluate("document.getElementById('reader').textContent"), "the verifier's log"
        # The other theme draws every chart again.
        theme = await page.evaluate("document.documentElement.dataset.theme")
        await page.evaluate("document.getElementById('theme').click()")
        await page.until(drawn)
        assert await page.evaluate("document.documentElement.dataset.theme") != theme
        assert await page.evaluate("document.title") != "OWNED"
        assert (page.console, page.dialogs) == ([], [])
        assert {asked.partition(":")[0] for asked in page.asked_for} == {"file"}
        assert len(page.asked_for) == 1, "the page itself"
        # The page's own policy refuses scripts even if they get into the markup.
        await page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
        script = "Object.assign(document.createElement('script'), {text: 'window.ran = 1'})"
        await page.evaluate(f"void document.body.append({script})")
        await page.until("document.images[0].complete")
        assert await page.evaluate("document.title") != "1"
        assert await page.evaluate("typeof window.ran") == "undefined"
        assert any("Content Security Policy" in said for said in page.console)


def shows(*urls: str, text: str = "look") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


def test_a_browser_shows_the_images_of_a_transcript_and_none_acts(tmp_path: Path) -> None:
    """Files that are no image, scripts in SVG, markup in a URL, and images at the address of a host."""
    real = [samples.image(90, 60, 1), samples.image(50, 40, 2)]
    false = [
        Image(hashlib.sha256(data).hexdigest(), media_type, 10, 10, data)
        for data, media_type in (
            (f"{ATTACK}".encode(), "image/png"),
            (b'<svg xmlns="http://www.w3.org/2000/svg" onload="document.title=\'OWNED\'"/>', "image/gif"),
            (real[0].data[:20], "image/jpeg"),
        )
    ]
    hosts = "https://files.example/a.png", f"data:image/png;base64,x{ATTACK}", f"sha256:{ATTACK}", "sha256:" + "0" * 64
    messages = [
        shows(*(f"sha256:{one.sha256}" for one in (*real, *false)), *hosts),
        shows(f"sha256:{real[0].sha256}", text="again"),
        {"role": "assistant", "content": "a click"},
    ]
    images = {one.sha256: one for one in (*real, *false)}
    run = samples.run_dir(tmp_path / "run", "run")
    samples.commit(run, "pod0", *[(0, 0, samples.trajectory(n, messages=messages, images=images)) for n in range(3)])
    gather(run)
    with LoadedRun(run.path) as loaded:
        text = page([loaded], [], [])
    for one in images.values():
        assert text.count(one.url) == 1, "once, however often it is shown"
    markup = Markup()
    markup.feed(text)
    assert not {"img", "svg"} & {tag for tag, _ in markup.elements}
    path = tmp_path / "index.html"
    path.write_text(text)
    asyncio.run(asyncio.wait_for(_look_at_images(f"file://{path}", tmp_path, [*real, *false]), 120))


async def _look_at_images(address: str, scratch: Path, images: list[Image]) -> None:
    async with visiting(address, scratch) as page:
        await page.until("document.documentElement.dataset.ready === 'yes'")
        places = "[...document.querySelectorAll('#reader img')]"
        await page.until(f"{places}.every(picture => picture.complete)")
        sizes = await page.evaluate(f"{places}.map(picture => [picture.naturalWidth, picture.naturalHeight])")
        assert sizes == [[90, 60], [50, 40], [0, 0], [0, 0], [0, 0], [90, 60]]
        labels = [one.label for one in (*images, images[0])]
        assert await page.evaluate(f"{places}.map(picture => picture.alt)") == labels
        text = await page.evaluate("document.getElementById('reader').textContent")
        assert "[image https://files.example/a.png]" in text
        assert text.count(images[0].label) == 2, "the text says where it is"
        assert await page.evaluate("document.title") == "run: report"
        assert page.dialogs == []
        assert {asked.partition(":")[0] for asked in page.asked_for} == {"file", "data"}
        assert sum(asked.startswith("file:") for asked in page.asked_for) == 1


def test_pictures_are_pngs_of_every_chart(attacked: RunDir) -> None:
    with LoadedRun(attacked.path) as loaded:
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
