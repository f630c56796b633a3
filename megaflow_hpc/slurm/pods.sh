# The batch shell is the supervisor outside the MPI world: it alone is signalled, it asks rank 0 to drain, and it
# requeues the element when the pod ended without being done.
RUN=@RUN@
@OWN@
set -u

# What killed pods of ours left on this node goes first. Our private directory bears this very process's name.
"$MEGAFLOW_PYTHON" -m megaflow_hpc janitor
born=$(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20)
MEGAFLOW_POD_DIR=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/megaflow-pod.$(uname -n).$$-$born.XXXXXXXX") || exit 1
export MEGAFLOW_POD_DIR
export MEGAFLOW_POD="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}@CLUSTER@"
element=${MEGAFLOW_POD%@*} # what the Slurm of this very cluster calls it
# Slurm sets the count in a start that is not the first; else it is that of a job from inside which this one was queued.
[ -z "${SLURM_RESTART_COUNT:-}" ] || counted=$(scontrol -o show job "$element" 2>/dev/null | grep -o ' Restarts=[0-9]*')
[ -z "${counted:-}" ] || SLURM_RESTART_COUNT=${counted#*=}
export MEGAFLOW_START="${SLURM_RESTART_COUNT:-0}"
trap '[ -z "${elastic:-}" ] || kill "$elastic" 2>/dev/null; rm -rf -- "$MEGAFLOW_POD_DIR"' EXIT

# When the walltime ends, in seconds UTC, so that rank 0 starts nothing that cannot finish. Older Slurms must be asked.
MEGAFLOW_END="${SLURM_JOB_END_TIME:-$(date -d "$(squeue -h -j "$element" -o %e 2>/dev/null | head -n 1)" +%s 2>/dev/null)}"
export MEGAFLOW_END

# USR2: the walltime is near, or scale lets this pod go. TERM: preempted or cancelled, and Slurm itself decides about a
# requeue. A job that runs this script among other things is its user's, who decides as well.
case $(cat "/proc/$PPID/comm" 2>/dev/null) in slurmstepd*) ours=yes ;; *) ours=no ;; esac
# shellcheck disable=SC2329 # traps call it
drain() { echo "$1" >"$MEGAFLOW_POD_DIR/.drain" && mv "$MEGAFLOW_POD_DIR/.drain" "$MEGAFLOW_POD_DIR/drain"; }
trap 'near=yes; if [ -e "$RUN/ledger/leaving/$MEGAFLOW_POD" ]; then drain leaving; else drain walltime; fi' USR2
trap 'ours=no near=yes; if [ -e "$RUN/ledger/cancelled" ]; then drain cancelled; else drain now; fi' TERM

# Of a campaign whose engine servers grow with what waits, one pod's child lets them go; the others' stand by.
if [ -n "${MEGAFLOW_ELASTIC:-}" ] && [ "$element" = "$MEGAFLOW_POD" ]; then # not at a cluster without servers
    "$MEGAFLOW_PYTHON" -m megaflow_hpc.campaign.autoscaler "$RUN" &
    elastic=$!
fi

# What a job or step around the one that queued this left behind would decide about memory and binding of the step.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
unset SLURM_DISTRIBUTION SLURM_HINT SLURM_MPI_TYPE SLURM_EXPORT_ENV

# Which type of srun --mpi this MPI speaks is certain once its ranks have found each other. Of several the next is tried
# until they do; a later start begins with what worked.
known="$RUN/ledger/mpi@CLUSTER@" why="$MEGAFLOW_POD_DIR/why" log=$(readlink /proc/$$/fd/1) seen=
# A word of that file is one of the types that are tried anyway, or nothing: what it holds is split into words here.
if [ -f "$known" ]; then worked=$(head -c 64 "$known" | tr -d '\0'); fi
case " $MEGAFLOW_MPI " in *" ${worked:-of this file} "*) MEGAFLOW_MPI="$worked $MEGAFLOW_MPI" ;; esac
for MEGAFLOW_MPI in $MEGAFLOW_MPI; do
    case "$seen " in *" $MEGAFLOW_MPI "*) continue ;; esac
    seen="$seen $MEGAFLOW_MPI"
    # One srun per pod. A lost rank does not end the others; srun does not inherit --cpus-per-task. --export: whatever the
    # job was queued with, the ranks need what stands above.
    srun --export=ALL --mpi="$MEGAFLOW_MPI" --kill-on-bad-exit=0 --no-kill --label \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "$MEGAFLOW_PYTHON" -m megaflow_hpc.pod "$RUN" @ENGINES@ &
    step=$!
    while :; do
        wait "$step"
        status=$?
        kill -0 "$step" 2>/dev/null || break # wait also returns when a trap has run
    done
    if [ -e "$MEGAFLOW_POD_DIR/world" ]; then
        [ -z "${tried:-}" ] || { echo "$MEGAFLOW_MPI" >"$known.$MEGAFLOW_POD" && mv "$known.$MEGAFLOW_POD" "$known"; }
        break
    fi
    [ "${near:-no}" = no ] || break
    tried=yes
    # The first that fails otherwise than by ranks which do not find each other tells more than those after it.
    [ -e "$why" ] || tail -c 4000 "$log" 2>/dev/null | grep "pod: MPI sees" >/dev/null ||
        { echo "$(uname -n) $status $log" && tail -c 4000 "$log"; } 2>/dev/null >"$why"
    echo "no world of ranks by srun --mpi=$MEGAFLOW_MPI (srun exit status $status)"
