# After the pods: one self-contained trajectories.h5; engines that remain are cancelled.
RUN=@RUN@
@OWN@
set -u
exec "$MEGAFLOW_PYTHON" -m megaflow_hpc gather "$RUN" @ARGUMENTS@
