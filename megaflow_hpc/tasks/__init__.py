"""Tasks: what an agent is asked, in which sandbox, and what its work is worth. Planning hands in the sources of a
campaign (``loading``) and gets plain :class:`~megaflow_hpc.types.Task` objects that travel in block files; a runner
hands in a task and a sandbox (``steps``) and gets a :class:`~megaflow_hpc.types.Verdict`, after each step of which
its agent was called. ``formats`` says what a task format is; ``harbor``, ``swebench`` and ``python_class`` are the
three, and nobody else asks which one a task has. ``releases`` makes Harbor tasks of real bugs. Used by campaign, pod,
agents and cli; it knows neither models nor Slurm.
"""
