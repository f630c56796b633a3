"""Updates a policy's weights from the dataflow's training steps and publishes them.

The trainer writes checkpoints, weight versions and metrics to the run directory. It runs in the engine's environment,
which has torch and transformers, on one rank or on several ranks that share the model.
"""
