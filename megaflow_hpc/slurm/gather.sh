# Runs after the pods: writes one self-contained trajectories.h5 and cancels the remaining engines.
RUN=@RUN@
role=pods # env.sh runs the setup of this section, because the job is in the partition of pods
@OWN@
set -u
exec "$MEGAFLOW_PYTHON" -m megaflow_hpc gather "$RUN" @ARGUMENTS@
