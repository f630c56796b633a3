"""Model service: engines and their proxy, registration, and the gateway that records every sampled token.

===============  =====================================================================================
``engines``      how to start each engine (vLLM, SGLang, Transformers, scripted) and reach it
``engine_process``  one of them while it runs; ``causes`` says why it ended
``image``        an engine out of an Apptainer image
``nodes``        an engine over several nodes; ``engine_part`` is what runs on each
``lifeline``     the parent of an engine's processes: they end when it does
``proxy``        the only TCP listener before an engine: TLS, keys, an allow-list of paths
``server``       one element of the engine array: start, health, register, heartbeat, drain
``guests``       a pool's users and their caps; ``turns`` shares the engine's places among them
``registration`` the files by which it is found, or says why not
``loading``      how it comes from one version of the weights to the next
``gateway``      one per worker rank: an address and key per rollout, recording; ``stream`` sends its events
``backend``      what the gateway asks of an engine: the plain endpoints, or render / generate / derender
``router``       which server answers a call
``recorder``     calls become token sequences
``dialects``     the APIs an agent may speak, made of chat completions and into them
``scripted``     an engine that answers from a file, whose form is ``script``'s
``tiny``         makes a small random model for tests; ``gemma`` joins a small real one
===============  =====================================================================================

Nothing here imports an inference engine or torch: engines live in virtual environments of their own.
"""

from megaflow_hpc.model.gateway.server import ModelGateway

__all__ = ["ModelGateway"]
