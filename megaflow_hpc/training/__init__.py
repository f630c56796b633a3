"""Training on rollouts, without torch: the dataflow from a campaign's journals to a trainer and back.

A :class:`~megaflow_hpc.training.dataflow.Dataflow` cuts one policy's rollouts into steps for any trainer. It reads
journals and blocks, and writes plans, commits, weight versions and new blocks. All of them are stored in the run
directory. ``dataset`` serves training on a finished campaign with PyTorch's loaders.
"""
