# Runs one engine server. It registers when it is healthy, drains on the signal, and exits when the campaign is finished.
RUN=@RUN@
role=@SECTION@ # env.sh runs the setup of this section
@OWN@
set -u
@REQUEUE@

# Not SLURM_JOB_ID, which is the whole array's id in its last element.
element="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
rm -f "$RUN/ledger/refused/$element" # of an earlier start

# USR2: the walltime is near, and the element continues in another allocation. TERM: the job is preempted or cancelled, and
# Slurm decides about a requeue.
drained=no server=''
trap 'drained=yes; kill -TERM "$server" 2>/dev/null' USR2
trap 'requeues=no; kill -TERM "$server" 2>/dev/null' TERM

"$MEGAFLOW_PYTHON" -m megaflow_hpc.model.server "$RUN" @INDEX@ &
server=$!
outcome "$server"
status=$?

echo "server ${SLURM_ARRAY_TASK_ID:-0}: exit status $status"
if "$MEGAFLOW_PYTHON" -m megaflow_hpc.rundir.marks "$RUN"; then exit 0; fi # finished or cancelled
if [ "$status" -eq 75 ]; then # no requests: wait in the queue, held, until a pod releases it
    again server requeuehold "$element"
    exit 0
fi
# 2: an error in the campaign or the installation, which would occur on any node.
[ "$status" -eq 2 ] && exit 2
if { [ "$status" -ne 0 ] || [ "$drained" = yes ]; } && [ "$requeues" = yes ]; then
    count="$RUN/logs/server-$((@BASE@ + ${SLURM_ARRAY_TASK_ID:-0})).requeues"
    # Count consecutive failures of this server, whichever job it was in. A start that the walltime ended or that served for an hour resets the count.
    if { [ "$status" -eq 0 ] && [ "$drained" = yes ]; } || [ "$SECONDS" -ge 3600 ]; then rm -f "$count"; else printf . >>"$count"; fi
    vain=$(wc -c 2>/dev/null <"$count" || echo 0)
    if [ "$vain" -le "$MEGAFLOW_REQUEUES" ]; then
        echo "requeueing element ($vain of $MEGAFLOW_REQUEUES failures in a row)"
        again server requeue "$element"
    fi
fi
exit "$status"
