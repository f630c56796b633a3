# Builds one element's part of a batch of images. Images that it built before a requeue are not built again.
BATCH=@RUN@
RUN=$BATCH
@OWN@
set -u
"$MEGAFLOW_PYTHON" -m megaflow_hpc janitor # remove files that our killed builds left on this node
exec "$MEGAFLOW_PYTHON" -m megaflow_hpc.campaign.image_batch "$BATCH" "$SLURM_ARRAY_TASK_ID"
