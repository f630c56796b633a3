"""Imports task sets by name: a registry of their locations, their download, and their conversion to tasks.

``registry`` reads the facts of each set from ``registry.yaml``. ``download`` copies a set's files from the Hugging Face
Hub or from an archive. ``converters`` converts formats that no task format reads to Harbor directories. ``importing``
combines the three.
"""
