"""Starts, supervises and stops engines. The engine server uses this package, and planning validates ``model:`` sections
with it.

An adapter turns the campaign's ``model:`` section into a ``Launch`` (command, environment variables, address). The
launch may be wrapped to run in an Apptainer image or across several nodes. ``EngineProcess`` runs it under a lifeline
and waits for its first completion. The engine then listens on a Unix socket or loopback port. If the start fails, the
result is a cause in one line.
"""
