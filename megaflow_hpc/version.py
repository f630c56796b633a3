"""The package's version, in a module that imports nothing; ``pyproject.toml`` states the same."""

__version__ = "0.1.0"
