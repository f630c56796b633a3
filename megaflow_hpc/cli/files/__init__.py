"""Verbs about trajectory files: how they are checked, shrunk, measured, handed on and brought in from elsewhere."""
