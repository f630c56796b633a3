"""An engine without a model: it answers from a file, with real sockets, token ids and log-probabilities.

A script comes in (YAML or JSON); plain completions or vLLM's render, generate and derender go out over HTTP. It runs as
``python -m megaflow_hpc.model.engines.scripted`` under the same lifeline as any engine; tests and benchmarks also build
its application in their own process.
"""
