"""Builds images from Dockerfiles. Each step that changes files adds a layer on top of the previous ones.

``builder`` takes a Dockerfile and the files of its base images. ``stages`` executes the steps. ``RUN`` steps run in
sandboxes (``script``, ``workspace``). ``placing`` writes the files of ``COPY`` and ``ADD`` to a layer. ``tree`` is a
program that processes an image's files in a user namespace. The callers of ``images.resolve`` pass it a builder.
"""
