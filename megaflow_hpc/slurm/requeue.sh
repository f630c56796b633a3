# Is this shell the job's batch script? If a user's own job runs the script as one of its commands, the user decides about a
# requeue.
@REQUEUES@
set +o posix # with POSIXLY_CORRECT, bash would forget a status after the first wait

# Returns the exit status of a child process, which must not be waited for elsewhere. Bash may lose the status of a child
# that ends in the instant in which a trapped signal interrupts wait. So it sleeps until the child has ended. Traps run
# between two sleeps.
# shellcheck disable=SC2329 # not every script needs it
outcome() {
    local first second
    while kill -0 "$1" 2>/dev/null; do sleep 0.5; done
    while :; do # a signal may interrupt the first wait too
        wait "$1"
        first=$?
        wait "$1"
        second=$?
        [ "$first" -ne "$second" ] || return "$first"
    done
}

# Creates a private directory and prints its path. Its name identifies this shell to the janitor. The login node's TMPDIR,
# which jobs inherit, may not exist here.
# shellcheck disable=SC2329
private_directory() {
    local born name
    born=$(sed 's/.*) //' /proc/$$/stat | cut -d' ' -f20)
    name="megaflow-pod.$(uname -n).$$-$born.XXXXXXXX"
    mktemp -d "${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/$name" || mktemp -d "/tmp/$name"
}

# Runs a query of Slurm, and retries it up to four times.
# shellcheck disable=SC2329 # not every script needs it
query() {
    local pause
    for pause in 1 2 4 8 0; do
        timeout 60 "$@" 2>/dev/null && return
        sleep "$pause"
    done
    return 1
}

# Requeues or holds this job: again ROLE requeue|requeuehold ID [NAME]. Slurm may be unavailable, busy or limit requests.
# So the request is repeated until the walltime ends, and for another hour if Slurm does not end the job then. Meanwhile,
# the file ledger/refused/NAME contains Slurm's message. It is removed once a request has succeeded.
again() {
    local role=$1 verb=$2 id=$3 name=${4:-$3} pause=1 end now words where="$RUN/ledger/refused"
    now=$(date +%s)
    end=${walltime_end:-${SLURM_JOB_END_TIME:-$now}}
    # After SIGTERM, Slurm decides about a requeue, unless the walltime has ended.
    while [ "$requeues" = yes ] || [ "$now" -ge "$end" ]; do
        if words=$(timeout 60 scontrol "$verb" "$id" 2>&1); then words=; else words="${words:-no answer (exit status $?)}"; fi
        # An earlier request has succeeded although it reported an error, or Slurm ends this job before scontrol (143).
        case $words in '' | *"ob is pending execution"* | *"exit status 143)")
            rm -f "$where/$name"
            sleep 30 # until Slurm ends this shell, and perhaps the sleep first
            return 0
            ;;
        esac
        words=${words##*$'\n'}
        echo "scontrol $verb $id: $words"
        if [ -e "$RUN/run.json" ] && mkdir -p "$where"; then
            printf '%s\n' "$(date +%s) $role $(uname -n) $(readlink /proc/$$/fd/1)" "$words" >"$where/.$name" &&
                mv "$where/.$name" "$where/$name"
        fi
        # Slurm would refuse every further request for the same reason.
        case $words in *"presently disabled"* | *"nvalid job id"* | *"ccess/permission denied"*) break ;; esac
        now=$(date +%s)
        [ "$now" -lt "$((end + 3600))" ] || break
        sleep "$((pause + RANDOM % pause))"
        [ "$pause" -ge 32 ] || pause=$((pause * 2))
        now=$(date +%s)
    done
    return 1
}
