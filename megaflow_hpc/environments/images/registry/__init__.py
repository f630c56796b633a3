"""Reads images from registries: manifests, configurations and layers.

It knows no store. The caller passes functions that tell which layers are present and that take the others.
"""
