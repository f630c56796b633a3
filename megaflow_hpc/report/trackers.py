"""Sends points to experiment trackers: Weights & Biases, MLflow, Trackio and TensorBoard.

Each tracker stores locally by default. With ``online``, it uses its own configuration (``WANDB_API_KEY``,
``MLFLOW_TRACKING_URI``, ``TRACKIO_SPACE_ID`` …). A tracker's library is imported when the tracker is created.

No point is sent twice. Before sending, each tracker is queried for the points that it already has, by point number
(Weights & Biases, Trackio) or by series and step (MLflow, TensorBoard).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from megaflow_hpc.errors import MegaflowError, SiteError
from megaflow_hpc.report.tracking import Point, PointLog
from megaflow_hpc.resources import __version__
from megaflow_hpc.texts import in_one_line

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio", "tensorboard": "tensorboard"}
"""Name of the package that each tracker needs."""
TIMEOUT_S = 20
"""Seconds after which a tracker counts as unreachable."""
WANDB_BLOCK, WANDB_HEADER = 32768, 7
"""Sizes in bytes of a block and of a header in a local file of Weights & Biases."""
MLFLOW_BATCH = 1000
"""Maximum number of metrics in a request to MLflow."""


class Tracker(Protocol):
    """A tracker that stores points."""

    place: str
    """Directory or address of the tracker, for messages."""

    def send(self, points: PointLog) -> int:
        """Sends the points that the tracker lacks. Returns their number."""

    def close(self, over: bool) -> None:
        """Closes the tracker's run. If ``over`` is true, the run is marked as finished."""


def make(name: str, points: PointLog, project: str, online: bool) -> Tracker:
    """Creates a tracker, which groups runs by ``project``.

    Raises:
        SiteError: The tracker's library is missing, or the tracker is unreachable or refuses the key.
    """
    kinds: dict[str, Callable[[PointLog, str, bool], Tracker]] = {
        "wandb": WandbTracker,
        "mlflow": MlflowTracker,
        "trackio": TrackioTracker,
        "tensorboard": TensorBoardTracker,
    }
    with reported(name, points):
        return kinds[name](points, project, online)


