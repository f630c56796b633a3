"""Serves models: engines, the servers that run them, and the gateways through which rollouts reach them.

An *engine* is an inference program (vLLM, SGLang, Transformers, the scripted engine, or an external endpoint). An
*engine server*, or *server* for short, is the process that runs one engine behind a proxy and registers it under
``RUN/endpoints``. In Slurm it is one element of the engine array. A *gateway* runs in every worker rank. It gives each
rollout an address and a key, calls the servers and records every sampled token. Gateways and servers communicate only
through HTTP (:mod:`.engine_api`) and the endpoint files. Engines have virtual environments or images of their own, so
this package imports neither an inference engine nor torch.
"""
