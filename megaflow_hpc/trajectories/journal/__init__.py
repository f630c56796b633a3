"""Stores results durably while a campaign runs, in one append-only journal per pod start.

Rank 0 of a pod appends each finished rollout as one record and acknowledges it after an fsync. Readers use the ledger's
seals to decide which record is the result of a rollout. Pods, the trainer, ``reading`` and ``maintenance`` use this
package. It does not need HDF5.
"""
