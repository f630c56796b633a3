"""The live view of ``watch`` on a terminal.

A thread polls the run (``reader``). A Textual application shows the result (``app``, and ``detail`` for a single
rollout), with a list that renders only visible rows (``tables``). ``words`` formats the status lines.

Text from the run is untrusted. It is escaped and never parsed as markup.
"""
