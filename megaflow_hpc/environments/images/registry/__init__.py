"""Reads images from registries: manifests, configurations and layers.

This package does not depend on the store. Callers pass one function that tells which layers they have, and one that
receives the missing layers.
"""
