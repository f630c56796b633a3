"""Reports on campaigns: figures, charts and one page about rewards, durations, failures, cost and transcripts.

The input is run directories (trajectories, events, leases, commits of trainers) and Slurm's accounting of their jobs.
:class:`~megaflow_hpc.report.figures.RunFigures` are computed from it, typed and bounded. Charts (``charts``), a page
that needs no network (``page``), PNGs and Prometheus' text format (``prometheus``) are made from these figures alone.
Only ``cli`` calls this room. All text of tasks, agents and models is hostile: a page shows it as text, never as markup.
"""
