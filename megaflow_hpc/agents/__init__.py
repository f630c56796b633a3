"""Agents (scaffolds) that use a model to solve a task in a sandbox. Each scaffold is one module.

:func:`create` builds an agent for one rollout from its section of the campaign file. The agent's ``run`` takes a task,
a sandbox and the model's address (:class:`~megaflow_hpc.types.ModelEndpoint`), and returns an ``AgentResult``. Agents
that run Python code get their own process, forked from a zygote. All other agents run in the runner's event loop. The
runner uses this package, and planning looks up agent names in it.
"""

from megaflow_hpc.agents.asking import ModelAnswer, ask
from megaflow_hpc.agents.registry import NAMES, create

__all__ = ["NAMES", "ModelAnswer", "ask", "create"]
