"""Imports task sets by name: a registry of their locations, their download, and their conversion to tasks.

``registry.yaml`` has the facts of each set. ``download`` reads them, and copies a set's files from the Hugging Face Hub
or from an archive. ``converters`` converts formats that no task format reads to Harbor directories. ``importing``
combines both. ``competition`` is copied into tasks, and grades solutions of programming problems.
"""
