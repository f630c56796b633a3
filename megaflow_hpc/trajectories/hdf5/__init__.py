"""The campaign file on disk: its schema, and writing and reading columns of it chunk by chunk.

Trajectories or rows of other files come in, a file of the schema goes out, published by rename. The schema is the one
table that writer, readers, validator and docs/reference/trajectory-format.md share. Other rooms of ``trajectories``
call it, and nothing here knows of journals or of rows as users see them.
"""
