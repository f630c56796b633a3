"""Before anything is made: a campaign file read with its tasks, models and agents, and what will come of it here."""
