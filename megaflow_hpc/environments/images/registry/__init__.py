"""Reads images from registries: manifests, configurations and layers.

This package does not depend on the store. Callers pass a function that reports which layers they have, and a function
that receives the missing layers.
"""
