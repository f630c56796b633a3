"""What tests of the report share."""

from __future__ import annotations

ATTACK = (
    "</script><script>document.title='OWNED'</script><img src=x onerror=\"document.title='OWNED'\">"
    "<!--<svg onload=document.title='OWNED'> \x1b]0;OWNED\x07 \u202edekaerts {{ 7*7 }} ' \" & end"
)
"""Markup that would run, an end of script and of comment, a terminal's escape, a turn of direction, a template."""
POLICIES = ("first", "second")
