"""Tasks from SWE-bench style JSONL.

``instances`` reads the lines of all datasets in that family into a common form. ``plan`` creates tasks and decides how
each one is tested, using the ``swebench`` package in a separate process (``package``). ``runs`` prepares the checkout,
applies the reference solution, and judges an agent's patch on a clean image. ``format`` is the entry point.
"""
