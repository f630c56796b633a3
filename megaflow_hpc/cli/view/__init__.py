"""The live view of ``watch`` on a terminal: a thread that reads the run (``reader``), and an application of Textual
that shows what it read (``app``, and ``detail`` for one rollout), with a list that makes only the rows it shows
(``rows``, ``tables``). Words and colours of both are in ``words``. Texts of others come escaped and never as markup.
"""
