"""Tasks. Each has an instruction for the agent, a sandbox, and tests that judge the agent's work.

During planning, ``loading`` reads a campaign's sources and returns plain :class:`~megaflow_hpc.types.Task` objects,
which are stored in block files. A worker passes a task and a sandbox to ``steps``, which runs the agent, verifies its
work and returns a :class:`~megaflow_hpc.types.Verdict`. ``formats`` defines the interface of task formats. The formats
are ``harbor``, ``swebench`` and ``python_class``. No code outside this package depends on the format of a task.
``releases`` builds Harbor tasks from real bugs. This package does not depend on models or Slurm.
"""