done

state=$(cat "$MEGAFLOW_POD_DIR/state" 2>/dev/null || echo lost)
echo "pod $MEGAFLOW_POD start $MEGAFLOW_START: $state (srun exit status $status)"
case $state in done | paused) exit 0 ;; esac
if [ ! -e "$RUN/run.json" ]; then # nothing of it is to be made anew
    echo "$RUN was deleted or moved away"
    exit 1
fi
if [ "$state" = lost ]; then
    "$MEGAFLOW_PYTHON" -m megaflow_hpc janitor
    if [ ! -e "$RUN/ledger/leases/$MEGAFLOW_POD.$MEGAFLOW_START" ]; then # rank 0 did not get as far as to its lease
        mkdir -p "$RUN/ledger/unstarted"
        [ -e "$why" ] || { echo "$(uname -n) $status $log" && tail -c 4000 "$log"; } 2>/dev/null >"$why"
        cp "$why" "$RUN/ledger/unstarted/.$MEGAFLOW_POD" &&
            mv "$RUN/ledger/unstarted/.$MEGAFLOW_POD" "$RUN/ledger/unstarted/$MEGAFLOW_POD"
    fi
fi
[ -e "$RUN/ledger/cancelled" ] && exit 1
[ -e "$RUN/ledger/leaving/$MEGAFLOW_POD" ] && exit 0 # asked to, by a smaller scale
# Slurm took this node for lost and has started the element anew elsewhere: the job is that start's.
[ -e "$RUN/ledger/leases/$MEGAFLOW_POD.$((MEGAFLOW_START + 1))" ] && exit 1
[ "$ours" = yes ] || exit 1
# Nobody has asked for anything for long. A trainer that waits in the queue lets this element go again when it starts.
if [ "$state" = drained ] && [ "${near:-no}" = no ] && [ "$element" = "$MEGAFLOW_POD" ]; then
    for open in "$RUN"/ledger/open/*; do
        [ -n "$(find "$open" -mmin +10 2>/dev/null)" ] || continue
        policy=${open##*/}
        case $policy in *$'\n'*) continue ;; esac # grep would take it for two
        case $(head -c 6 "$RUN/training/$policy/last" 2>/dev/null) in
        failed | 'lost '*) given_up=$policy ;;
        *) grep -qsF -e "\"policy\": \"$policy\"" "$RUN"/ledger/jobs/*.json && awaited=$policy ;;
        esac
    done
    if [ -n "${awaited:-}" ]; then
        echo "held until the trainer of $awaited starts"
        : >"$RUN/logs/pod-$element.held"
        scontrol requeuehold "$element"
        sleep 30
        exit 1
    elif [ -n "${given_up:-}" ]; then
        echo "nobody starts the trainer of $given_up again"
        exit 1
    fi
fi
# Starts that stored nothing are counted, not those that a walltime ended.
count="$RUN/logs/pod-$element.requeues"
if [ -e "$MEGAFLOW_POD_DIR/progress" ]; then rm -f "$count"; else printf . >>"$count"; fi
vain=$(wc -c 2>/dev/null <"$count" || echo 0)
if [ "$vain" -le "$MEGAFLOW_REQUEUES" ]; then
    echo "requeueing element (${vain:-0} of $MEGAFLOW_REQUEUES in a row that stored nothing)"
    scontrol requeue "$element" # not SLURM_JOB_ID: for an array's last element that names the whole array
    sleep 30 # until Slurm ends this shell
else
    echo "not requeued: $vain starts in a row stored nothing; megaflow-hpc resume starts it again (--time: for longer)"
fi
exit 1
