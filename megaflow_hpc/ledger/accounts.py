"""Sums up progress, core-seconds and stored rollouts over all starts of pods.

The numbers come from leases, events and the record of ended pods. A new start of an array element copies the totals of
the element's earlier starts into its own lease, under the key ``earlier``. When a pod has ended or is gone, the
coordinator adds its totals to the record ``ledger/ended/<n>``. Each new version of the record is hard-linked under the
next number, so only one coordinator can extend a given version. The highest number is current.

An element may restart after its last start was recorded, but before that start's lease is removed. To avoid counting a
start twice, each lease lists under ``took`` the starts whose totals it includes. The record also keeps recent starts
separate from its totals, under ``recent``, until their leases have been absent for long enough. A recent start that is
listed under ``took`` in any lease is not counted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from megaflow_hpc.ledger.calls import Names, Read, Steps, Stored
from megaflow_hpc.ledger.names import ENDED, newest_starts
from megaflow_hpc.rundir.budget import measured
from megaflow_hpc.rundir.events import Count, Number, PodEvent, RolloutEvent, Time
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import last_events
from megaflow_hpc.rundir.record import JOB_ID, array_of

RECENT_EVENTS = 200
"""Number of latest events that are read for a start that has not ended."""


class Progress(NamedTuple):
    """Progress of a pod, as published in its lease."""

    t: Time
    """Time of publication in Unix seconds, on the pod's clock."""
    running: Count
    queued: Count
    stored: Count
    tokens: Count = 0
    """Number of tokens that the engines have sampled for this pod."""
    tokens_per_s: Number = 0.0


def progress_of(lease: Mapping[str, object]) -> Progress | None:
    """Returns the progress published in a pod's lease, or ``None`` if it is missing or invalid."""
    try:
        content = {**Progress._field_defaults, **lease}
        return msgspec.convert([content[name] for name in Progress._fields], Progress)
    except (KeyError, ValueError):
        return None


def stored_by(run: RunDir, pod: str, lease: Mapping[str, Any]) -> int:
    """Returns the number of rollouts that one start of a pod has stored.

    Also reads the start's last events, which are newer than its lease if the start was killed or the run was moved.

    Args:
        pod: ``<pod>.<start>``.
        lease: Content of the start's lease.
    """
    progress = progress_of(lease)
    events, all_of_them = last_events(run, pod, 1 if lease.get("ended") else RECENT_EVENTS)
    published = progress.stored if progress else 0
    reported = max((event.stored or 0 for event in events if isinstance(event, PodEvent)), default=0)
    counted, since = 0, 0.0
    if progress and not all_of_them:
        counted, since = progress.stored, progress.t
    counted += len({event.id for event in events if isinstance(event, RolloutEvent) and event.t > since})
    return max(published, counted, reported)


Facts = dict[str, Any]
"""Totals over pod starts, by name. Empty before the first start.

``starts`` and ``stored`` count starts and stored rollouts. ``core_s`` is in core-seconds, ``usd`` in US dollars.
``began_at`` is the time at which the first start began, in Unix seconds. ``journals`` counts the starts that stored a
rollout. ``arrays`` lists the ids of their Slurm job arrays.
"""
TOOK = "took"
MAX_TOOK = 100
"""Maximum number of starts that a lease lists under ``took``. Each is needed only for a few minutes."""
MAX_LOOKS = 10
"""Maximum number of attempts to read the record of ended pods. An attempt fails only if a coordinator has just replaced
it."""


def facts_of(lease: Mapping[str, Any]) -> Facts:
    """Returns the totals of a single start, given its lease. Does not include earlier starts."""
    stored, job = _count(lease.get("stored")), lease.get("job_id")
    array = array_of(job) if isinstance(job, str) else None
    return {
        "starts": 1,
        "core_s": measured(lease.get("core_s")) or 0.0,
        "usd": measured(lease.get("usd")) or 0.0,
        "began_at": measured(lease.get("began_at")),
        "stored": stored,
        "journals": int(stored > 0),
        "arrays": [array] if array else [],
    }


