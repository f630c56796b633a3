# A share of a batch of images. What its element built before it was requeued is not built again.
BATCH=@RUN@
RUN=$BATCH
@OWN@
set -u
"$MEGAFLOW_PYTHON" -m megaflow_hpc janitor # what killed builds of ours left on this node
exec "$MEGAFLOW_PYTHON" -m megaflow_hpc.campaign.image_batch "$BATCH" "$SLURM_ARRAY_TASK_ID"
