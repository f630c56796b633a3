"""SWE-bench style JSONL as tasks.

``instances`` reads the lines of all data sets of that family into one form. ``plan`` decides how each instance is
tested, by the ``swebench`` package in a separate process (``package``). ``runs`` prepares the checkout, applies the
reference solution, and judges an agent's patch on a clean image. ``format`` is the entry point.
"""
