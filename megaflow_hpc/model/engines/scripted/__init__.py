"""An engine without a model: it answers from a file, with real sockets, token ids and log-probabilities.

It reads a script (YAML or JSON) and serves plain completions or vLLM's render, generate and derender. It runs as
``python -m megaflow_hpc.model.engines.scripted`` under the same lifeline as any engine; tests and benchmarks also run
its application in their own process.
"""
