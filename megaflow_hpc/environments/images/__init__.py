"""Images: turns the image names of tasks into files of an image store, from which sandboxes start.

``resolve`` maps names to files: already in the store, pulled from a registry, or built from a Dockerfile
(``dockerfile``). ``cache`` unpacks them on a node. Planning and the ``images`` commands call this room. Nothing here
starts a sandbox.
"""
