"""``weights publish``, ``list``, ``send`` and ``receive``: manage the weight versions of a campaign's engines."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from megaflow_hpc.cli.output import note, print_result, table
from megaflow_hpc.cli.progress import under_way
from megaflow_hpc.cli.verb import Subparsers, add_group, add_run, add_verb, whole
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir import weight_relay, weights
from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import read_run


def register(subparsers: Subparsers) -> None:
    """Registers ``weights`` with its verbs."""
    verbs = add_group(
        subparsers,
        "weights",
        "publish new weights for the engines of a campaign, list them, or take them to another site",
        examples=["weights publish RUN checkpoints/step-20", "weights list RUN", "weights send RUN DIR"],
    )
    publish = add_verb(
        verbs,
        "publish",
        _publish,
        "make a model directory the next version, which servers load in place",
        examples=[
            "weights publish RUN checkpoints/step-20",
            "weights publish RUN checkpoints/step-20 --policy student --move --keep 3",
        ],
        description="Copies the directory (or moves it) into the run and makes it the newest version of a policy. "
        "Servers check for it every few seconds and load it while rollouts run. Prints the version.",
    )
    add_run(publish)
    publish.add_argument("directory", metavar="DIR", type=Path, help="the model directory that the trainer wrote")
    publish.add_argument("--policy", help="the model's policy, if there are several")
    publish.add_argument("--move", action="store_true", help="rename DIR instead of copying it")
    publish.add_argument(
        "--keep", metavar="N", type=whole(1), help="remove all but the N newest versions of the policy"
    )
    publish.add_argument(
        "--token",
        default="",
        help="idempotency token: publishing again with the same token returns the existing version",
    )
    publish.add_argument(
        "--digest", default="", help="digest of the content, which must be the same for the same token"
    )

    listing = add_verb(
        verbs,
        "list",
        _list,
        "list the versions of each policy, and how many servers serve each",
        examples=["weights list RUN"],
    )
    add_run(listing)

    send = add_verb(
        verbs,
        "send",
        _send,
        "put a policy's newest version into a directory that is copied to another site",
        examples=["weights send RUN outbox"],
        description="Puts the newest version into DIR, as hard links if possible, and removes earlier versions from "
        "it. Copy DIR to another site by any means, but not during this command, and run weights receive there. Prints "
        "the version's number.",
    )
    receive = add_verb(
        verbs,
        "receive",
        _receive,
        "publish the newest version that another site has sent",
        examples=["weights receive RUN inbox"],
        description="Publishes the newest version in DIR if all its files are complete and newer than those received "
        "before. Otherwise changes nothing and says what is missing. Keeps the 3 newest versions, and removes earlier "
        "ones from DIR. Prints the version's number in RUN.",
    )
    for parser in (send, receive):
        add_run(parser)
        parser.add_argument("directory", metavar="DIR", type=Path, help="directory that is copied between the sites")
        parser.add_argument("--policy", help="the model's policy, if there are several")


def _loading(arguments: argparse.Namespace) -> RunDir:
    """Returns a run whose engines can load new weights. Raises ConfigError if it is finished."""
    run = RunDir(arguments.run_dir)
    marks = Marks(run)
    if marks.finished:
        raise ConfigError(
            f"{run}: is finished, so no engine will load these weights; use them as model.path of a new campaign"
        )
    if marks.cancelled:
        note(f"the campaign is cancelled: its engines load them after megaflow-hpc resume {run}")
    return run


def _publish(arguments: argparse.Namespace) -> int:
    run = _loading(arguments)
    named = {"token": arguments.token, "digest": arguments.digest}
    with under_way(f"publishing {arguments.directory}"):
        made = weights.publish(
            run, arguments.directory, arguments.policy, move=arguments.move, keep=arguments.keep, **named
        )
    hint = f"policy {made.policy}: version {made.version} at {made.path}; servers check for it every few seconds"
    print_result(arguments.json, asdict(made), made.version, hint)
    return 0


def _send(arguments: argparse.Namespace) -> int:
    with under_way(f"sending to {arguments.directory}"):
        sent = weight_relay.send(RunDir(arguments.run_dir), arguments.directory, arguments.policy)
    hint = "" if sent.version else f"policy {sent.policy}: nothing is published yet"
    print_result(arguments.json, asdict(sent), sent.version or "", hint)
    return 0


def _receive(arguments: argparse.Namespace) -> int:
    run = _loading(arguments)
    with under_way(f"receiving from {arguments.directory}"):
        received = weight_relay.receive(run, arguments.directory, arguments.policy)
    hint = f"waiting: {received.waiting}" if received.waiting else ""
    if not (received.version or received.waiting):
        hint = f"nothing newer than version {received.sent} of the sender"
    print_result(arguments.json, asdict(received), received.version.version if received.version else "", hint)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    run = RunDir(arguments.run_dir)
    policies = [name for name, policy in read_run(run).policies.items() if policy.model]
    serving: Counter[tuple[str, int]] = Counter()
    refused: dict[tuple[str, int], str] = {}
    for server in EndpointFiles(run).serving():
        serving[server.policy, server.weight_version] += 1
        if server.refused is not None:
            refused[server.policy, server.refused.version] = server.refused.cause
    pointed = {policy: weights.current(run, policy).version for policy in policies}
    listed = [weights.Version(policy=policy) for policy in policies] + weights.versions(run)
    rows = [
        {
            **asdict(version),
            "current": pointed.get(version.policy) == version.version,
            "servers": serving[version.policy, version.version],
            "refused": refused.get((version.policy, version.version), ""),
        }
        for version in listed
    ]
    lines = [
        (
            row["policy"],
            str(row["version"]) + (" *" if row["current"] else ""),
            str(row["ordinal"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["published_at"])) if row["published_at"] else "-",
            str(row["servers"]),
            row["path"] or "the campaign's model",
            row["refused"],
        )
        for row in rows
    ]
    head = ("policy", "version", "ordinal", "published (UTC)", "servers", "path", "refused because")
    print_result(arguments.json, rows, table(head, lines))
    return 0
