"""The live view of ``watch`` on a terminal.

A thread polls the run (``reader``). A Textual application shows it (``app``, and ``detail`` for one rollout), with a
list that renders only the visible rows (``tables``). ``words`` holds the text and colours of the status lines. Text
from the run is untrusted: it is escaped and never parsed as markup.
"""
