"""The model service: engines, the servers that run them, and the gateways through which rollouts reach them.

An *engine* is an inference program (vLLM, SGLang, Transformers, the scripted engine, or an external address). An
*engine server*, or *server* for short, is the process that runs one engine behind a proxy and registers it under
``RUN/endpoints``; in Slurm it is one element of the engine array. A *gateway* runs in every worker rank: it gives each
rollout an address and key, asks the servers and records every sampled token. The dependencies are ``server`` →
``engines`` and ``gateway`` → :mod:`.api`; gateway and servers meet over HTTP and the endpoint files only. Nothing here
imports an inference engine or torch: engines have virtual environments or images of their own.
"""
