"""Classes that other projects load by import path.

``harbor`` lets Harbor runs use this package's sandboxes as their environment. Each class takes the other project's
configuration and implements its interface. No other package imports this package.
"""
