"""Runs commands in one container. A runner inside (``runner.sh``) starts them. FIFOs carry requests and output.

A :class:`~.container.Container` gets Apptainer's command line and starts a runner that waits for commands. Its
:class:`~.dispatcher.CommandDispatcher` runs commands and returns :class:`~megaflow_hpc.types.ExecResult`. This package
does not depend on images, layers or limits.
"""
