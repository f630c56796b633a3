"""Verbs for trajectory files: ``validate``, ``compact``, ``anonymise``, ``du``, ``export`` and
``import``."""
