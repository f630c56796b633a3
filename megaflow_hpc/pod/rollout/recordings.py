"""Opens the recorded campaigns that answer policies with ``engine: replay``."""

from __future__ import annotations

from collections.abc import Mapping

from megaflow_hpc.config import Policy
from megaflow_hpc.model.gateway.replay import Replay
from megaflow_hpc.trajectory import Trajectory


class StoredRecordings:
    """Recorded rollouts of a run directory or a trajectories file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def trajectory(self, rollout_id: str) -> Trajectory | None:
        """Returns a recorded rollout, if there is one of this id.

        Raises:
            ConfigError: the recorded campaign cannot be read.
        """
        from megaflow_hpc.trajectories import open_trajectories  # brings h5py and numpy, which no other runner needs

        with open_trajectories(self._path) as store:
            return store[rollout_id].trajectory() if rollout_id in store else None


def replays_of(policies: Mapping[str, Policy]) -> dict[str, Replay]:
    """Returns the replay of each policy whose engine is ``replay``, by its name."""
    found = {}
    for name, policy in policies.items():
        if policy.model is not None and policy.model.engine == "replay":
            args = policy.model.args
            recordings = StoredRecordings(str(policy.model.path))
            found[name] = Replay(recordings, str(args.get("policy", "")), args.get("diverged") == "answer")
    return found
