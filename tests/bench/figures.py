"""Figures: what a benchmark measured, beside its goal and its peers in the same run."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Peer:
    """The same thing done by another program; ``ratio`` is how many times better this package is."""

    name: str
    version: str
    value: float
    ratio: float


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Args:
        value: the median (or the quantile that ``name`` says) of ``n`` samples, in ``unit``.
        spread: (10th, 90th percentile) of the samples that ``value`` is the median of.
        goal: the number to reach; ``None`` for a figure that only informs.
        simulated: a stand-in took the place of a real part; ``name`` says which.
    """

    name: str
    unit: str
    value: float
    n: int
    spread: tuple[float, float] | None = None
    goal: float | None = None
    better: Better = "lower"
    simulated: bool = False
    peers: tuple[Peer, ...] = field(default=())

    @property
    def passed(self) -> bool | None:
        """Whether the goal is met; ``None`` where there is none."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal

    def beside(self, name: str, version: str, value: float) -> Figure:
        """This figure with one more peer, whose ``value`` has the same unit."""
        ours, theirs = (value, self.value) if self.better == "lower" else (self.value, value)
        peer = Peer(name, version, value, round(ours / theirs, 3) if theirs else float("inf"))
        return Figure(**{**self.__dict__, "peers": (*self.peers, peer)})

    def as_json(self) -> dict[str, Any]:
        """The fields by name, and ``pass``."""
        return {**asdict(self), "pass": self.passed}


def quantile(samples: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1) of ``samples``, nearest rank."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def median(
    name: str, unit: str, samples: Sequence[float], goal: float | None = None, better: Better = "lower"
) -> Figure:
    """The figure of repeated measurements; its spread is from the 10th to the 90th percentile of ``samples``."""
    spread = (quantile(samples, 0.1), quantile(samples, 0.9))
    return Figure(name, unit, statistics.median(samples), len(samples), spread, goal, better)


def multiple(
    name: str, limit: str, ours: Sequence[float], its: Sequence[float], goal: float, better: Better = "lower"
) -> Figure:
    """The figure of how many times its limit ours is: the median over rounds, each with one value of both.

    Args:
        limit: what was measured beside it, by turns, so that what else the machine does falls on both.
    """
    ratios = [mine / other for mine, other in zip(ours, its, strict=True)]
    return median(f"{name}, of {limit}", "×", ratios, goal, better)


def report(figures: Sequence[Figure]) -> dict[str, Any]:
    """``{machine, date, figures}``, as ``--json`` prints it."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    machine = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"machine": machine, "date": date, "figures": [figure.as_json() for figure in figures]}
