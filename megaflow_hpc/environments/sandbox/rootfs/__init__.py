"""The root file system of a container: a read-only image, and the writable layer of one sandbox over it.

A :class:`~.rootfs.RootfsFactory` returns a :class:`~.rootfs.Rootfs`, which holds an image in the node's cache. A
:class:`~.writable.WritableLayer` stores what the sandbox writes: through an overlay or, if none can be mounted, in a
copy of the image. Between two containers the host edits the layer (``upperdir``). Sandboxes and verifiers call.
"""
