"""The run directory: the paths under RUN, and one typed record, with its only reader and writer, for each kind of file.

It takes paths and returns records (``record`` for run.json, ``endpoints``, ``events``, ``marks``, ``weights``,
``training``, ``budget``, ``engine_pool``). ``json_files`` reads all JSON files except run.json and the lines of events.
The ledger has blocks and claims, trajectories have journals. Every room may call this one. It calls ``errors`` and, for
the resolved campaign file, ``config``. It imports neither pydantic nor numpy.
"""
