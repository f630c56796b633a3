"""Classes that other projects load by import path or entry point.

``harbor``, ``inspect_ai`` and ``verifiers`` let Harbor, Inspect and verifiers use this package's sandboxes. Each class
takes the other project's configuration and implements its interface. They share ``sandboxes``. No other package imports
this package.
"""