def add_facts(several: Iterable[Mapping[str, Any]]) -> Facts:
    """Sums several totals. Values of the wrong type count as missing."""
    total: Facts = {}
    for facts in several:
        if not facts:
            continue
        began = [at for at in (total.get("began_at"), measured(facts.get("began_at"))) if at]
        arrays = [each for each in _texts(facts.get("arrays")) if JOB_ID.fullmatch(each)]
        total = {
            **{key: total.get(key, 0) + _count(facts.get(key)) for key in ("starts", "stored", "journals")},
            **{key: total.get(key, 0.0) + (measured(facts.get(key)) or 0.0) for key in ("core_s", "usd")},
            "began_at": min(began, default=None),
            "arrays": sorted({*total.get("arrays", ()), *arrays}),
        }
    return total


def facts_of_starts(leases: Mapping[str, Mapping[str, Any]]) -> Facts:
    """Sums the totals of several starts of one array element, and of the earlier starts that their leases include.

    Args:
        leases: Content of each lease, by ``<pod>.<start>``.
    """
    several: list[Mapping[str, Any]] = []
    for name in sorted(leases, key=lambda name: (len(name), name), reverse=True):  # the latest start first
        several.append(facts_of(leases[name]))
        if "earlier" in leases[name]:  # includes all earlier starts
            several.append(_earlier(leases[name]))
            break
    return add_facts(several)


def take_over(leases: Mapping[str, Mapping[str, Any]]) -> Facts:
    """Returns the value of ``earlier`` for a new start's lease. Empty if there are no earlier starts.

    Args:
        leases: Content of the leases of earlier starts of the same element, by ``<pod>.<start>``.
    """
    facts = facts_of_starts(leases)
    took = sorted(taken_over(leases) | leases.keys(), key=lambda name: (len(name), name))
    return {**facts, TOOK: took[-MAX_TOOK:]} if facts else {}


def taken_over(leases: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Returns the names ``<pod>.<start>`` of all starts whose totals these leases include."""
    return {name for lease in leases.values() for name in _texts(_earlier(lease).get(TOOK))}


def recent(record: Mapping[str, Any]) -> dict[str, Facts]:
    """Returns the totals of the starts that a record of ended pods lists separately, by ``<pod>.<start>``."""
    apart = record.get("recent")
    if not isinstance(apart, Mapping):
        return {}
    return {name: dict(facts) for name, facts in apart.items() if isinstance(name, str) and isinstance(facts, Mapping)}


def accounts(leases: Mapping[str, Mapping[str, Any]], record: Mapping[str, Any]) -> dict[str, Facts]:
    """Returns the totals of every start in the history of the run. The campaign's limits are checked against them.

    Args:
        leases: Content of each lease, by ``<pod>.<start>``.
        record: The latest record of ended pods.

    Returns:
        The totals of each start under ``<pod>.<start>``, the totals of its element's earlier starts under
        ``<pod>.<start> earlier``, and the totals of all ended pods under the empty string.
    """
    counted = set(record.get("names", ()))
    took = taken_over(leases)
    ended = [record, *(facts for name, facts in recent(record).items() if name not in took)]
    facts_by_start: dict[str, Facts] = {}
    if ended_facts := add_facts(ended):
        facts_by_start[""] = ended_facts
    for name in newest_starts(leases) - counted:
        facts_by_start[name] = facts_of(leases[name])
        if earlier := _earlier(leases[name]):
            facts_by_start[f"{name} earlier"] = add_facts([earlier])
    return facts_by_start


def counted(name: str, lease: dict[str, Any]) -> Steps[dict[str, Any]]:
    """Returns the lease with an exact ``stored`` count. Includes rollouts stored after the lease was last renewed."""
    if not lease or lease.get("ended"):
        return lease
    return {**lease, "stored": (yield Stored(name, lease))}


def read_record() -> Steps[tuple[int, dict[str, Any]]]:
    """Returns the number and content of the latest record of ended pods, or ``(0, {})`` if there is none.

    Raises:
        FileNotFoundError: The record is listed but cannot be read.
    """
    number = 0
    for _ in range(MAX_LOOKS):
        number = max((int(name) for name in (yield Names(ENDED)) if name.isdigit()), default=0)
        if not number:
            return 0, {}
        try:
            content = yield Read(f"{ENDED}/{number}")
        except ValueError:  # edited by hand, since a linked file is always complete
            content = {}
        if content is not None:
            return number, {**content, "names": _texts(content.get("names"))}
    raise FileNotFoundError(f"{ENDED}/{number}: listed, but cannot be read")


def _earlier(lease: Mapping[str, Any]) -> Mapping[str, Any]:
    earlier = lease.get("earlier")
    return earlier if isinstance(earlier, Mapping) else {}


def _texts(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else 0
