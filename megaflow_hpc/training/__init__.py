"""Trains policies on rollouts. Only ``dataset``, ``trainer`` and the TRL bridge import torch.

A :class:`~megaflow_hpc.training.dataflow.Dataflow` cuts one policy's rollouts into steps for any trainer. It reads
journals and blocks, and writes plans, commits, weight versions and new blocks, all in the run directory. ``dataset``
feeds PyTorch's data loaders from a finished campaign.
"""
