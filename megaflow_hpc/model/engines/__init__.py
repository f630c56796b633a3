"""How an engine is started, kept and ended: for the engine server, and for what the campaign notes of its versions.

The campaign's ``model:`` section comes in. An adapter turns it into a ``Launch`` (command, variables, address), which
may be wrapped to run in an Apptainer image or over several nodes; ``EngineProcess`` runs it under a lifeline and waits
for its first completion. What goes out is a process on a Unix socket or loopback port, or one line that says why it
ended.
"""
