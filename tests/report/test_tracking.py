"""Points for trackers: what is computed from a run, and that nothing is computed or sent twice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megaflow_hpc.cli import main
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.report.tracking import PointLog, open_points
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.training.plan import TrainingFiles
from megaflow_hpc.trajectory import CALLS_FILE, Turn
from megaflow_hpc.types import Artifact
from tests.support.samples import commit, run_dir, trajectory
from tests.support.training import training_run
from tests.support.viewers_environment import environment

TRACKERS = "wandb,mlflow,trackio,tensorboard"


def add(run: RunDir, pod: str, first: int, count: int) -> None:
    made = [
        trajectory(n, task=f"task{n}", reward=float(n % 4 == 0), started_at=1.79e9 + n, finished_at=1.79e9 + n + 30)
        for n in range(first, first + count)
    ]
    commit(run, pod, *((0, 0, one) for one in made))


def points_of(run: RunDir, folder: Path, final: bool = False) -> PointLog:
    with open_points(run, folder) as points:
        points.collect(final)
    return points


def test_each_rollout_is_a_point_with_means_over_its_window_and_sums_from_the_start(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    add(run, "a", 0, 6)
    commit(run, "b", (0, 0, trajectory(7, status="failed", error_kind="sandbox", reward=None)))
    points = points_of(run, tmp_path / "track").after(0)
    assert [(point.number, point.series, point.step) for point in points] == [
        (n, "rollouts/default", n) for n in range(1, 8)
    ]
    last = points[-1].named()
    assert last["rollouts/default/rollouts"] == 7
    assert last["rollouts/default/failed"] == 1
    assert last["rollouts/default/pass_rate_so_far"] == pytest.approx(2 / 6, rel=1e-5)
    assert points[4].values["reward"] == 1.0
    assert points[0].values["seconds"] == 30.0


def test_tokens_of_an_endpoint_without_ids_are_counted(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    turns = [Turn(-1, 0, 0, "stop", policy="default", message=1)]
    calls = Artifact(CALLS_FILE, b'{"tokens": [100, 20]}\n')
    commit(run, "a", (0, 0, trajectory(0, turns=turns, sequences=[], artifacts=[calls])))
    (point,) = points_of(run, tmp_path / "track").after(0)
    assert (point.values["tokens"], point.values["sampled_tokens"]) == (120, 20)


def test_windows_grow_so_that_many_rollouts_are_few_points(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    add(run, "a", 0, 1500)
    found = points_of(run, tmp_path / "track").position
    assert found.points == 999 + 500 // 2
    assert found.arms["default"].window.rollouts == 1
    assert points_of(run, tmp_path / "track", final=True).after(found.points)[0].step == 1500


def test_training_steps_are_points_once(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"steps": 20})
    files = TrainingFiles(run, "default")
    files.create()
    for step in (1, 2):
        files.commit(Commit(step=step, metrics={"reward": 0.1 * step}))
    points = points_of(run, tmp_path / "track")
    assert [(point.series, point.step, point.values) for point in points.after(0)] == [
        ("training/default", step, {"reward": pytest.approx(0.1 * step), "step": step}) for step in (1, 2)
    ]
    assert points_of(run, tmp_path / "track").position.points == 2


def test_what_a_killed_process_left_behind_the_position_does_not_count(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    add(run, "a", 0, 3)
    points = points_of(run, tmp_path / "track")
    whole = points.path.read_bytes()
    with open(points.path, "ab") as file:
        file.write(whole.splitlines(keepends=True)[0] + b'{"number": 5, "ser')
    add(run, "b", 3, 2)
    found = points_of(run, tmp_path / "track").after(0)
    assert [point.number for point in found] == [1, 2, 3, 4, 5]
    assert points.path.read_bytes().startswith(whole)


def test_nothing_is_lost_if_the_points_cannot_be_written_for_a_while(tmp_path: Path) -> None:
    run = training_run(tmp_path / "run", {"steps": 20})
    files = TrainingFiles(run, "default")
    files.create()
    files.commit(Commit(step=1, metrics={"reward": 0.5}))
    add(run, "a", 0, 3)
    with open_points(run, tmp_path / "track") as points:
        points.path.mkdir()  # stands for a full disk
        with pytest.raises(OSError, match="points"):
            points.collect(False)
        points.path.rmdir()
        assert points.collect(False) == 4
        assert [point.number for point in points.after(0)] == [1, 2, 3, 4]
        assert [point.step for point in points.after(0)] == [1, 1, 2, 3]


def test_the_points_of_another_run_and_a_second_process_are_refused(tmp_path: Path) -> None:
    run, other = run_dir(tmp_path / "run"), run_dir(tmp_path / "other")
    points_of(run, tmp_path / "track")
    with pytest.raises(ConfigError, match=r"holds the points of run run, not of other; name another directory with -o"):
        points_of(other, tmp_path / "track")
    with open_points(run, tmp_path / "track"), pytest.raises(ConfigError, match="another megaflow-hpc track"):
        points_of(run, tmp_path / "track")


def test_an_unknown_tracker_and_a_missing_package_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_dir(tmp_path / "run")
    assert main(["track", str(run.path), "--to", "tensorbord"]) == 2
    assert "--to tensorbord: expected wandb, mlflow, trackio, tensorboard" in capsys.readouterr().err
    assert main(["track", str(run.path), "--to", "trackio"]) == 3
    assert f"trackio: trackio is not installed for {sys.executable}; pip install trackio" in capsys.readouterr().err


# --- the trackers themselves ---

READ = """
import collections, glob, json, os, sys
folder = sys.argv[1]
os.environ["TRACKIO_DIR"] = folder + "/trackio"
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
found = {}
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
found["tensorboard"] = [
    [value.tag, event.step]
    for path in glob.glob(folder + "/tensorboard/*/events*") for event in LegacyEventFileLoader(path).Load()
    for value in event.summary.value
]
import mlflow
client = mlflow.MlflowClient("file:" + folder + "/mlflow")
(run,) = client.search_runs([client.get_experiment_by_name("sample").experiment_id])
found["mlflow"] = [[key, m.step] for key in run.data.metrics for m in client.get_metric_history(run.info.run_id, key)]
found["mlflow status"] = run.info.status
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("sample", "run", max_points=None)
found["trackio"] = [[key, entry["rollouts/default/rollouts"]] for entry in logs for key in entry if "/" in key]
from megaflow_hpc.report.trackers import _wandb_records
from wandb.proto.wandb_internal_pb2 import Record
found["wandb"] = []
for path in glob.glob(folder + "/wandb/offline-run-*-run/*.wandb"):
    for data in _wandb_records(open(path, "rb").read()):
        record = Record()
        record.ParseFromString(data)
        row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
        found["wandb"] += [[key, row["rollouts/default/rollouts"]] for key in row if "/" in key]
