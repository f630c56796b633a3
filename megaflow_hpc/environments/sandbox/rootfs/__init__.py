"""The root of a container: an image, read-only, and the writable layer of one sandbox over it.

:class:`~.access.ImageAccess` returns a hold on an image in the node's cache. :class:`~.writable.WritableLayer` stores
what the sandbox writes: by an overlay or, if none can be mounted, as a copy of the image. Between two containers the
host edits the layer (``upperdir``). The sandbox and the verifier call.
"""
