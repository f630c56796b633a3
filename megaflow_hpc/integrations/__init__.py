"""Doors for other projects: classes that they load by an import path. Imported by them, never by this package."""
