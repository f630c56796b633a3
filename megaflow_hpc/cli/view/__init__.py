"""The live view of ``watch`` on a terminal.

A thread reads the run (``reader``). A Textual application shows it (``app``, and ``detail`` for one rollout), with a
list that renders only the visible rows (``rows``, ``tables``). ``words`` has the texts and colours of both. Text from
the run is untrusted: it is escaped and never parsed as markup.
"""
