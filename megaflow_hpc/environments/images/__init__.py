"""Resolves the image names of tasks to files in an image store, from which sandboxes start.

``resolve`` maps each name to a file: found in the store, pulled from a registry, or built from a Dockerfile
(``dockerfile``). ``cache`` unpacks images on a node. Planning and the ``images`` commands call this package. It does
not start sandboxes.
"""
