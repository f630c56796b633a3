"""A thousand pods whose walltime ends together get their requeues through a limit of requests (rl_enable).

Slurm 23.02 and later can limit requests: each user has a bucket of tokens. Here that is a model, because the lab's
Slurm may be older. The second at which a pod drains is computed by the batch script itself.
"""

from __future__ import annotations

import heapq
import re
import subprocess

import pytest

from megaflow_hpc import config
from megaflow_hpc.campaign import job_requests
from megaflow_hpc.campaign.job_environment import environment_script
from megaflow_hpc.slurm import limits, script, site

SETTINGS = "enable_configless,rl_enable,rl_bucket_size=30,rl_refill_rate=2"


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "configuration", lambda cluster="": {"SlurmctldParameters": SETTINGS})


def ends(end: int, window_s: int, pods: int) -> list[int]:
    """Returns MEGAFLOW_END of each element, as ``pods.sh`` computes it."""
    body = script.script(script.Job("pods", {}, run="/run"))
    (lines,) = re.findall(r"^ +slot=.*\n +MEGAFLOW_END=.*\n", body, re.MULTILINE)
    begin = f"for ((i = 0; i < {pods}; i++)); do SLURM_ARRAY_TASK_ID=$i MEGAFLOW_END={end}"
    loop = f"{begin}; {lines} echo $MEGAFLOW_END; done"
    variables = {"megaflow_window_s": str(window_s), "SLURM_ARRAY_TASK_COUNT": str(pods), "PATH": "/usr/bin:/bin"}
    return [int(word) for word in subprocess.check_output(["bash", "-c", loop], text=True, env=variables).split()]


def requeued(drains: list[int], end: int, bucket: float = 30.0, per_s: float = 2.0) -> tuple[int, int]:
    """Plays the end of a walltime: each pod drains, asks for its requeue until it gets it, and starts a minute later.

    Returns:
        The number of pods that were requeued before ``end``, and the number of refused requests.
    """
    queue = [(float(at + n % 25), n, "requeue", 1.0) for n, at in enumerate(drains)]  # rollouts end within 25 s
    heapq.heapify(queue)
    tokens, now, done, refused = bucket, queue[0][0], 0, 0
    while queue:
        at, n, what, pause_s = heapq.heappop(queue)
        tokens, now = min(bucket, tokens + (at - now) * per_s), at
        if what == "requeue" and at >= end:
            continue  # Slurm has ended the job: TIMEOUT
        if tokens < 1:
            refused += 1
            heapq.heappush(queue, (at + pause_s + n % 10 / 10 * pause_s, n, what, min(32.0, 2 * pause_s)))
            continue
        tokens -= 1
        if what == "requeue":
            done += 1
            for _ in range(limits.REQUESTS_OF_A_REQUEUE - 1):
                heapq.heappush(queue, (at + 60.0, n, "start", 1.0))
    return done, refused


@pytest.mark.usefixtures("limited")
def test_a_thousand_pods_are_requeued_within_two_requests_a_second() -> None:
    end, lead_s, pods = 1_800_000_000, 60, 1000
    together = requeued([end - lead_s] * pods, end)
    assert together[0] < 200, "without the window most would end TIMEOUT"
    window_s = limits.requeue_window_s(pods, 24 * 3600.0)
    assert window_s == (3 * 1000 - 30) / 2
    for seconds in (0, 977):  # wherever in its period the walltime ends
        spread = ends(end + seconds, window_s, pods)
        assert max(spread) <= end + seconds
        assert min(spread) > end + seconds - window_s
        assert max(spread.count(second) for second in set(spread)) == 1, "each has a second of its own"
        done, refused = requeued([at - lead_s for at in spread], end + seconds)
        assert done == pods
        assert refused <= pods / 5, "few requests wait"


@pytest.mark.usefixtures("limited")
def test_a_short_walltime_gives_up_a_tenth_at_most() -> None:
    assert limits.requeue_window_s(1000, 3600.0) == 360
    assert limits.requeue_window_s(10, 3600.0) == 0, "so many may ask at once"
    assert limits.requeue_window_s(1000, None) == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", (limits.BUCKET, limits.REFILL_PER_S)),
        ("(null)", (limits.BUCKET, limits.REFILL_PER_S)),
        ("rl_enable", (30, 2)),
        ("RL_ENABLE,rl_bucket_size=60,rl_refill_rate=5,rl_refill_period=2", (60, 2.5)),
        ("rl_bucket_size=60", (limits.BUCKET, limits.REFILL_PER_S)),
    ],
)
def test_the_rate_is_read_from_the_sites_configuration(
    settings: str, expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "configuration", lambda cluster="": {"SlurmctldParameters": settings})
    assert limits.request_rate() == expected


def test_the_window_of_a_campaign_reaches_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "request_rate", lambda: (0.0, 0.1))
    campaign = config.parse({"name": "x", "tasks": "t", "agent": "nop", "slurm": {"pods": {"count": 2, "time": 3}}})
    window_s = job_requests.drain_window_s(campaign)
    assert "megaflow_lead_s=60 megaflow_window_s=18\n" in environment_script(campaign, "pmi2", window_s)


def test_a_few_pods_drain_when_slurm_signals_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "configuration", lambda cluster="": {})
    assert limits.requeue_window_s(30, 3600.0) == 0
    assert limits.requeue_window_s(1000, 24 * 3600.0) == 145
