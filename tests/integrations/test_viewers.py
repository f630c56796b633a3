"""Exports and trackers' files in the viewers for which they are made, each opened in a browser."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import exports, gather, open_trajectories
from tests.support.browser import visiting
from tests.support.samples import commit, run_dir, trajectory
from tests.support.viewers_environment import environment
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the environments may have to be made

TEXT = """
(function text(node) {
  let found = "";
  for (const child of node.childNodes)
    if (child.nodeType === 3) found += child.data + " ";
    else if (child.nodeType === 1 && !["SCRIPT", "STYLE"].includes(child.tagName)) found += text(child);
  return node.shadowRoot ? found + text(node.shadowRoot) : found;
})(document.body)
"""
"""Expression for the text of a page, including that of its components."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Twenty rollouts, a quarter of which have reward 1."""
    run = run_dir(tmp_path_factory.mktemp("viewed") / "run")
    made = [
        trajectory(n, task=f"task{n % 5}", reward=float(n % 4 == 0), started_at=1.79e9 + n, finished_at=1.79e9 + n + 30)
        for n in range(20)
    ]
    commit(run, "a", *((0, 0, one) for one in made))
    gather(run)
    return run


def shows(command: list[str], address: str, texts: list[str], scratch: Path, **variables: str) -> None:
    """Start a viewer and check that its page shows all texts, without an error and without a request elsewhere.

    ``PORT`` in the command and in the address is a free port.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def answers() -> bool:
        assert process.poll() is None, (scratch / "log").read_text()
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    words = [word.replace("PORT", str(port)) for word in command]
    ports = {name: value.replace("PORT", str(port)) for name, value in variables.items()}
    with (scratch / "log").open("wb") as log:
        process = subprocess.Popen(words, env=environment(**ports), stdout=log, stderr=log, start_new_session=True)
    try:
        until(answers, "the viewer's port", 180)
        asyncio.run(asyncio.wait_for(_look(f"http://127.0.0.1:{port}{address}", texts, scratch), 240))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _look(address: str, texts: list[str], scratch: Path) -> None:
    async with visiting(address, scratch) as page:
        found, lacking = "", texts
        try:
            async with asyncio.timeout(120):
                while lacking:
                    found = " ".join((await page.evaluate(TEXT)).split())
                    lacking = [text for text in texts if text not in found]
                    await asyncio.sleep(0.2)
        except TimeoutError:
            pytest.fail(f"{lacking} not on the page: {found[:2000]} {page.console}")
        elsewhere = [url for url in page.asked_for if url.startswith("http") and "//127.0.0.1:" not in url]
        assert elsewhere == []


def test_inspect_shows_an_exported_log(run: RunDir, tmp_path: Path, viewers_python: Path) -> None:
    with open_trajectories(run.path) as store:
        exports.export(store, ["inspect"], tmp_path / "export")
    folder = str(tmp_path / "export" / "inspect")
    command = [str(viewers_python.with_name("inspect")), "view", "start", "--log-dir", folder, "--port", "PORT"]
    shows(command, "/", ["default.eval", "Scorers reward", "20 rows", "task4", "0.25"], tmp_path)


def test_harbor_shows_an_exported_job(run: RunDir, tmp_path: Path, harbor_python: Path) -> None:
    with open_trajectories(run.path) as store:
        exports.export(store, ["harbor"], tmp_path / "export")
    folder = str(tmp_path / "export" / "harbor")
    command = [str(harbor_python.with_name("harbor")), "view", folder, "--port", "PORT", "--host", "127.0.0.1"]
    shows(command, "/", ["sample", "mini-swe-agent", "0.25", "20 / 20 ( 0 errors )"], tmp_path)


def test_tensorboard_and_trackio_show_the_points_of_a_run(run: RunDir, tmp_path: Path, viewers_python: Path) -> None:
    track = [str(viewers_python), "-m", "megaflow_hpc", "track", str(run.path), "--to", "tensorboard,trackio"]
    subprocess.run([*track, "-o", str(tmp_path)], env=environment(), check=True)
    tensorboard = [str(viewers_python.with_name("tensorboard")), "--logdir", str(tmp_path / "tensorboard")]
    shows([*tensorboard, "--port", "PORT"], "/", ["rollouts/default /reward_so_far", "0.25 20"], tmp_path)
    variables = {"TRACKIO_DIR": str(tmp_path / "trackio"), "GRADIO_SERVER_PORT": "PORT"}
    trackio = [str(viewers_python.with_name("trackio")), "show"]
    shows(trackio, "/", ["Runs (1)", "pass_rate_so_far", "tokens_per_rollout"], tmp_path, **variables)
