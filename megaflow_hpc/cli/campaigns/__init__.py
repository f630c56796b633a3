"""Verbs that take a campaign file or its run: they plan, queue, change and end campaigns."""
