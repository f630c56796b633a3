"""The engine server: ``python -m megaflow_hpc.model.server RUN``, one element of the engine array.

It reads its assignment from run.json, starts the engine, protects it by a proxy with TLS, keys and a list of allowed
paths, and registers itself under ``RUN/endpoints``. While it serves, it renews its heartbeat and load, loads published
weights, and shares the engine among the users of a pool. It leaves on a signal, at the end of the campaign or when
idle. Slurm or ``megaflow-hpc local`` start it. Other rooms import only the load, for scaling.
"""
