# After the pods: one self-contained trajectories.h5; engines that remain are cancelled.
set -u
RUN=@RUN@
. "$RUN/env.sh"
exec "$MEGAFLOW_PYTHON" -m megaflow_hpc gather "$RUN" --end-servers
