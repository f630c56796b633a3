"""The engine server: ``python -m megaflow_hpc.model.server RUN``, one element of the engine array.

It reads its assignment from run.json and starts the engine behind a proxy with TLS, a key and an allowlist of paths.
Then it registers itself under ``RUN/endpoints``. While serving, it renews its heartbeat, reports its load, loads
published weights, and shares the engine among a pool's users. It exits on a signal, at the end of the campaign, or when
idle. Slurm or ``megaflow-hpc local`` starts it. No other package imports this one.
"""
