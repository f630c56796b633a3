# Runs the trainer of one policy. Each start continues from the last commit. The job ends when the training ends.
RUN=@RUN@
policy=@POLICY@
role=trainer # env.sh runs the setup of this section
@OWN@
set -u
@REQUEUE@

ours="$RUN/training/$policy" # the policy's files
if [ ! -d "$ours" ]; then
    echo "$RUN: the campaign does not train the policy $policy; it trains: $(ls -q "$RUN/training" 2>/dev/null)" >&2
    exit 2
fi
job=$SLURM_JOB_ID
# Slurm sets SLURM_RESTART_COUNT only after a requeue. In a first start it may be inherited from the submitting job.
[ -z "${SLURM_RESTART_COUNT:-}" ] || counted=$(query scontrol --local -o show job "$job" | grep -o ' Restarts=[0-9]*')
[ -z "${counted:-}" ] || SLURM_RESTART_COUNT=${counted#*=}
start="${SLURM_RESTART_COUNT:-0}"
rm -f "$RUN/ledger/refused/$job" # of an earlier start
echo "$start" >"$RUN/logs/trainer-$job.start"
newest() { find "$ours/$1" -type f -name '[0-9]*.json' 2>/dev/null | sort | tail -n 1; }
commit=$(newest commits) entered=$(newest trainers)
log=$(readlink /proc/$$/fd/1)
written=$(stat -Lc %s /proc/$$/fd/1 2>/dev/null || echo 0) # bytes written by earlier starts

private=$(private_directory) || exit 1
trap 'rm -rf -- "$private"' EXIT

# USR2: the walltime is near, and the trainer finishes its step. A step that takes too long is repeated from its plan.
# TERM: the job is preempted or cancelled, and Slurm decides about a requeue.
near=no step='' serving=''
trap 'near=yes; kill -USR1 "$step" 2>/dev/null; (sleep 270; kill -KILL "$step" 2>/dev/null) &' USR2
trap 'requeues=no; kill -USR1 "$step" 2>/dev/null' TERM

# Applies a command to the pods that are held because they were idle while the trainer was queued. Slurm takes the elements
# of an array in one request. If one of them has ended it refuses them all, and then each is tried alone. The command is
# repeated for pods that were just draining, and because Slurm may be away.
held_pods() {
    local held element key words list
    local -A elements=()
    for held in "$RUN"/logs/pod-*.held; do
        [ -e "$held" ] || continue
        element=${held##*/pod-} element=${element%.held}
        case $element in *[!0-9_]* | _* | '') continue ;; esac # must not look like an option of scancel, such as --me
        case $element in *_*) key=${element%_*}_ ;; *) key=$element ;; esac
        elements[$key]+=" $element"
    done
    for key in "${!elements[@]}"; do
        # shellcheck disable=SC2206 # digits and underscores
        list=(${elements[$key]})
        held="${list[*]#"$key"}"
        if words=$("$@" "$key${held:+[${held// /,}]}" 2>&1); then
            for element in "${list[@]}"; do rm -f "$RUN/logs/pod-$element.held"; done
        elif [[ $words == *"nvalid job id"* ]]; then
            for element in "${list[@]}"; do "$@" "$element" 2>/dev/null && rm -f "$RUN/logs/pod-$element.held"; done
        fi
    done
}
held_pods scontrol release
(
    for minute in {1..32}; do
        sleep 60
        [ -d "$private" ] || exit
        ((minute & (minute - 1))) || held_pods scontrol release
    done
) &

# The interpreter may be an engine's, which has torch but not this package.
if [ "$("$MEGAFLOW_TRAINER_PYTHON" -c 'import sys; print(sys.version_info >= (3, 11))' 2>&1)" != True ]; then
    echo "MEGAFLOW_TRAINER_PYTHON=$MEGAFLOW_TRAINER_PYTHON: expected Python 3.11 or later that runs on $(uname -m);" \
        "export another one in slurm.trainer.setup" >&2
    exit 2
fi

# Drop variables of the submitting job or step. They would change the memory and the CPU binding of our step.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_BIND@}"
unset SLURM_DISTRIBUTION SLURM_HINT SLURM_MPI_TYPE SLURM_EXPORT_ENV

# Wrapper of a step's task. It learns its node's number from Slurm. On SIGTERM srun would kill the whole step at once.
# srun forwards SIGUSR1, which the wrapper turns into SIGTERM. --export=ALL applies whatever the job was submitted with.
# shellcheck disable=SC2016
task="$(declare -f outcome)"'
trap "kill -TERM \$child 2>/dev/null" USR1 TERM
(trap "" USR1; export PET_NODE_RANK="$SLURM_NODEID"; exec "$@") &
child=$!
outcome "$child"'

