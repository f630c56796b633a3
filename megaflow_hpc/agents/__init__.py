"""Agents: what drives a rollout's sandbox with a model's answers, one file per scaffold.

An agent knows a task, a sandbox and the address of its model (:class:`~megaflow_hpc.types.ModelEndpoint`), and nothing
of where they come from. :func:`create` makes one by name.
"""

from megaflow_hpc.agents.registry import NAMES, create

__all__ = ["NAMES", "create"]
