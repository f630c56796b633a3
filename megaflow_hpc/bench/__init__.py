"""Benchmarks of the product beside its peers, one module each; ``megaflow-hpc bench NAME`` runs them.

A benchmark module offers ``HELP`` (one line), ``add_arguments(parser)`` and
``run(arguments, note) -> list[Figure]``, where ``note(text)`` says on stderr what is being measured.
"""

BENCHMARKS: tuple[str, ...] = ("sandbox", "exec", "dispatch", "gateway", "images", "modes", "store", "campaign")
"""Modules of this package that are benchmarks, in the order ``--help`` shows them."""
