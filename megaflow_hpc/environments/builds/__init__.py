"""Builds images from Dockerfiles: each step that changes files adds a layer on top of the previous ones.

``builder`` takes a Dockerfile and the files of its base images. ``stages`` executes the steps. ``RUN`` steps run in
sandboxes (``script``, ``workspace``). ``placing`` puts the files of ``COPY`` and ``ADD`` into a layer. ``tree`` is a
program that processes an image's files in a user namespace. Image resolution is given a builder.
"""
