# The only program of a sandbox that is ours: PID 1 of its container, in whatever /bin/sh the image has.
#
# $1 is the control directory, read-only in here. Standard input says which workers to start, one number a line; its
# end means that the owner is gone. Worker K takes command numbers from the FIFO wK, sources the file cN (which runs
# one command with its own directory, environment and streams) and answers "N STATUS" on standard output.
#
# Workers are started as members of a pipeline and not with "&": POSIX makes a shell without job control ignore SIGINT
# and SIGQUIT in everything it starts with "&", for good, and the commands would inherit that.

dir=$1
. "$dir/env"
if command -v setsid >/dev/null 2>&1; then setsid=setsid; else setsid=; fi

worker() {
  while IFS= read -r number; do
    . "$dir/c$number"
    echo "$number $?"
  done <"$dir/w$1"
}

spawner() {
  while IFS= read -r wanted; do
    start "$wanted"
  done
  kill -9 -1
}

start() {
  exec 3<&0 4>&1
  { worker "$1" </dev/null >&4 3<&- 4>&-; } | { exec <&3 >&4 3<&- 4>&-; spawner; }
  exit 86 # what PID 1 says when everything but itself was killed from within; a kill from outside looks different
}

echo ready
spawner
