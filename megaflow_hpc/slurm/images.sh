# A share of a batch of images. What its element built before it was requeued is not built again.
RUN=@RUN@
@OWN@
set -u
"$MEGAFLOW_PYTHON" -m megaflow_hpc janitor # what killed builds of ours left on this node
exec "$MEGAFLOW_PYTHON" -m megaflow_hpc.campaign.image_batch "$RUN" "$SLURM_ARRAY_TASK_ID"
