"""Implements the campaign file: its schema, and chunked reading and writing of its columns.

Files are published by rename. The schema is the single table shared by the writer, the readers, the validator and
docs/reference/trajectory-format.md. Only the other packages of ``trajectories`` import this one. It is independent of
journals and of the rows shown to users.
"""
