"""Reports on campaigns: figures, charts and an HTML page about rewards, durations, failures, cost and transcripts.

The input is run directories (trajectories, events, leases, trainer commits) and Slurm accounting data of their jobs.
They are condensed into :class:`~megaflow_hpc.report.figures.RunFigures`, which is typed and bounded in size. Charts
(``charts``), an offline page (``page``), PNGs and Prometheus metrics (``prometheus``) are built from these figures
alone. Only ``cli`` uses this package. All text from tasks, agents and models is untrusted: a page displays it as text,
never as markup.
"""
