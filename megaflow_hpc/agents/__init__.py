"""Agents (scaffolds), which solve a task in a sandbox by a model's answers, one module per scaffold.

A spec comes in from the campaign file, and :func:`create` makes an agent of it for one rollout. Its ``run`` gets a
task, a sandbox and the model's address (:class:`~megaflow_hpc.types.ModelEndpoint`), and returns an ``AgentResult``.
Agents that run Python code get a process each, forked from a zygote; the others run in the event loop of the runner.
The runner uses the room, and planning looks up names in it.
"""

from megaflow_hpc.agents.registry import NAMES, create

__all__ = ["NAMES", "create"]
