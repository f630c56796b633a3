"""Reports on campaigns: figures, charts and an HTML page about rewards, durations, failures, cost and transcripts.

Input is run directories (trajectories, events, leases, trainer commits) and Slurm accounting data. They are summarised
in :class:`~megaflow_hpc.report.figures.RunFigures`, which is typed and bounded in size. Charts (``charts``), an offline
page (``page``), PNGs and Prometheus metrics (``files``) are built from these figures alone.

Only ``cli`` uses this package. All text from tasks, agents and models is untrusted. The page displays it as text, never
as markup.
"""
