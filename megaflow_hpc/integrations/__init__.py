"""Doors for other projects: classes that they load by an import path. ``harbor`` makes our sandboxes an environment
of Harbor's own runs. What comes in is the other project's configuration, what goes out is its interface; nothing of
this package imports from here.
"""
