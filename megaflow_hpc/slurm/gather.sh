# Runs after the pods: writes one self-contained trajectories.h5 and cancels the remaining engines.
RUN=@RUN@
@OWN@
set -u
exec "$MEGAFLOW_PYTHON" -m megaflow_hpc gather "$RUN" @ARGUMENTS@
