"""Paths and typed records of a run directory (RUN). Each kind of file has one module that reads and writes it.

Modules take paths and return records. Examples are ``record`` (run.json), ``endpoints``, ``events``, ``marks``,
``weights``, ``training``, ``budget`` and ``engine_pool``. ``layout`` defines the paths. It also decodes every JSON file
except run.json and the event files. Blocks and claims belong to ``ledger``, and journals to ``trajectories``. Any
package may import this one. It imports ``errors``, ``host`` and, for the resolved campaign file, ``config``. Importing
it loads neither pydantic nor numpy.
"""
