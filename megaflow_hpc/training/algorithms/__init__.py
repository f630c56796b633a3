"""Data algorithms between rollouts and a trainer: seeded pure functions of groups of samples, with state in JSON.

The input is samples with rewards and versions. The output is the groups that a step trains on, dropped samples with
their causes, an advantage and a weight for each sample, and the tasks to request next. The public functions are
:func:`choose`, :func:`advantages` and :class:`Prompts`. Nothing here opens a file, reads a clock or imports torch.
"""

from megaflow_hpc.training.algorithms.choice import Choice, choose
from megaflow_hpc.training.algorithms.prompts import Prompts
from megaflow_hpc.training.algorithms.rewards import advantages

__all__ = ["Choice", "Prompts", "advantages", "choose"]
