"""Trajectories for trainers. Reads campaign files and nothing else of the package, as a trainer of your own would."""
