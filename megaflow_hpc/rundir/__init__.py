"""The run directory: the paths under RUN, and a typed record for each kind of file, with its only reader and writer.

It takes paths and returns records (``record`` for run.json, ``endpoints``, ``events``, ``marks``, ``weights``,
``training``, ``budget``, ``engine_pool``). ``json_files`` reads all JSON files except run.json and the lines of events.
Blocks and claims belong to the ledger, journals to trajectories. Every room may call this one. It calls ``errors`` and,
for the resolved campaign file, ``config``. It imports neither pydantic nor numpy.
"""
