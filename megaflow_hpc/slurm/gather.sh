# Runs after the pods: writes one self-contained trajectories.h5 and cancels the remaining engines. Before the walltime
# ends, it keeps the rows written so far, and the requeued job continues.
RUN=@RUN@
role=pods # env.sh runs the setup of this section, because the job runs in the pods' partition
@OWN@
set -u
@REQUEUE@
rm -f "$RUN/ledger/refused/$SLURM_JOB_ID" # of an earlier start

# USR2: the walltime is near. TERM: the job is preempted or cancelled, and Slurm decides about a requeue.
near=no gather=''
trap 'near=yes; kill -TERM "$gather" 2>/dev/null' USR2
trap 'requeues=no; kill -TERM "$gather" 2>/dev/null' TERM
kept() { stat -c %Y.%s "$RUN/.trajectories.h5.unfinished" 2>/dev/null; }
before=$(kept)

"$MEGAFLOW_PYTHON" -m megaflow_hpc gather "$RUN" @ARGUMENTS@ &
gather=$!
outcome "$gather"
status=$?

# Count consecutive starts that wrote nothing. Any progress resets the count.
count="$RUN/logs/gather-$SLURM_JOB_ID.requeues"
if [ "$status" -eq 0 ] || [ "$(kept)" != "$before" ]; then rm -f "$count"; else printf . >>"$count"; fi
if [ "$status" -eq 0 ] || [ "$near" = no ] || [ "$requeues" = no ]; then exit "$status"; fi
vain=$(wc -c 2>/dev/null <"$count" || echo 0)
if [ "$vain" -gt "$MEGAFLOW_REQUEUES" ]; then
    echo "not requeued: $vain starts in a row wrote nothing; megaflow-hpc resume $RUN --time gather=TIME gives it more time"
    exit "$status"
fi
echo "requeueing the gather job ($vain of $MEGAFLOW_REQUEUES starts in a row wrote nothing)"
again gather requeue "$SLURM_JOB_ID"
exit "$status"
