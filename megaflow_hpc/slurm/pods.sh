# The batch shell supervises the pod from outside the MPI world. It alone gets signals, it asks rank 0 to drain, and it
# requeues the element if the pod ends before its work is done.
RUN=@RUN@
role=pods # env.sh runs the setup of this section
@OWN@
set -u
@REQUEUE@

# Remove the files of our killed pods on this node first.
"$MEGAFLOW_PYTHON" -m megaflow_hpc janitor
MEGAFLOW_POD_DIR=$(private_directory) || exit 1
export MEGAFLOW_POD_DIR
export MEGAFLOW_POD="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}@CLUSTER@"
element=${MEGAFLOW_POD%@*} # the element's id on its own cluster
# Slurm sets SLURM_RESTART_COUNT only after a requeue. In a first start it may be inherited from the submitting job.
[ -z "${SLURM_RESTART_COUNT:-}" ] || counted=$(query scontrol --local -o show job "$element" | grep -o ' Restarts=[0-9]*')
[ -z "${counted:-}" ] || SLURM_RESTART_COUNT=${counted#*=}
export MEGAFLOW_START="${SLURM_RESTART_COUNT:-0}"
rm -f "$RUN/ledger/refused/$MEGAFLOW_POD" # of an earlier start
# shellcheck disable=SC2086 # two process ids, if there are any
trap 'kill ${elastic:-} ${timer:-} 2>/dev/null; rm -rf -- "$MEGAFLOW_POD_DIR"' EXIT

# End of the walltime in seconds UTC. Rank 0 starts nothing that cannot finish before it. Older Slurm versions do not set
# the variable, so squeue is asked.
MEGAFLOW_END="${SLURM_JOB_END_TIME:-$(date -d "$(query squeue --local -h -j "$element" -o %e | head -n 1)" +%s 2>/dev/null)}"
export MEGAFLOW_END

# If all pods drained together, they would exceed the request rate that some sites allow a user. So each pod has its own
# second within every period of megaflow_window_s, and drains at the last such second before its walltime ends.
walltime_end=$MEGAFLOW_END
if [ "${megaflow_window_s:-0}" -gt 0 ] && [ -n "$MEGAFLOW_END" ] && [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    slot=$(((SLURM_ARRAY_TASK_ID - ${SLURM_ARRAY_TASK_MIN:-0}) * megaflow_window_s / ${SLURM_ARRAY_TASK_COUNT:-1}))
    MEGAFLOW_END=$((MEGAFLOW_END - (MEGAFLOW_END - slot) % megaflow_window_s))
    left=$((MEGAFLOW_END - ${megaflow_lead_s:-60} - $(date +%s)))
    (
        trap 'kill "$nap" 2>/dev/null; exit' TERM
        sleep "$((left > 0 ? left : 0))" &
        nap=$!
        wait "$nap"
        kill -USR2 $$
    ) &
    timer=$!
fi

# USR2: the walltime is near, or a smaller scale ends this pod. TERM: the job is preempted or cancelled, and Slurm decides
# about a requeue.
# shellcheck disable=SC2329 # traps call it
drain() { echo "$1" >"$MEGAFLOW_POD_DIR/.drain" && mv "$MEGAFLOW_POD_DIR/.drain" "$MEGAFLOW_POD_DIR/drain"; }
trap 'near=yes; if [ -e "$RUN/ledger/leaving/$MEGAFLOW_POD" ]; then drain leaving; else drain walltime; fi' USR2
trap 'requeues=no near=yes; if [ -e "$RUN/ledger/cancelled" ]; then drain cancelled; else drain now; fi' TERM

# If engine servers grow with demand, every pod starts an autoscaler. One of them is active, the rest wait as fallback.
if [ -n "${MEGAFLOW_ELASTIC:-}" ] && [ "$element" = "$MEGAFLOW_POD" ]; then # not on a cluster without servers
    "$MEGAFLOW_PYTHON" -m megaflow_hpc.campaign.autoscaler "$RUN" &
    elastic=$!
fi

# Drop variables of the submitting job or step. They would change the memory and the CPU binding of our step.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
unset SLURM_DISTRIBUTION SLURM_HINT SLURM_MPI_TYPE SLURM_EXPORT_ENV

# A type of srun --mpi fits this MPI if the ranks find each other. Try the types in order until they do. Later starts
# begin with the type that worked.
known="$RUN/ledger/mpi@CLUSTER@" why="$MEGAFLOW_POD_DIR/why" log=$(readlink /proc/$$/fd/1) seen=
# The file's content is untrusted. It is used only if it equals one of the types that are tried anyway.
if [ -f "$known" ]; then worked=$(head -c 64 "$known" | tr -d '\0'); fi
case " $MEGAFLOW_MPI " in *" ${worked:-of this file} "*) MEGAFLOW_MPI="$worked $MEGAFLOW_MPI" ;; esac
for MEGAFLOW_MPI in $MEGAFLOW_MPI; do
    case "$seen " in *" $MEGAFLOW_MPI "*) continue ;; esac
    seen="$seen $MEGAFLOW_MPI"
    # One srun per pod. A lost rank does not end the others, whatever the site's WaitTime. srun does not inherit
    # --cpus-per-task. --export=ALL: the ranks need the variables above, whatever --export the job was submitted with.
    # shellcheck disable=SC2086 # env.sh sets words without blanks
    srun --export=ALL --mpi="$MEGAFLOW_MPI" --kill-on-bad-exit=0 --no-kill --wait=0 --label \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        "$MEGAFLOW_PYTHON" -m megaflow_hpc.pod "$RUN" @ENGINES@ &
    step=$!
    outcome "$step"
    status=$?
    if [ -e "$MEGAFLOW_POD_DIR/world" ]; then
        [ -z "${tried:-}" ] || { echo "$MEGAFLOW_MPI" >"$known.$MEGAFLOW_POD" && mv "$known.$MEGAFLOW_POD" "$known"; }
        break
    fi
    [ "${near:-no}" = no ] || break
    tried=yes
    # Keep the first failure that is not "ranks do not find each other". It explains more than later failures.
    [ -e "$why" ] || tail -c 4000 "$log" 2>/dev/null | grep "pod: MPI sees" >/dev/null ||
        { echo "$(uname -n) $status $log" && tail -c 4000 "$log"; } 2>/dev/null >"$why"
    echo "no world of ranks by srun --mpi=$MEGAFLOW_MPI (srun exit status $status)"
