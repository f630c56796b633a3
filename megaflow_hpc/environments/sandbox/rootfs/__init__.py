"""The root of a container: an image, read-only, and the writable layer of one sandbox over it.

:class:`~.access.ImageAccess` gets an image and returns a hold on it in the cheapest form this node allows;
:class:`~.writable.WritableLayer` is what the sandbox writes, by an overlay or, where there is none, as a copy of the
image. Between two containers the host edits the layer (``upperdir``). The sandbox and the verifier call.
"""
