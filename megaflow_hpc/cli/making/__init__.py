"""Verbs that create inputs of campaigns: tasks from files and bugs, images from Dockerfiles and registries."""
