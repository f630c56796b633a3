# While this job was queued, a user with write access to the parent of RUN could have replaced RUN. Open RUN once, so that
# the script sources the same file that it has checked.
exec {own}<"$RUN" || exit 2
# shellcheck disable=SC1090
if [ -O "/dev/fd/$own" ] && [ -O "/dev/fd/$own/env.sh" ]; then . "/dev/fd/$own/env.sh"; else
    echo "$RUN: the directory or its env.sh is missing or belongs to another user; nothing in it is run" >&2
    exit 2
fi
exec {own}<&-
# Report an interpreter that is missing on this node or built for another architecture. The commands below then fail.
if ! said=$("$MEGAFLOW_PYTHON" -ISc '' 2>&1); then
    echo "MEGAFLOW_PYTHON=$MEGAFLOW_PYTHON cannot run on $(uname -n) ($(uname -m)): ${said##*: };" \
        "export another one in slurm.${role%%.*}.setup" >&2
fi
