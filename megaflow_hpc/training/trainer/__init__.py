"""The trainer: it takes steps from the dataflow, moves a policy's weights, and publishes them.

Steps of packed rollouts come in; checkpoints, versions of the weights and metrics go out under ``RUN``. It runs in the
engine's environment, which has torch and transformers, on one rank or on several that share the model.
"""
