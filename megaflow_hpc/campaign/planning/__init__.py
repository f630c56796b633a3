"""Prepares a plan before anything is written: reads the campaign file, tasks, models and agents, and estimates the
cost."""
