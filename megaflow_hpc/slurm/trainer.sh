# The trainer of one policy. Each start goes on from the last commit; it ends when the training does.
RUN=@RUN@
policy=@POLICY@
@OWN@
set -u

ours="$RUN/training/$policy" # what is the policy's
if [ ! -d "$ours" ]; then
    echo "$RUN: its campaign does not train the policy $policy, but: $(ls -q "$RUN/training" 2>/dev/null)" >&2
    exit 2
fi
job=$SLURM_JOB_ID
# Slurm sets the count in a start that is not the first; else it is that of a job from inside which this one was queued.
[ -z "${SLURM_RESTART_COUNT:-}" ] || counted=$(scontrol -o show job "$job" 2>/dev/null | grep -o ' Restarts=[0-9]*')
[ -z "${counted:-}" ] || SLURM_RESTART_COUNT=${counted#*=}
start="${SLURM_RESTART_COUNT:-0}"
echo "$start" >"$RUN/logs/trainer-$job.start"
newest() { find "$ours/$1" -type f -name '[0-9]*.json' 2>/dev/null | sort | tail -n 1; }
commit=$(newest commits) entered=$(newest trainers)
log=$(readlink /proc/$$/fd/1)
written=$(stat -Lc %s /proc/$$/fd/1 2>/dev/null || echo 0) # by earlier starts

born=$(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20)
private=$(mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/megaflow-pod.$(uname -n).$$-$born.XXXXXXXX") || exit 1
trap 'rm -rf -- "$private"' EXIT

# USR2: the walltime is near. The trainer ends its step; one that takes too long is done again, from its plan. TERM:
# preempted or cancelled, and Slurm itself decides about a requeue. A job that runs this script among other things is its
# user's, who decides.
case $(cat "/proc/$PPID/comm" 2>/dev/null) in slurmstepd*) requeues=yes ;; *) requeues=no ;; esac
near=no step='' serving=''
trap 'near=yes; kill -USR1 "$step" 2>/dev/null; (sleep 270; kill -KILL "$step" 2>/dev/null) &' USR2
trap 'requeues=no; kill -USR1 "$step" 2>/dev/null' TERM

# Pods that are held because they had nothing to do while it waited in the queue; soon also those that were just leaving.
held_pods() {
    for held in "$RUN"/logs/pod-*.held; do
        [ -e "$held" ] || continue
        element=${held##*/pod-} element=${element%.held}
        case $element in *[!0-9_]* | _* | '') continue ;; esac # no option of scancel's, such as --me
        "$@" "$element" 2>/dev/null && rm -f "$held"
    done
}
held_pods scontrol release
(sleep 60; held_pods scontrol release) &

# Its interpreter may be an engine's, which has torch and not this package.
if [ "$("$MEGAFLOW_TRAINER_PYTHON" -c 'import sys; print(sys.version_info >= (3, 11))' 2>&1)" != True ]; then
    echo "MEGAFLOW_TRAINER_PYTHON=$MEGAFLOW_TRAINER_PYTHON: no Python of at least 3.11" >&2
    exit 2
fi

# What a job or step around the one that queued this left behind would decide about memory and binding of the step.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
unset SLURM_DISTRIBUTION SLURM_HINT SLURM_MPI_TYPE SLURM_EXPORT_ENV

# A task of a step, which learns its node's number from Slurm. SIGTERM would have srun kill all of it at once; SIGUSR1 it
# hands on, to processes that would die of it. --export: whatever the job was queued with.
# shellcheck disable=SC2016
task='
trap "kill -TERM \$child 2>/dev/null" USR1 TERM
(trap "" USR1; export PET_NODE_RANK="$SLURM_NODEID"; exec "$@") &
child=$!
while :; do
    wait "$child"
    kill -0 "$child" 2>/dev/null || break
done
wait "$child"'

# The GPUs are shared: the policy's model server is a step of this job, and sleeps while the trainer steps. Lost, it is
# started anew; Slurm has ended all of its step then. When it is given up, the trainer ends as before the walltime.
serve() {
    trap 'stop=yes; kill -USR1 "$server" 2>/dev/null' USR1
    local server='' stop=no vain=0 began ended=1
    while [ "$stop" = no ]; do
        began=$SECONDS
        srun --overlap --export=ALL --mpi=none --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
            bash -c "$task" server "$MEGAFLOW_PYTHON" -m megaflow_hpc.model.server "$RUN" --policy "$policy" &
        server=$!
        while :; do
            wait "$server"
            ended=$?
            kill -0 "$server" 2>/dev/null || break
        done
        echo "server of $policy: exit status $ended"
        if [ "$ended" -eq 0 ] || [ "$stop" = yes ]; then return; fi
        [ "$((SECONDS - began))" -lt 3600 ] || vain=0 # failures in a row are counted
        vain=$((vain + 1))
        if [ "$ended" -eq 2 ] || [ "$vain" -gt "$MEGAFLOW_REQUEUES" ]; then break; fi
        sleep 2
    done
    echo "$ended" >"$private/served"
    kill -USR2 $$
}
if [ "${MEGAFLOW_TRAINER_SHARE:-none}" = sleep ]; then
    serve &
    serving=$!
