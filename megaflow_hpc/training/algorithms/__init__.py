"""Data algorithms between rollouts and a trainer: pure functions of groups of samples, seeded, with states in JSON.

Samples with rewards and versions come in; out come the groups that a step trains on, what is dropped and why, an
advantage and a weight for each sample, and the tasks to ask for next. :func:`choose`, :func:`advantages` and
:class:`Prompts` are the doors; nothing here opens a file, knows a clock or imports torch.
"""

from megaflow_hpc.training.algorithms.advantage import advantages
from megaflow_hpc.training.algorithms.choice import Choice, choose
from megaflow_hpc.training.algorithms.prompts import Prompts

__all__ = ["Choice", "Prompts", "advantages", "choose"]
