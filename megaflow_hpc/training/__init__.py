"""Trains policies on rollouts. Only ``dataset``, ``trainer`` and the TRL bridge import torch.

A :class:`~megaflow_hpc.training.dataflow.Dataflow` provides any trainer with the training steps of one policy. It reads
journals and the ledger's blocks. It writes step plans, commits, weight versions and new blocks. All these files are in
the run directory. ``dataset`` feeds PyTorch's data loaders from a finished campaign.
"""
