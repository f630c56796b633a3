"""The commands of one container: started by a runner inside (``runner.sh``), handed over and read through FIFOs.

A :class:`~.container.Container` gets Apptainer's command line and comes up as a runner that waits; its
:class:`~.dispatcher.CommandDispatcher` gets commands and returns :class:`~megaflow_hpc.types.ExecResult`. The sandbox
around it calls; nothing here knows of images, layers or limits.
"""
