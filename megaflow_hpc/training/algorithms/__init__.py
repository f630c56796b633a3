"""Data algorithms that turn rollouts into training data: pure functions of sample groups, a random seed and a JSON
state.

Their input is samples with rewards and versions. Their output is the groups that a step trains on, the dropped samples
with reasons, each sample's advantage and weight, and the tasks to request next. The public functions are
:func:`choose`, :func:`advantages` and :class:`Prompts`. This package opens no file, reads no clock and does not import
torch.
"""

from megaflow_hpc.training.algorithms.choice import Choice, choose
from megaflow_hpc.training.algorithms.prompts import Prompts
from megaflow_hpc.training.algorithms.rewards import advantages

__all__ = ["Choice", "Prompts", "advantages", "choose"]
