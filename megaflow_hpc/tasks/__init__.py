"""Tasks: the agent's instruction, its sandbox, and the verdict on its work.

Planning passes a campaign's sources to ``loading``, which returns plain :class:`~megaflow_hpc.types.Task` objects. They
are stored in block files. A worker passes a task and a sandbox to ``steps`` and gets a
:class:`~megaflow_hpc.types.Verdict`; ``steps`` runs the agent before verifying each step. ``formats`` defines the
interface of a task format. There are three: ``harbor``, ``swebench`` and ``python_class``. No code outside this package
depends on a task's format. ``releases`` builds Harbor tasks from real bugs. Used by campaign, pod, agents and cli. It
depends on neither models nor Slurm.
"""