done

[ ! -e "$MEGAFLOW_POD_DIR/preempted" ] || near=yes preempted=yes
state=$(cat "$MEGAFLOW_POD_DIR/state" 2>/dev/null || echo lost)
echo "pod $MEGAFLOW_POD start $MEGAFLOW_START: $state (srun exit status $status)"
case $state in done | paused) exit 0 ;; esac
if [ ! -e "$RUN/run.json" ]; then # do not create the directory again
    echo "$RUN was deleted or moved away"
    exit 1
fi
# Slurm considered this node lost and restarted the element on another. The job belongs to that start.
for lease in "$RUN/ledger/leases/$MEGAFLOW_POD".*; do
    later=${lease##*.}
    case $later in '' | *[!0-9]* | ??????????*) continue ;; esac
    [ "$later" -le "$MEGAFLOW_START" ] || state=superseded
done
if [ "$state" = lost ] || [ "$state" = superseded ]; then
    "$MEGAFLOW_PYTHON" -m megaflow_hpc janitor
    if [ "$state" = lost ] && [ ! -e "$RUN/ledger/leases/$MEGAFLOW_POD.$MEGAFLOW_START" ]; then # rank 0 wrote no lease
        mkdir -p "$RUN/ledger/unstarted"
        [ -e "$why" ] || { echo "$(uname -n) $status $log" && tail -c 4000 "$log"; } 2>/dev/null >"$why"
        cp "$why" "$RUN/ledger/unstarted/.$MEGAFLOW_POD" &&
            mv "$RUN/ledger/unstarted/.$MEGAFLOW_POD" "$RUN/ledger/unstarted/$MEGAFLOW_POD"
    fi
fi
[ -e "$RUN/ledger/cancelled" ] && exit 1
[ -e "$RUN/ledger/leaving/$MEGAFLOW_POD" ] && exit 0 # ended by a smaller scale
[ "$state" = superseded ] && exit 1
[ "$requeues" = yes ] || exit 1
# No rollout was requested for a long time. If a trainer is queued, hold this element. The trainer releases it at its start.
if [ "$state" = drained ] && [ "${near:-no}" = no ] && [ "$element" = "$MEGAFLOW_POD" ]; then
    for open in "$RUN"/ledger/open/*; do
        [ -n "$(find "$open" -mmin +10 2>/dev/null)" ] || continue
        policy=${open##*/}
        case $policy in *$'\n'*) continue ;; esac # grep would take it for two patterns
        case $(head -c 6 "$RUN/training/$policy/last" 2>/dev/null) in
        failed | 'lost '*) given_up=$policy ;;
        *) grep -qsF -e "\"policy\": \"$policy\"" "$RUN"/ledger/jobs/*.json && awaited=$policy ;;
        esac
    done
    if [ -n "${awaited:-}" ]; then
        echo "held until the trainer of $awaited starts"
        : >"$RUN/logs/pod-$element.held"
        again pod requeuehold "$element" "$MEGAFLOW_POD"
        exit 1
    elif [ -n "${given_up:-}" ]; then
        echo "the trainer of $given_up has failed and is not requeued"
        exit 1
    fi
fi
# Count consecutive starts that stored nothing, unless Slurm has preempted them. Any progress resets the count.
count="$RUN/logs/pod-$element.requeues"
if [ -e "$MEGAFLOW_POD_DIR/progress" ]; then rm -f "$count"; elif [ -z "${preempted:-}" ]; then printf . >>"$count"; fi
vain=$(wc -c 2>/dev/null <"$count" || echo 0)
if [ "$vain" -le "$MEGAFLOW_REQUEUES" ]; then
    echo "requeueing element (${vain:-0} of $MEGAFLOW_REQUEUES in a row that stored nothing)"
    again pod requeue "$element" "$MEGAFLOW_POD" # not SLURM_JOB_ID, which is the whole array's id in its last element
else
    echo "not requeued: $vain starts in a row stored nothing; megaflow-hpc resume starts it again (--time: for longer)"
fi
exit 1
