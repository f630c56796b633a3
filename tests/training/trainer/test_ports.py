"""Ranks of one node communicate on the loopback: no process listens at a network address."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaflow_hpc.slurm import script
from tests.support.torch_ranks import CLOSED, LOOPBACK, run_apart

SCRIPT = r"""
import json, os
from megaflow_hpc.training.trainer.model import join

ranks = join()
met = ranks.gather(ranks.rank)
agent = os.getppid()
family = {str(agent), *open(f"/proc/{agent}/task/{agent}/children").read().split()}
ours = set()
for process in family:
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        try:
            ours.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
        except OSError:
            pass
listening = []
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").readlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in ours:
            listening.append(words[1].partition(":")[0])
ranks.barrier()
if ranks.first:
    print(json.dumps({"met": met, "listening": listening}), flush=True)
ranks.leave()
"""


@pytest.mark.slow
def test_two_ranks_listen_at_the_loopback_alone(tmp_path: Path) -> None:
    found = run_apart(SCRIPT, tmp_path, ranks=2)
    assert found["met"] == [0, 1]
    assert set(found["listening"]) == {"0100007F"}, "127.0.0.1, as /proc/net/tcp writes it"


def test_the_batch_script_starts_ranks_in_this_way() -> None:
    text = script.by_hand("trainer")
    assert set(CLOSED) <= set(re.findall(r"--[a-z0-9-]+=[\w.=]+", text))
    assert all(f"{name}={value}" in text for name, value in LOOPBACK.items())
