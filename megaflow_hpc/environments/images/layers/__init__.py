"""Layers: the changes of one build step, as a file in a store or as a directory for an overlay.

In a store, a layer is a *blob*: an OCI layer tar archive, plain or compressed, named by its SHA-256 digest. On a node,
it is a directory in the format of an overlay's upper directory. ``blob`` reads and writes blobs, and ``unpacking``
unpacks them. ``view`` shows the files of an image without unpacking it. The store, the node's cache and builds call
this package.
"""
