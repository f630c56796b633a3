"""Reads images from registries: manifests, configurations and layers.

This package does not depend on the store. Callers pass functions that tell which layers they have and that receive the
missing ones.
"""
