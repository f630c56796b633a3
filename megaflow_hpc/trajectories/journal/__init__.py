"""The durable record of a running campaign: one append-only journal per start of a pod.

Rank 0 of a pod appends each finished rollout as one record and acknowledges it after an fsync. Readers decide which
record is the result of a rollout, given the ledger's seals. Pods, ``reading``, ``maintenance`` and the trainer's side
call this room; none of it needs HDF5.
"""
