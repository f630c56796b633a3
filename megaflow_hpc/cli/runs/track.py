"""``track``: sends a run's metrics to experiment trackers."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.cli.output import note, print_json, say
from megaflow_hpc.cli.verb import above_zero, add_output, add_run, add_verb
from megaflow_hpc.errors import ConfigError, SiteError

if TYPE_CHECKING:
    from megaflow_hpc.report.trackers import Tracker
    from megaflow_hpc.report.tracking import PointLog

DESCRIPTION = """\
Sends training steps, rewards, pass rates, tokens and durations of a run to Weights & Biases, MLflow, Trackio or
TensorBoard, by policy (and by agent if a policy has several). Reads only files of the run. Pods send nothing.

Each tracker stores below RUN/track unless --online is given. It then uses its own settings: WANDB_API_KEY,
MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL. Install the tracker's package where megaflow-hpc is.

Repeat the command at any time, also after it was killed: it sends what is new, and nothing twice.
"""


def register(subparsers: Any) -> None:
    """Registers the verb ``track``."""
    track = add_verb(
        subparsers,
        "track",
        _track,
        "send a run's metrics to wandb, mlflow, trackio or tensorboard",
        examples=[
            "track latest --to tensorboard",
            "track RUN --to wandb,mlflow --follow",
            "track RUN --to wandb --online --project my-project",
        ],
        description=DESCRIPTION,
    )
    add_run(track)
    track.add_argument(
        "--to", required=True, metavar="T[,T…]", help="wandb, mlflow, trackio, tensorboard; separated by commas"
    )
    track.add_argument("--follow", action="store_true", help="send what is new until the campaign ends")
    track.add_argument(
        "--poll", type=above_zero, default=30.0, metavar="SECONDS", help="time between looks with --follow (30)"
    )
    track.add_argument("--online", action="store_true", help="send to the tracker's server instead of to files")
    track.add_argument("--project", metavar="NAME", help="project or experiment in the tracker (the campaign's name)")
    add_output(track, "directory of points and local trackers (RUN/track)", metavar="DIR")


def _track(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.report import trackers
    from megaflow_hpc.report.tracking import open_points
    from megaflow_hpc.rundir.layout import RunDir

    names = list(dict.fromkeys(name.strip() for name in arguments.to.split(",") if name.strip()))
    unknown = [name for name in names or [arguments.to] if name not in trackers.PACKAGES]
    if unknown:
        raise ConfigError(f"--to {unknown[0]}: expected {', '.join(trackers.PACKAGES)}, separated by commas")
    run = RunDir(Path(arguments.run_dir))
    folder = Path(arguments.output) if arguments.output else run.path / "track"
    with open_points(run, folder) as points:
        project = arguments.project or points.record.name or "megaflow-hpc"
        made = {name: trackers.make(name, points, project, arguments.online) for name in names}
        sent = dict.fromkeys(names, 0)
        try:
            _send(points, made, sent, arguments.follow, arguments.poll)
        finally:
            for name, tracker in made.items():
                with trackers.reported(name, points):
                    tracker.close(points.is_over)
        stored = {name: {"place": tracker.place, "sent": sent[name]} for name, tracker in made.items()}
        if arguments.json:
            print_json({"points": points.position.points, "file": str(points.path), "trackers": stored})
        else:
            for name, entry in stored.items():
                say(f"{name}: {entry['sent']} new of {points.position.points} points in {entry['place']}")
    return 0


def _send(points: PointLog, made: dict[str, Tracker], sent: dict[str, int], follow: bool, poll_s: float) -> None:
    """Sends what is new. With ``follow``, continues until the campaign is over and all trackers have its points."""
    from megaflow_hpc.report.trackers import reported

    last_failure = ""
    while True:
        over = points.is_over
        try:
            new = points.collect(final=over)
        except OSError as error:
            if not follow:
                raise
            note(f"track: {points.run.path} does not answer ({error.strerror}); trying again")
            time.sleep(poll_s)
            continue
        failure: SiteError | None = None
        for name, tracker in made.items():
            try:
                with reported(name, points):
                    sent[name] += tracker.send(points)
            except SiteError as error:
                failure = error
                if follow and not over and str(error) != last_failure:
                    note(f"track: {error}")
                last_failure = str(error)
        if not follow or (over and not new):
            if failure:
                raise failure
            return
        time.sleep(poll_s)
