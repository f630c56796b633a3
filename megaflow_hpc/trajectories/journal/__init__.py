"""The durable record of a running campaign: append-only journals, one per start of a pod, and their shards.

Rank 0 of a pod appends each finished rollout as one record and acknowledges it after an fsync; parts that are full are
copied to HDF5 shards by a child process. Out come the winners: which record of which journal is the result of a
rollout, given the ledger's seals. Pods, ``reading`` and ``maintenance`` may call it; only the shards need HDF5.
"""
