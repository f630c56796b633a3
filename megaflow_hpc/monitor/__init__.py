"""What a campaign is doing, read from its run directory; asks nothing of Slurm by itself."""
