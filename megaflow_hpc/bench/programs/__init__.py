"""Programs that benchmarks start as processes of their own: ranks that dispatch, and bare ones to compare with. Their
arguments come in, a line or a report in the run directory goes out; only the benchmarks, and tests that need a pod
without rollouts, start or import them.
"""
