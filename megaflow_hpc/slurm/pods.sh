# The batch shell is the supervisor outside the MPI world: it alone is signalled, it asks rank 0 to drain, and it
# requeues the element when the pod ended without being done.
RUN=@RUN@
. "$RUN/env.sh"
set -u

# What killed pods of ours left on this node goes first. Our private directory bears this very process's name.
"$MEGAFLOW_PYTHON" -m megaflow_hpc janitor
born=$(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20)
MEGAFLOW_POD_DIR=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/megaflow-pod.$(uname -n).$$-$born.XXXXXXXX") || exit 1
export MEGAFLOW_POD_DIR
export MEGAFLOW_POD="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}@CLUSTER@"
element=${MEGAFLOW_POD%@*} # what the Slurm of this very cluster calls it
export MEGAFLOW_START="${SLURM_RESTART_COUNT:-0}"
trap '[ -z "${elastic:-}" ] || kill "$elastic" 2>/dev/null; rm -rf -- "$MEGAFLOW_POD_DIR"' EXIT

# When the walltime ends, in seconds UTC, so that rank 0 starts nothing that cannot finish. Older Slurms must be asked.
MEGAFLOW_END="${SLURM_JOB_END_TIME:-$(date -d "$(squeue -h -j "$element" -o %e 2>/dev/null | head -n 1)" +%s 2>/dev/null)}"
export MEGAFLOW_END

# USR2: the walltime is near. TERM: preempted or cancelled, and Slurm itself decides about a requeue.
ours=yes
trap ': > "$MEGAFLOW_POD_DIR/drain"' USR2
trap 'ours=no; echo now > "$MEGAFLOW_POD_DIR/drain"' TERM

# Of a campaign whose engine servers grow with what waits, one pod's child lets them go; the others' stand by.
if [ -n "${MEGAFLOW_ELASTIC:-}" ] && [ "$element" = "$MEGAFLOW_POD" ]; then # not at a cluster without servers
    "$MEGAFLOW_PYTHON" -m megaflow_hpc.campaign.autoscaler "$RUN" &
    elastic=$!
fi

# One srun per pod. A lost rank does not end the others; srun does not inherit --cpus-per-task.
srun --mpi="$MEGAFLOW_MPI" --kill-on-bad-exit=0 --no-kill --label \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$MEGAFLOW_PYTHON" -m megaflow_hpc.pod "$RUN" @ENGINES@ &
step=$!
while :; do
    wait "$step"
    status=$?
    kill -0 "$step" 2>/dev/null || break # wait also returns when a trap has run
done

state=$(cat "$MEGAFLOW_POD_DIR/state" 2>/dev/null || echo lost)
echo "pod $MEGAFLOW_POD start $MEGAFLOW_START: $state (srun exit status $status)"
case $state in done | paused) exit 0 ;; esac
[ "$state" = lost ] && "$MEGAFLOW_PYTHON" -m megaflow_hpc janitor
[ -e "$RUN/ledger/cancelled" ] && exit 1
[ -e "$RUN/ledger/leaving/$MEGAFLOW_POD" ] && exit 0 # asked to, by a smaller scale
if [ "$ours" = yes ] && [ "$MEGAFLOW_START" -lt "$MEGAFLOW_REQUEUES" ]; then
    echo "requeueing element ($((MEGAFLOW_START + 1)) of $MEGAFLOW_REQUEUES)"
    scontrol requeue "$element" # not SLURM_JOB_ID: for an array's last element that names the whole array
    sleep 30 # until Slurm ends this shell
fi
exit 1
