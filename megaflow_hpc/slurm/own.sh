# Another user who may write beside RUN could have put a directory of theirs there while this job was queued. RUN is opened
# once, so that what is checked is what is sourced.
exec {own}<"$RUN" || exit 2
# shellcheck disable=SC1090
if [ -O "/dev/fd/$own" ] && [ -O "/dev/fd/$own/env.sh" ]; then . "/dev/fd/$own/env.sh"; else
    echo "$RUN: it or its env.sh is missing or belongs to another user; nothing of it is run" >&2
    exit 2
fi
exec {own}<&-
