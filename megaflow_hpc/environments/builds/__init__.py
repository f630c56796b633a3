"""Images built of Dockerfiles: the steps of one run in a sandbox over the image of its ``FROM``.

``builder`` gets a Dockerfile that was read and the files of its bases, and writes a SIF. ``script`` says what a step is
to the sandbox's shell, ``layers`` makes the tree that is left (an image's files and what was written over them) into an
image, by a program in the user namespace that owns it (``tree``). Image resolution is handed a builder.
"""
