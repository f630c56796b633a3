"""Benchmarks with which a user measures a site; only ``megaflow-hpc bench NAME`` calls them.

A benchmark is a module with ``HELP`` (one line), ``EXAMPLES``, ``add_arguments(parser)`` and ``run(arguments, note)``:
parsed arguments come in, ``note(text)`` says on stderr what is measured, and a list of figures with unit, spread and
goal goes out. What measures this package and no site, compares with peers, counts system calls, injects faults or
drives a Slurm lab lies in ``tests/bench`` of a checkout; ``checkout.from_checkout`` imports it, or says how to get it.
"""

BENCHMARKS: tuple[str, ...] = ("sandbox", "exec", "dispatch", "gateway", "images", "modes", "store", "campaign")
"""Modules of this package that are benchmarks, in the order ``--help`` shows them."""
