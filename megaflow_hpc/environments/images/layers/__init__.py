"""Layers of images: what one step changed, as one file of the store and as a directory that an overlay stacks.

In the store a layer is a *blob*, a tar archive in OCI's form, plain or compressed, under the SHA-256 of its bytes as a
registry names it. On a node it is a directory in the form of an overlay's upper directory. ``packing`` makes the first,
``unpacking`` the second of the first; ``listing`` and ``view`` say what an image of several layers holds, without
unpacking any. The store, the node's cache and builds call.
"""
