"""Paths and typed records of a run directory (RUN). One module reads and writes each kind of file.

Modules take paths and return records: ``record`` (run.json), ``endpoints``, ``events``, ``marks``, ``weights``,
``training``, ``budget`` and ``engine_pool``. ``json_files`` reads all JSON files except run.json and event lines.
``ledger`` owns blocks and claims, and ``trajectories`` owns journals. Every package may import this one. It imports
``errors``, ``host`` and, for the resolved campaign file, ``config``. It loads neither pydantic nor numpy.
"""
