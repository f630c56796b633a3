"""Trains policies on rollouts. Does not import torch, except in ``dataset``, ``trainer`` and the TRL bridge.

A :class:`~megaflow_hpc.training.dataflow.Dataflow` cuts one policy's rollouts into steps for any trainer. It reads
journals and blocks, and writes plans, commits, weight versions and new blocks. All of them are stored in the run
directory. ``dataset`` feeds PyTorch's data loaders from a finished campaign.
"""
