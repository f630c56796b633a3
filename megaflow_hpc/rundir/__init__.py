"""The run directory: the paths under RUN, and one typed record, with its only reader and writer, for each kind of file.

In come paths; out go records (``record`` for run.json, ``endpoints``, ``events``, ``marks``, ``weights``, ``training``,
``budget``, ``engine_pool``). Blocks and claims are the ledger's, journals those of trajectories. Every room may call
this one; it calls none but ``errors``, and ``config`` when the resolved campaign file is asked for, and imports neither
pydantic nor numpy.
"""
