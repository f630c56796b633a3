"""Images: from what a task names to a SIF file of the store, which sandboxes are started from.

``resolve`` gets the names that tasks use and returns files: found in the store, pulled from a registry, or built, also
of a Dockerfile (``dockerfile``). ``cache`` brings them to a node. Planning and the ``images`` verbs call; nothing here
starts a sandbox.
"""
