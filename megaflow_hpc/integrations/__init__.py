"""Classes that other projects load by an import path.

``harbor`` makes this package's sandboxes an environment of Harbor's own runs. Each class takes the other project's
configuration and implements its interface. No other room imports from here.
"""
