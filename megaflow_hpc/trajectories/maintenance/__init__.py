"""Creates and maintains campaign files: gather, validate, verify, compact, anonymise, disk usage.

Each operation takes a run directory or a campaign file. It returns a list of findings, or writes a new file and
publishes it by rename. CLI commands use this package, and ``gather`` also runs at the end of a campaign.
"""
