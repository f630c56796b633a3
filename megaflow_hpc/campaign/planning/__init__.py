"""Planning before anything is written: read the campaign file, tasks, models and agents, and estimate the cost."""
