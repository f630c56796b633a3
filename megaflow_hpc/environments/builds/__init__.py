"""Builds images from Dockerfiles: each step that changes files makes a layer over the layers before it.

``builder`` takes a Dockerfile and the files of its bases. ``stages`` carries out the steps. ``RUN`` steps run in
sandboxes (``script``, ``workspace``). ``placing`` puts the files of ``COPY`` and ``ADD`` into a layer. ``tree`` is the
program that handles an image's files in a user namespace. Image resolution receives a builder.
"""
