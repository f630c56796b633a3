"""Imports task sets by name: a registry of the sets, their download, and their conversion to tasks.

``registry.yaml`` describes each set. ``download`` reads the registry, and downloads a set's files from the Hugging Face
Hub or as an archive. ``converters`` converts sets in other formats to Harbor directories. ``importing`` combines both.
``competition`` is copied into tasks, and grades solutions of programming problems.
"""
