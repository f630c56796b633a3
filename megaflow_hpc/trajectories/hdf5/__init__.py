"""The campaign file on disk: its schema, and chunked reading and writing of its columns.

Trajectories, or rows of other files, are written to a file of the schema and published by rename. The schema is the
single table shared by the writer, the readers, the validator and docs/reference/trajectory-format.md. Only the other
packages of ``trajectories`` import this one. It knows nothing about journals or user-facing rows.
"""
