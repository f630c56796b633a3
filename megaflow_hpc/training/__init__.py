"""Learning from rollouts, without torch: the dataflow from the journals of a campaign to a trainer, and back.

A :class:`~megaflow_hpc.training.dataflow.Dataflow` makes steps of the rollouts of one policy; any trainer may take
them. In come journals and blocks, out go plans, commits, weight versions and new blocks, all under the run directory.
``dataset`` is for training on a campaign that is over, with PyTorch's loaders.
"""
