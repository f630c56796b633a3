"""Verbs that take a campaign file or a run. They plan, submit, change and end campaigns."""
