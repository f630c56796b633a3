"""Making and keeping campaign files: gather, validate, verify, compact, anonymise, disk usage.

A run directory or a campaign file comes in; a new file, published by rename, or a list of findings goes out. Called by
verbs, and ``gather`` also at the end of a campaign.
"""
