"""The trainer. It takes steps from the dataflow, updates a policy's weights and publishes them.

It writes checkpoints, weight versions and metrics to ``RUN``. It runs in the engine's environment, which has torch and
transformers, on one rank or on several ranks that share the model.
"""