# With shared GPUs the policy's model server is a step of this job and sleeps while the trainer steps. A lost server is
# restarted after Slurm has ended its step. After too many failures the trainer ends in the same way as before the walltime.
serve() {
    trap 'stop=yes; kill -USR1 "$server" 2>/dev/null' USR1
    local server='' stop=no vain=0 began ended=1
    while [ "$stop" = no ]; do
        began=$SECONDS
        # shellcheck disable=SC2086 # env.sh sets words without blanks
        srun --overlap --export=ALL --mpi=none --nodes=1 --ntasks=1 --wait=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
            bash -c "$task" server "$MEGAFLOW_PYTHON" \
            -m megaflow_hpc.model.server "$RUN" --policy "$policy" &
        server=$!
        outcome "$server"
        ended=$?
        echo "server of $policy: exit status $ended"
        if [ "$ended" -eq 0 ] || [ "$stop" = yes ]; then return; fi
        [ "$((SECONDS - began))" -lt 3600 ] || vain=0 # only consecutive failures count
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
export MEGAFLOW_ASK_PODS # used by a trainer that waits for pods
[ -O "$RUN" ] && [ -O "$RUN/training/.package" ] || exit 2 # Python will run the code in it
export PYTHONPATH="$RUN/training/.package${PYTHONPATH:+:$PYTHONPATH}"

# One process per GPU. A single process opens no port. On one node the processes meet through files and the loopback. On
# several nodes they meet through torch's store, at a random port of the first node. That store does not authenticate its
# clients (docs/explanation/security.md).
nodes=${SLURM_JOB_NUM_NODES:-1}
processes=${SLURM_GPUS_ON_NODE:-1}
[ "$processes" -ge 1 ] || processes=1
command=("$MEGAFLOW_TRAINER_PYTHON")
if [ "$((nodes * processes))" -gt 1 ]; then
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(((${SLURM_CPUS_PER_TASK:-1} + processes - 1) / processes))}"
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=260 # seconds that torchrun waits after a request to stop
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

said() { tail -c "+$((written + 1))" "$log" 2>/dev/null; } # output of this start
while :; do
    rm -f "$private"/store "$private"/rendezvous*
    # shellcheck disable=SC2086 # as above
    srun --export=ALL --mpi=none --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 \
        --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        bash -c "$task" trainer "${command[@]}" &
    step=$!
    [ ! -e "$private/served" ] || kill -USR1 "$step"
    outcome "$step"
    status=$?
    # torchrun exits with 1 whatever its processes' exit codes were, and logs those codes. On several nodes srun then
    # kills the other tasks (137).
    for told in 2 69 76; do
        if [ "$status" -ne 0 ] && said | grep -qE "^ *exitcode *: $told \(pid"; then status=$told; fi
    done
    # 76: a step was amended, and training continues from the last checkpoint.
    if [ "$status" -ne 76 ] || [ "$near" = yes ] || [ "$requeues" = no ] || [ -e "$private/served" ]; then break; fi
    written=$(stat -Lc %s "$log" 2>/dev/null || echo 0)
done

# Publishes the outcome of this start for status displays: what happens next, and the end of its log.
last() {
    echo "trainer of $policy, start $start: $1 (srun exit status $status)"
    { echo "$1 $(uname -n) $status $log" && said | tail -c 4000; } >"$private/last"
    cp "$private/last" "$ours/.last.$job" && mv "$ours/.last.$job" "$ours/last"
}
if [ -e "$RUN/ledger/cancelled" ]; then exit 0; fi
if [ "$status" -eq 0 ] && [ ! -e "$RUN/ledger/open/$policy" ]; then
    last "done"
    while kill -0 "$serving" 2>/dev/null; do # the last requests are still being sampled
        [ "$near" = no ] || kill -USR1 "$serving"
        wait "$serving"
    done
    if [ -z "$serving" ] || [ "$near" = no ] || "$MEGAFLOW_PYTHON" -m megaflow_hpc.rundir.marks "$RUN"; then exit 0; fi
fi
[ ! -e "$private/served" ] || status=$(cat "$private/served")
# Exit if Slurm considered this node lost and restarted the job elsewhere, or if another job now trains the policy.
[ "$(head -c 20 "$RUN/logs/trainer-$job.start")" = "$start" ] || exit 1
later=$(newest trainers)
if [ "$later" != "$entered" ] && ! grep -qE "\"job_id\":\"($job)?\"" "$later"; then
    echo "trainer of $policy: another job has taken over"
    exit 1
fi
# 2: an error in the campaign or the installation, which would occur on any node. 69: no pod is running or queued.
if [ "$status" -eq 2 ] || [ "$status" -eq 69 ]; then
    last failed
    held_pods scancel
    exit "$status"
fi
if [ "$requeues" = no ]; then
    last left
    exit 1
fi
# Count consecutive starts of the policy that committed no step, whatever ended them and whichever job they were in.
count="$RUN/logs/trainer-$policy.requeues"
if [ "$(newest commits)" != "$commit" ]; then rm -f "$count"; else printf . >>"$count"; fi
vain=$(wc -c 2>/dev/null <"$count" || echo 0)
if [ "$vain" -gt "$MEGAFLOW_TRAINER_REQUEUES" ]; then
    last lost
    held_pods scancel
    exit 1
fi
last requeued
echo "requeueing the trainer ($vain of $MEGAFLOW_TRAINER_REQUEUES in a row that committed nothing)"
if ! again trainer requeue "$job"; then
    if [ "$requeues" = yes ]; then last lost; else last left; fi
fi
exit 1
