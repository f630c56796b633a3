"""Verbs for trajectory files: check, compact, measure, export and import."""
