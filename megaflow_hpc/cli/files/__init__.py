"""Verbs for trajectory files: ``validate``, ``verify``, ``compact``, ``anonymise``, ``du``, ``export`` and
``import``."""
