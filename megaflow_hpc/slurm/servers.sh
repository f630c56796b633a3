# One engine server: it registers when healthy, drains on the signal, and leaves when the campaign is finished.
RUN=@RUN@
. "$RUN/env.sh"
set -u

ours=yes
trap 'kill -TERM "$server" 2>/dev/null' USR2
trap 'ours=no; kill -TERM "$server" 2>/dev/null' TERM

"$MEGAFLOW_PYTHON" -m megaflow_hpc.model.server "$RUN" @INDEX@ &
server=$!
while :; do
    wait "$server"
    status=$?
    kill -0 "$server" 2>/dev/null || break # wait also returns when a trap has run
done

echo "server ${SLURM_ARRAY_TASK_ID:-0}: exit status $status"
if [ -e "$RUN/ledger/finished" ] || [ -e "$RUN/ledger/cancelled" ]; then exit 0; fi
# 2 is a mistake in the campaign or the installation: another node would say the same.
if [ "$status" -ne 0 ] && [ "$status" -ne 2 ] && [ "$ours" = yes ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MEGAFLOW_REQUEUES" ]; then
    scontrol requeue "$SLURM_JOB_ID"
    sleep 30 # until Slurm ends this shell
fi
exit "$status"
