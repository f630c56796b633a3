"""Task sets by name: a registry of where they are, their download, and their conversion to tasks.

``registry`` reads the facts of each set from ``registry.yaml``. ``download`` copies a set's files from the Hugging Face
Hub or from an archive. ``converters`` makes Harbor directories of the formats that no task format reads. ``importing``
puts the three together.
"""
