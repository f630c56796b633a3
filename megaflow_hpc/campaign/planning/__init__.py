"""Planning up to the point of writing: reads the campaign file, tasks, models and agents, and estimates the cost."""
