"""Starts, supervises and stops engines. The engine server uses it, and planning checks ``model:`` sections with it.

An adapter turns the campaign's ``model:`` section into a ``Launch`` (command, environment variables, address). The
launch may be wrapped to run in an Apptainer image or across several nodes. ``EngineProcess`` runs it under a lifeline
and waits for its first completion. The result is a process listening on a Unix socket or loopback port, or a one-line
cause of failure.
"""
