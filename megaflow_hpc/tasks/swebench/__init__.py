"""Tasks from SWE-bench style JSONL.

``instances`` converts the lines of all supported datasets to a common form. ``plan`` creates tasks and decides how to
test them, using the ``swebench`` package in a separate process (``package``). ``runs`` prepares the checkout, applies
the reference solution, and judges the agent's patch on a clean image. ``format`` is the entry point.
"""
