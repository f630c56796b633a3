"""``status``: prints the current state of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import msgspec

from megaflow_hpc.cli.output import (
    FINAL,
    failure_lines,
    print_json,
    queue_lines,
    say,
    seconds,
    table,
    training_lines,
    unstarted_lines,
)
from megaflow_hpc.cli.progress import under_way
from megaflow_hpc.cli.runs.usage import hours
from megaflow_hpc.cli.verb import Subparsers, add_run, add_verb
from megaflow_hpc.texts import in_one_line


def register(subparsers: Subparsers) -> None:
    """Adds status."""
    status = add_verb(
        subparsers,
        "status",
        _status,
        "show counts by state, pods, servers, failures by cause",
        examples=["status RUN", "status latest --json", "status RUN --usage"],
        description="Shows counts by state, rate, remaining time, pods (also silent ones), servers and "
        "failures by cause. It queries Slurm once for all jobs.",
    )
    add_run(status)
    status.add_argument("--rollouts", action="store_true", help="list every stored rollout")
    status.add_argument(
        "--usage", action="store_true", help="add core-hours and GPU-hours, and the idle ones (seconds in JSON)"
    )


def _status(arguments: argparse.Namespace) -> int:
    from megaflow_hpc.campaign.facade import Run

    with under_way(f"reading {arguments.run_dir}"):
        run = Run(arguments.run_dir)
        if arguments.rollouts:
            run.monitor.list_rollouts()
        status = run.status()
        if arguments.usage:
            status["usage"] = run.usage()
    if arguments.rollouts:
        status["rollout_list"] = [msgspec.to_builtins(event) for _, event in sorted(run.stored_rollouts().items())]
    if arguments.json:
        print_json(status)
    else:
        say(shown(run.config.name, status))
    return 0


def shown(name: str, status: Mapping[str, Any]) -> str:
    """Formats the status of the campaign ``name`` as a block of text."""
    counts = status["rollouts"]
    lines = [f"{name}: {status['state']}    {status['run']}"]
    lines.append("  ".join(f"{state} {counts[state]}" for state in ("total", "pending", "running", *FINAL)))
    if status.get("waits_for"):
        lines.append(f"waits for {', '.join(status['waits_for'])} to add rollouts")
    if status["rate_per_s"] and status["eta_s"]:
        lines.append(f"rate {status['rate_per_s']:.2f}/s, about {seconds(status['eta_s'])} to go")
    if status["tokens_per_s"]:
        lines.append(f"tokens sampled {status['tokens_per_s']:,.0f}/s")
    for key, words in (("failures", "failures by cause"), ("retries", "retried by cause")):
        if status[key]:
            lines.append(f"{words}: " + ", ".join(f"{kind} {n}" for kind, n in status[key].items()))
    lines += failure_lines(status)
    lines += [in_one_line(warning) for warning in status.get("warnings", ())]
    lines += queue_lines(status)
    lines += training_lines(status)
    lines += unstarted_lines(status)
    silent = [pod for pod in status["pods"] if pod["state"] == "silent"]
    lines += [f"pod {pod['pod']} on {pod['node']} is silent for {pod['silent_s']} s" for pod in silent]
    if "usage" in status:
        cores, idle, gpus, idle_gpus = hours(status["usage"])
        lines.append(f"core-hours {cores}, idle {idle}; GPU-hours {gpus}, idle {idle_gpus}")
    if status["pods"]:
        again = ["starts"] if any(pod.get("starts", 1) > 1 for pod in status["pods"]) else []
        columns = ("pod", "state", "node", "workers", "slots", "running", "stored", *again, "why")
        lines.append(_table(status["pods"], *columns))
    if status["servers"]:
        columns = ("server", "state", "policy", "node", "weight_version", "template", "cause", "log")
        lines.append(_table(status["servers"], *columns))
    if "rollout_list" in status:
        columns = ("id", "status", "reward", "turns", "seconds", "cpu_s", "memory_peak_mb", "kind", "error")
        lines.append(_table(status["rollout_list"], *columns))
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], *columns: str) -> str:
    optional = ("why", "template", "cause", "log")
    columns = tuple(c for c in columns if c not in optional or any(row.get(c) for row in rows))
    return "\n" + table(columns, [[row.get(column) for column in columns] for row in rows])
