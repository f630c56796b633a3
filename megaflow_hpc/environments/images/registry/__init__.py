"""Talking to registries: an image's manifest and configuration, and its layers, each as the registry keeps it.

Knows no store: what is there already and where bytes go, the caller says.
"""
