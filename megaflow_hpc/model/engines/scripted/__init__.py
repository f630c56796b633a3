"""Runs an engine without a model. It serves answers from a file over real sockets, with token ids and
log-probabilities.

It reads a script (YAML or JSON) and serves plain completions or vLLM's render, generate and derender. It runs as
``python -m megaflow_hpc.model.engines.scripted`` under a lifeline, like any engine. Tests and benchmarks also run its
application in-process.
"""
