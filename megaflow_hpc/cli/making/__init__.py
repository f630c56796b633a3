"""Verbs that make what campaigns are made of: tasks from files and bugs, images from Dockerfiles and registries."""
