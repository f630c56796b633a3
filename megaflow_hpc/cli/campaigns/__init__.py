"""Verbs that a campaign file, or the run made of it, is handed to: they plan, queue, change and end campaigns."""
