"""Starts, supervises and ends an engine; used by the engine server, and by planning to check ``model:`` sections.

An adapter turns the campaign's ``model:`` section into a ``Launch`` (command, variables, address), which may be wrapped
to run in an Apptainer image or over several nodes. ``EngineProcess`` runs it under a lifeline and waits for its first
completion. The result is a process on a Unix socket or loopback port, or one line that says why it ended.
"""
