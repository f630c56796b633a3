"""Creates and maintains campaign files: gather, validate, verify, compact, anonymise, disk usage.

The input is a run directory or a campaign file. The output is a new file, published by rename, or a list of findings.
CLI commands call this package; ``gather`` also runs at the end of a campaign.
"""