fi

printf -v MEGAFLOW_ASK_PODS '%q ' "$MEGAFLOW_PYTHON" -m megaflow_hpc.campaign.live_jobs "$RUN"
export MEGAFLOW_ASK_PODS # for a trainer that waits for some
[ -O "$RUN" ] && [ -O "$RUN/training/.package" ] || exit 2 # Python runs what is in it
export PYTHONPATH="$RUN/training/.package${PYTHONPATH:+:$PYTHONPATH}"

# One process for each GPU; one alone opens no port. On one node they meet through files and the loopback; on several by
# torch's store, at a random port of the first one, which asks nobody who they are (docs/explanation/security.md).
nodes=${SLURM_JOB_NUM_NODES:-1}
processes=${SLURM_GPUS_ON_NODE:-1}
[ "$processes" -ge 1 ] || processes=1
command=("$MEGAFLOW_TRAINER_PYTHON")
if [ "$((nodes * processes))" -gt 1 ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(((${SLURM_CPUS_PER_TASK:-1} + processes - 1) / processes))}"
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=260 # for which torchrun waits once it is asked to stop
    command+=(-m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts=0)
    if [ "$nodes" -gt 1 ]; then
        first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        command+=(--rdzv-backend=static --master-addr="$first" --master-port="$((20000 + RANDOM % 12000))")
    else
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 MEGAFLOW_TRAINER_STORE="file://$private/store"
        export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
        command+=(--rdzv-backend=c10d --rdzv-conf=store_type=file --rdzv-endpoint="$private/rendezvous")
        command+=(--rdzv-id="$job" --local-addr=127.0.0.1)
    fi
fi
command+=(-m megaflow_hpc.training.trainer "$RUN" --policy "$policy")

srun --export=ALL --mpi=none --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c "$task" trainer "${command[@]}" &
step=$!
[ ! -e "$private/served" ] || kill -USR1 "$step"
while :; do
    wait "$step"
    status=$?
    kill -0 "$step" 2>/dev/null || break # wait also returns when a trap has run
done
said() { tail -c "+$((written + 1))" "$log" 2>/dev/null; } # in this start
# torchrun ends with 1 whatever its processes ended with, and tells of that; on several nodes srun kills the others then
# (137).
for told in 2 69; do
    if [ "$status" -ne 0 ] && said | grep -qE "^ *exitcode *: $told \(pid"; then status=$told; fi
done

# The last word on this start, for those who look: what becomes of it, and how its log ends.
last() {
    echo "trainer of $policy, start $start: $1 (srun exit status $status)"
    { echo "$1 $(uname -n) $status $log" && said | tail -c 4000; } >"$private/last"
    cp "$private/last" "$ours/.last.$job" && mv "$ours/.last.$job" "$ours/last"
}
if [ -e "$RUN/ledger/cancelled" ]; then exit 0; fi
if [ "$status" -eq 0 ] && [ ! -e "$RUN/ledger/open/$policy" ]; then
    last "done"
    while kill -0 "$serving" 2>/dev/null; do # what was asked for last is sampled yet
        [ "$near" = no ] || kill -USR1 "$serving"
        wait "$serving"
    done
    if [ -z "$serving" ] || [ "$near" = no ] || "$MEGAFLOW_PYTHON" -m megaflow_hpc.rundir.marks "$RUN"; then exit 0; fi
fi
[ ! -e "$private/served" ] || status=$(cat "$private/served")
# Slurm took this node for lost and has started the job anew elsewhere, or another job trains the policy now.
[ "$(head -c 20 "$RUN/logs/trainer-$job.start")" = "$start" ] || exit 1
later=$(newest trainers)
if [ "$later" != "$entered" ] && ! grep -qE "\"job_id\":\"($job)?\"" "$later"; then
    echo "trainer of $policy: another job has taken over"
    exit 1
fi
# 2 is a mistake in the campaign or the installation: another node would say the same. 69: no pod is there, nor queued.
if [ "$status" -eq 2 ] || [ "$status" -eq 69 ]; then
    last failed
    held_pods scancel
    exit "$status"
fi
if [ "$requeues" = no ]; then
    last left
    exit 1
fi
# Starts that committed no step are counted, whatever ended them.
count="$RUN/logs/trainer-$job.requeues"
if [ "$(newest commits)" != "$commit" ]; then rm -f "$count"; else printf . >>"$count"; fi
vain=$(wc -c 2>/dev/null <"$count" || echo 0)
if [ "$vain" -gt "$MEGAFLOW_TRAINER_REQUEUES" ]; then
    last lost
    held_pods scancel
    exit 1
fi
last requeued
echo "requeueing the trainer ($vain of $MEGAFLOW_TRAINER_REQUEUES in a row that committed nothing)"
scontrol requeue "$job"
sleep 30 # until Slurm ends this shell
exit 1
