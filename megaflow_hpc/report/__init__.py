"""What a campaign was, as figures, pictures and one page: rewards, durations, failures, cost, stragglers, transcripts.

In come run directories (trajectories, events, leases, commits of trainers) and what Slurm's accounting says of their
jobs; out come :class:`~megaflow_hpc.report.figures.RunFigures`, typed and bounded, and of them alone charts
(``charts``), a page that needs no network (``page``), PNGs and the text of Prometheus' format (``prometheus``). Only
``cli`` calls it. Everything that tasks, agents and models wrote is hostile: it reaches a page as text, never as markup.
"""