print(json.dumps(found))
"""


def track(python: Path, run: RunDir, *words: str) -> list[str]:
    return [str(python), "-m", "megaflow_hpc", "track", str(run.path), *words]


@pytest.mark.slow
@pytest.mark.timeout(900)  # the environment may have to be made
def test_every_tracker_has_each_value_once_after_a_kill(tmp_path: Path, viewers_python: Path) -> None:
    """Kill the program with SIGKILL while it follows a run that grows, and let a second one finish."""
    run = run_dir(tmp_path / "run")
    position = run.path / "track" / "position.json"
    written = 0
    command = track(viewers_python, run, "--to", TRACKERS, "--follow", "--poll", "0.05")
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
    deadline = time.monotonic() + 180
    while written < 30:  # the last six are being sent when it is killed
        add(run, f"pod{written}", written, 6)
        written += 6
        while written < 30 and not (position.exists() and json.loads(position.read_bytes())["points"] >= written):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
    time.sleep(0.2)
    process.kill()
    process.wait()
    add(run, "last", written, 5)
    written += 5
    Marks(run).cancel()
    done = subprocess.run(
        track(viewers_python, run, "--to", TRACKERS, "--json"), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["points"] == written
    read = subprocess.run(
        [str(viewers_python), "-c", READ, str(run.path / "track")], env=environment(), capture_output=True, text=True
    )
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout.splitlines()[-1])
    assert found.pop("mlflow status") == "FINISHED"
    lines = (run.path / "track" / "points.jsonl").read_text().splitlines()
    expected = [(f"rollouts/default/{name}", p["step"]) for p in map(json.loads, lines) for name in p["values"]]
    for tracker, values in found.items():
        assert Counter(map(tuple, values)) == Counter(expected), tracker


@pytest.mark.slow
@pytest.mark.timeout(900)  # the environment may have to be made
def test_every_tracker_takes_the_times_of_training_steps(tmp_path: Path, viewers_python: Path) -> None:
    run = training_run(tmp_path / "run", {"steps": 20})
    metrics = {"seconds": 3.0, "seconds/wait": 2.0, "reward": 0.5, "reward/part/first": 0.25}
    files = TrainingFiles(run, "default")
    files.create()
    files.commit(Commit(step=1, metrics=metrics))
    done = subprocess.run(
        track(viewers_python, run, "--to", TRACKERS), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (stored,) = (run.path / "track" / "mlflow").glob("*/*/metrics/training/default")
    assert sorted(path.name for path in stored.iterdir()) == [
        *("reward", "reward.part.first", "seconds", "seconds.wait", "step")
    ]


class _Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b'{"errors": [{"message": "user is not logged in"}]}'
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a server that refuses every key."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


ONE_AFTER_ANOTHER = """
import sys
from megaflow_hpc.cli import main
for name in ("wandb", "mlflow", "trackio"):
    print(name, main(["track", sys.argv[1], "--to", name, "--online", "-o", sys.argv[2]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tracker_that_refuses_the_key_is_an_error_and_the_run_is_untouched(
    tmp_path: Path, viewers_python: Path, refusing: str
) -> None:
    run = run_dir(tmp_path / "run")
    add(run, "a", 0, 3)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    variables = {"WANDB_BASE_URL": refusing, "WANDB_API_KEY": "0" * 40, "MLFLOW_TRACKING_URI": refusing}
    variables |= {"TRACKIO_SERVER_URL": refusing, "TRACKIO_WRITE_TOKEN": "x", "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        [str(viewers_python), "-c", ONE_AFTER_ANOTHER, str(run.path), str(tmp_path / "track")],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["wandb", "3", "mlflow", "3", "trackio", "3"], done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("megaflow-hpc: ")]
    assert [line.split(": ")[1] for line in lines] == ["wandb", "mlflow", "trackio"]
    for line in lines:
        assert ": not sent (" in line
        assert "correct the address or the key, then repeat the command" in line
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
