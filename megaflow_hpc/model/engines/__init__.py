"""Starts, supervises and stops engines. Used by the engine server, and by planning to check ``model:`` sections.

An adapter turns the campaign's ``model:`` section into a ``Launch`` (command, environment variables, address). It may
be wrapped to run in an Apptainer image or across several nodes. ``EngineProcess`` runs it under a lifeline and waits
for its first completion. The result is a process listening on a Unix socket or loopback port, or a one-line cause of
failure.
"""
