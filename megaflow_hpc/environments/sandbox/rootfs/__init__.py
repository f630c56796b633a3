"""The root file system of a container: a read-only image under the writable layer of one sandbox.

A :class:`~.rootfs.RootfsFactory` returns a :class:`~.rootfs.Rootfs`, which keeps an image in the node's cache. A
:class:`~.writable.WritableLayer` stores the sandbox's writes in an overlay. If no overlay can be mounted, it stores
them in a copy of the image. While no container runs, the host can edit the layer (``upperdir``). Sandboxes and
verifiers use this package.
"""
