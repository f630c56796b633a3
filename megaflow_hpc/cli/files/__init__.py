"""Verbs for trajectory files: validate, verify, compact, anonymise, measure, export and import them."""
