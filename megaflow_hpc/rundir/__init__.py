"""Paths and typed records of a run directory (RUN). Each kind of file is read and written by one module only.

Modules take paths and return records: ``record`` (run.json), ``endpoints``, ``events``, ``marks``, ``weights``,
``training``, ``budget`` and ``engine_pool``. ``json_files`` reads all JSON files except run.json and event lines.
Blocks and claims belong to ``ledger``, journals to ``trajectories``. Every package may import this one. It imports
``errors``, ``host`` and, for the resolved campaign file, ``config``. It loads neither pydantic nor numpy.
"""
