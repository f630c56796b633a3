"""Constants shared by the tests of the report."""

from __future__ import annotations

ATTACK = (
    "</script><script>document.title='OWNED'</script><img src=x onerror=\"document.title='OWNED'\">"
    "<!--<svg onload=document.title='OWNED'> \x1b]0;OWNED\x07 \u202edekaerts {{ 7*7 }} ' \" & end"
)
"""Markup that would run, the end of a script and of a comment, a terminal escape, a bidi override, a template."""
POLICIES = ("first", "second")
