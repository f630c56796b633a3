"""Agents (scaffolds) that solve a task in a sandbox with the help of a model, one module per scaffold.

:func:`create` builds an agent for one rollout from its section of the campaign file. The agent's ``run`` gets a task, a
sandbox and the model's address (:class:`~megaflow_hpc.types.ModelEndpoint`), and returns an ``AgentResult``. Agents
that run Python code get their own process, forked from a zygote. The others run in the runner's event loop. The runner
uses this package, and planning looks up agent names in it.
"""

from megaflow_hpc.agents.asking import ModelAnswer, ask
from megaflow_hpc.agents.registry import NAMES, create

__all__ = ["NAMES", "ModelAnswer", "ask", "create"]
