"""Tasks: the instruction for an agent, the sandbox in which it works, and the verdict on its work.

Planning passes the sources of a campaign to ``loading`` and gets plain :class:`~megaflow_hpc.types.Task` objects, which
are stored in block files. A worker passes a task and a sandbox to ``steps`` and gets a
:class:`~megaflow_hpc.types.Verdict`; ``steps`` calls the agent before each one. ``formats`` defines a task format.
There are three: ``harbor``, ``swebench`` and ``python_class``. Other code does not depend on the format of a task.
``releases`` makes Harbor tasks from real bugs. Campaign, pod, agents and cli use this room. It knows neither models nor
Slurm.
"""
