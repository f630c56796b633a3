"""Layers: the changes of one build step, as one file in a store and as a directory that an overlay stacks.

In a store a layer is a *blob*: a tar archive in OCI's form, plain or compressed, stored under the SHA-256 of its bytes.
On a node it is a directory in the form of an overlay's upper directory. ``packing`` writes blobs and ``unpacking``
unpacks them. ``listing`` and ``view`` tell which files an image has without unpacking it. The store, the node's cache
and builds call this room.
"""