@contextlib.contextmanager
def reported(name: str, points: PointLog) -> Iterator[None]:
    """Converts errors of a tracker's library to :class:`SiteError`, and redirects its output to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ModuleNotFoundError as error:
        raise SiteError(
            f"{name}: {error.name} is not installed for {sys.executable}; pip install {PACKAGES[name]}"
        ) from None
    except MegaflowError:
        raise
    except Exception as error:  # each library has its own classes for an unreachable server and a refused key
        reason = in_one_line(f"{type(error).__name__}: {error}")[:500]
        raise SiteError(
            f"{name}: not sent ({reason}); the campaign is untouched and the points are kept in {points.path}: correct "
            "the address or the key, then repeat the command"
        ) from error


class TensorBoardTracker:
    """Writes TensorBoard event files. Each start of the program begins a new file."""

    def __init__(self, points: PointLog, project: str, online: bool) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = points.folder / "tensorboard" / points.run.path.name
        self.place = str(folder.parent)
        self._has = set(self._stored(folder))
        self._writer = EventFileWriter(str(folder))
        self._sent = 0

    @staticmethod
    def _stored(folder: Path) -> Iterator[tuple[str, int]]:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for path in sorted(folder.glob("events.out.tfevents.*")):
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    yield value.tag, event.step

    def send(self, points: PointLog) -> int:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        count = 0
        for point in points.after(self._sent):
            named = {tag: value for tag, value in point.named().items() if (tag, point.step) not in self._has}
            if named:
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in named.items()]
                self._writer.add_event(Event(wall_time=point.at, step=point.step, summary=Summary(value=values)))
                count += 1
            self._sent = point.number
        self._writer.flush()
        return count

    def close(self, over: bool) -> None:
        self._writer.close()


class MlflowTracker:
    """Logs to an MLflow run. One tag of the run identifies it, and another tag counts the points sent."""

    POINTS_TAG = "megaflow_hpc.points"
    RUN_TAG = "megaflow_hpc.run"

    def __init__(self, points: PointLog, project: str, online: bool) -> None:
        for name, value in (("MAX_RETRIES", 2), ("TIMEOUT", TIMEOUT_S)):  # the defaults wait for minutes
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", str(value))
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient, get_tracking_uri

        uri = get_tracking_uri() if online else f"file:{points.folder.absolute() / 'mlflow'}"
        self.place = uri
        self._client = MlflowClient(tracking_uri=uri)
        name = points.run.path.name
        experiment = self._client.get_experiment_by_name(project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(project)
        found = self._client.search_runs([experiment_id], f"tags.`{self.RUN_TAG}` = '{name}'", max_results=1)
        tags = {self.RUN_TAG: name, "megaflow_hpc.version": __version__}
        run = found[0] if found else self._client.create_run(experiment_id, run_name=name, tags=tags)
        self._run = run.info.run_id
        self._sent = int(run.data.tags.get(self.POINTS_TAG, 0))
        self._may_repeat = True

    def send(self, points: PointLog) -> int:
        from mlflow.entities import Metric

        new = points.after(self._sent)
        if not new:
            return 0
        has = self._stored(new) if self._may_repeat else set()
        metrics = []
        for point in new:
            for key, value in _mlflow_values(point).items():
                if (key, point.step) not in has:
                    metrics.append(Metric(key, value, int(point.at * 1000), point.step))
        self._may_repeat = True  # if a request fails, the tracker has already stored the earlier requests
        for start in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + MLFLOW_BATCH])
        self._client.set_tag(self._run, self.POINTS_TAG, str(new[-1].number))
        self._sent, self._may_repeat = new[-1].number, False
        return len(new)

    def _stored(self, new: Sequence[Point]) -> set[tuple[str, int]]:
        """Returns (key, step) of the points that a killed process sent and did not count."""
        keys = {key for point in new for key in _mlflow_values(point)}
        known = self._client.get_run(self._run).data.metrics.keys() & keys
        return {(key, metric.step) for key in known for metric in self._client.get_metric_history(self._run, key)}

    def close(self, over: bool) -> None:
        if over:
            self._client.set_terminated(self._run)


def _mlflow_values(point: Point) -> dict[str, float]:
    """Returns the values under names that MLflow accepts.

    MLflow's file store keeps one file per metric, so ``seconds`` and ``seconds/wait`` cannot both exist.
    """
    names = {f"{point.series}/{name.replace('/', '.')}": value for name, value in point.values.items()}
    return {re.sub(r"[^\w./ -]", "_", name).replace("..", "__"): value for name, value in names.items()}


class WandbTracker:
    """Logs each point under its number. The axes of the charts are the training step and the number of rollouts."""

    def __init__(self, points: PointLog, project: str, online: bool) -> None:
        import wandb  # noqa: F401  (a missing package is reported now)

        self._folder, self._project, self._online = points.folder, project, online
        self._id = re.sub(r"[^A-Za-z0-9_-]", "-", points.run.path.name)[:100]
        self._run: Any = None
        if online:
            self._run = self._open(points)
            self.place = str(self._run.url)
            self._sent = max(0, self._run.step - 1)
        else:
            self.place = str(self._folder / "wandb")
            self._sent = max(self._stored(), default=0)
        self._axes: set[str] = set()

    def _open(self, points: PointLog) -> Any:
        import wandb

        return wandb.init(
            project=self._project,
            id=self._id,
            name=points.run.path.name,
            dir=str(points.folder),
            mode="online" if self._online else "offline",
            resume="allow" if self._online else None,
            config={"campaign": points.record.name, "megaflow_hpc": __version__},
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                init_timeout=TIMEOUT_S,
            ),
        )

    def _stored(self) -> Iterator[int]:
        """Yields the numbers of the points in the local files."""
        from wandb.proto.wandb_internal_pb2 import Record

        for path in sorted(self._folder.glob(f"wandb/offline-run-*-{self._id}/run-{self._id}.wandb")):
            for data in _wandb_records(path.read_bytes()):
                record = Record()
                record.ParseFromString(data)
                for item in record.history.item:
                    if "_step" in (item.key, *item.nested_key):
                        yield int(item.value_json)

    def send(self, points: PointLog) -> int:
        new = points.after(self._sent)
        if new and self._run is None:
            self._run = self._open(points)
        for point in new:
            if point.series not in self._axes:
                self._axes.add(point.series)
                axis = "rollouts" if point.series.startswith("rollouts/") else "step"
                self._run.define_metric(f"{point.series}/*", step_metric=f"{point.series}/{axis}")
            self._run.log({**point.named(), "_timestamp": point.at}, step=point.number)
            self._sent = point.number
        return len(new)

    def close(self, over: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0)


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a local file of Weights & Biases, which has LevelDB's log format after a header of 7 bytes.

    Stops at an incomplete record that a killed process left.
    """
    at, parts = WANDB_HEADER, b""
    while at + WANDB_HEADER <= len(data):
        if WANDB_BLOCK - at % WANDB_BLOCK < WANDB_HEADER:  # the rest of a block is padding
            at += WANDB_BLOCK - at % WANDB_BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += WANDB_HEADER
        if kind not in (1, 2, 3, 4) or at + length > len(data):
            return
        parts = data[at : at + length] if kind in (1, 2) else parts + data[at : at + length]
        at += length
        if kind in (1, 4):
            yield parts


class TrackioTracker:
    """Logs each point under its number. Closes the library's run after each batch, which makes the batch durable."""

    def __init__(self, points: PointLog, project: str, online: bool) -> None:
        if not online:
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
            os.environ["TRACKIO_DIR"] = str(points.folder.absolute() / "trackio")
        import trackio

        self._trackio, self._project, self._name = trackio, project, points.run.path.name
        self.place = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_DIR") or "trackio's own directory"
        self._sent: int | None = None

    def send(self, points: PointLog) -> int:
        new = points.after(self._sent or 0)
        if self._sent is not None and not new:
            return 0
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(io.StringIO()):  # Trackio prints six lines for each batch
            with warnings.catch_warnings(record=True) as caught:  # Trackio only warns about connection errors
                warnings.simplefilter("always")
                run = self._trackio.init(self._project, name=self._name, resume="allow", **quiet)
            try:
                if caught:
                    raise ConnectionError("; ".join(str(warning.message) for warning in caught))
                stored = run._next_step - 1
                new = [point for point in new if point.number > stored]
                for point in new:
                    run.log(point.named(), step=point.number)
            finally:
                self._trackio.finish()
        self._sent = max([stored, *(point.number for point in new)])
        return len(new)

    def close(self, over: bool) -> None:
        pass
