# One engine server: it registers when healthy, drains on the signal, and leaves when the campaign is finished.
RUN=@RUN@
@OWN@
set -u

# Not SLURM_JOB_ID, which for an array's last element names the whole array.
element="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"

# USR2: the walltime is near, the element goes on in another allocation. TERM: preempted or cancelled, and Slurm decides.
ours=yes
drained=no
trap 'drained=yes; kill -TERM "$server" 2>/dev/null' USR2
trap 'ours=no; kill -TERM "$server" 2>/dev/null' TERM

"$MEGAFLOW_PYTHON" -m megaflow_hpc.model.server "$RUN" @INDEX@ &
server=$!
while :; do
    wait "$server"
    status=$?
    kill -0 "$server" 2>/dev/null || break # wait also returns when a trap has run
done

echo "server ${SLURM_ARRAY_TASK_ID:-0}: exit status $status"
if "$MEGAFLOW_PYTHON" -m megaflow_hpc.rundir.marks "$RUN"; then exit 0; fi # finished or cancelled
if [ "$status" -eq 75 ]; then # nobody asks: it waits in the queue, held, until somebody does
    scontrol requeuehold "$element"
    sleep 30 # until Slurm ends this shell
    exit 0
fi
# 2 is a mistake in the campaign or the installation: another node would say the same.
[ "$status" -eq 2 ] && exit 2
if { [ "$status" -ne 0 ] || [ "$drained" = yes ]; } && [ "$ours" = yes ]; then
    count="$RUN/logs/server-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}_${SLURM_ARRAY_TASK_ID:-0}.requeues"
    # Failures in a row are counted, not what a walltime ended or served for an hour.
    if { [ "$status" -eq 0 ] && [ "$drained" = yes ]; } || [ "$SECONDS" -ge 3600 ]; then rm -f "$count"; else printf . >>"$count"; fi
    vain=$(wc -c 2>/dev/null <"$count" || echo 0)
    if [ "$vain" -le "$MEGAFLOW_REQUEUES" ]; then
        echo "requeueing element ($vain of $MEGAFLOW_REQUEUES failures in a row)"
        scontrol requeue "$element"
        sleep 30
    fi
fi
exit "$status"
