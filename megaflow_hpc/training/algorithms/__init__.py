"""Turns rollouts into training data by pure functions of sample groups, a random seed and a JSON state.

The input is groups of samples with rewards and weight versions. The output is the groups that a step trains on, the
dropped samples with reasons, the advantage and weight of each sample, and the tasks to request next. The public names
are :func:`choose`, :func:`advantages` and :class:`Prompts`. This package opens no file, reads no clock and does not
import torch.
"""

from megaflow_hpc.training.algorithms.choice import Choice, choose
from megaflow_hpc.training.algorithms.prompts import Prompts
from megaflow_hpc.training.algorithms.rewards import advantages

__all__ = ["Choice", "Prompts", "advantages", "choose"]
