"""Data algorithms between rollouts and a trainer: pure functions of groups of samples, seeded, with states in JSON.

Samples with rewards and versions come in; out come the groups that a step trains on, what is dropped and why, an
advantage and a weight for each sample, and the tasks to ask for next. ``choose``, ``advantages`` and ``Prompts`` are
the doors; nothing here opens a file, knows a clock or imports torch.
"""
