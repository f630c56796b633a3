"""PyTorch datasets of trajectories, for trainers.

A campaign file or run directory comes in, tensors go out. It uses the public reader and nothing else of the package, as
a trainer of your own would, and is the only room that imports torch.
"""
