# PID 1 of a sandbox's container, run by the image's own /bin/sh. It normally starts the compiled runner ($1/runner,
# runner.c), which starts commands. If none was built or it does not run, the shells below start them.
#
# $1 is the control directory, which is read-only inside. Standard input names the workers to start, one number a line.
# It reaches end-of-file when the owner ends. Worker K keeps a child waiting on the FIFO wK. The child reads one line of
# shell, which is one command (command.py), and becomes it. The worker answers "K STATUS" and forks the next child, so
# that the fork is over before the next command arrives. Names begin with _mf_, because the shell also has the sandbox's
# own variables.
#
# A command needs its own process group. A shell with job control provides one without another program, but only with a
# terminal. So standard error is a terminal, whose other end the owner holds. A "leader", the first process of a session,
# shares it with a new worker. Once the leader has exited, neither the session nor a command has a terminal. If that does
# not work, the program setsid creates a session for every command.

_mf_dir=$1

# A shell's "read" makes a system call for each byte of a line. dash and busybox read a sourced line in one piece. Other
# shells read a sourced file until end-of-file, which a FIFO never reaches.
if [ /bin/sh -ef /bin/dash ] 2>/dev/null || [ /bin/sh -ef /bin/busybox ] 2>/dev/null; then
  _mf_take() { . "$_mf_dir/w$1"; }
else
  _mf_take() { IFS= read -r _mf_line && eval "$_mf_line"; }
fi

_mf_work() {
  exec <"$_mf_dir/w$1" 2>/dev/null
  trap 'echo "$1 dead"' EXIT # a fork failed: the sandbox is at its process limit
  _mf_n='
'
  echo "$1 up"
  while :; do
    if [ -n "$_mf_jobs" ]; then
      (_mf_take "$1") &
      wait $!
    else
      (_mf_take "$1")
    fi
    echo "$1 $?"
    # With job control, a shell keeps every job until it has reported it, and each forked child copies these pages.
    [ "$((_mf_told += 1))" -lt 16 ] || { _mf_told=0; jobs >&2; }
  done
}

_mf_spawn() {
  while IFS= read -r _mf_number; do
    if [ -z "$_mf_setsid" ]; then
      _mf_nest "$_mf_number"
    else
      "$_mf_setsid" /bin/sh "$_mf_dir/runner.sh" "$_mf_dir" leader "$_mf_number" "$_mf_setsid" </dev/null
      [ $? -eq 137 ] || _mf_nest "$_mf_number"
    fi
  done
  kill -9 -1
}

# A worker without job control is part of a pipeline and not started with "&", which would make it and every command
# ignore SIGINT and SIGQUIT.
_mf_nest() {
  exec 3<&0 4>&1
  { _mf_jobs= _mf_s=$_mf_setsid; _mf_work "$1" </dev/null >&4 3<&- 4>&-; } |
    { exec <&3 >&4 3<&- 4>&-; _mf_spawn; }
  exit
}

case $2 in
leader)
  exec 8<>/proc/self/fd/2
  set -m
  case $- in *m*) ;; *) exit 1 ;; esac
  /bin/sh "$_mf_dir/runner.sh" "$_mf_dir" worker "$3" "$4" 8<&-
  [ $? -gt 128 ] || exit 1
  kill -9 $$ # the worker has stopped itself; the kernel continues it when its leader has ended
  ;;
worker)
  trap : HUP
  set -m
  case $- in *m*) ;; *) exit 1 ;; esac
  _mf_jobs=1 _mf_s=
  kill -STOP $$
  _mf_work "$3"
  ;;
"")
  # Apptainer's own variables contain host paths, and every process can read the initial environment of PID 1. So PID 1
  # executes itself again without them.
  while IFS= read -r _mf_line; do
    _mf_line=${_mf_line#export }
    _mf_line=${_mf_line#declare -x }
    case "$_mf_line" in APPTAINER* | SINGULARITY*) unset "${_mf_line%%=*}" ;; esac
  done <<END
$(export -p)
END
  unset PROMPT_COMMAND PS1
  case "$LD_LIBRARY_PATH" in /.singularity.d/libs) unset LD_LIBRARY_PATH ;; esac
  exec /bin/sh "$_mf_dir/runner.sh" "$_mf_dir" first
  ;;
first)
  _mf_setsid=$(command -v setsid)
  . "$_mf_dir/env"
  # The compiled runner starts commands faster. It ends only by a signal. Any other status means that it is missing or
  # does not run here.
  "$_mf_dir/runner" "$_mf_dir" 2>/dev/null
  [ $? -gt 128 ] || (echo ready && _mf_spawn)
  echo gone # a command has killed every process but PID 1; a kill from outside reports nothing
  ;;
esac
