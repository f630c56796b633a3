"""SWE-bench style JSONL as tasks. ``instances`` reads the lines of all data sets of that family into one form,
``plan`` settles with the ``swebench`` package (``package``, in a process of its own) how each is tested, ``runs``
prepares the checkout, applies the reference solution, and judges an agent's patch on a clean image. ``format`` is the
door.
"""
