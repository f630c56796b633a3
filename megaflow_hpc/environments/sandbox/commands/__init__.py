"""The commands of one container. A runner inside (``runner.sh``) starts them; FIFOs carry commands and output.

A :class:`~.container.Container` gets Apptainer's command line and starts as a runner that waits for commands. Its
:class:`~.dispatcher.CommandDispatcher` takes commands and returns :class:`~megaflow_hpc.types.ExecResult`. Nothing here
depends on images, layers or limits.
"""
