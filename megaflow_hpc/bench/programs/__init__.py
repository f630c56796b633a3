"""Programs that benchmarks start as processes of their own: an engine of fixed speed, ranks that dispatch, serve
calls or stage images, and bare ones to compare with. Their arguments and lines of JSON on standard input come in, lines
of JSON or a report in the run directory go out; only the benchmarks, and tests that need a pod without rollouts, start
or import them.
"""
