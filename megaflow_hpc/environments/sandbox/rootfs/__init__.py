"""The root file system of a container: a read-only image under the writable layer of one sandbox.

A :class:`~.rootfs.RootfsFactory` returns a :class:`~.rootfs.Rootfs`, which keeps an image in the node's cache. A
:class:`~.writable.WritableLayer` stores what the sandbox writes: in an overlay or, if none can be mounted, in a copy of
the image. While no container runs, the host can edit the layer (``upperdir``). Sandboxes and verifiers use this
package.
"""
