# shellcheck shell=bash
# Shared by the launchers; sourced, never run. Everything a script needs to know about the machine is settled here:
# where things go (settings), who does the work (user), and where missing programs come from (packages).
set -euo pipefail

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the comment block at the head of the calling script: the help is the documentation, written once.
usage() { sed -n '2,/^[^#]/{s/^# \{0,1\}//;t show;b;:show p}' "$0"; }

have() { command -v "$1" >/dev/null 2>&1; }

# --- settings -------------------------------------------------------------------------------------------------------

# Debian keeps daemons in sbin, which is not on an ordinary user's PATH.
PATH=$PATH:/usr/sbin:/sbin

# A login node: a Slurm that answers. Ours do not count, they are reached through SLURM_CONF.
site_slurm() { [[ -z ${SLURM_CONF:-} ]] && have sinfo && timeout 10 sinfo -h -o %P >/dev/null 2>&1; }

# Sets MEGAFLOW_HOME (shared by all clones of a user: engine, Apptainer, images) and BUILD (this clone's own: venv, lab,
# the copy of the sources). On a login node both lie in .venv: nothing else is ours to write to.
settings() {
  local clone=$1 home=$2
  if [[ -n ${MEGAFLOW_SITE:=$(site_slurm && echo 1 || echo 0)} && $MEGAFLOW_SITE == 1 ]]; then
    MEGAFLOW_HOME=${MEGAFLOW_HOME:-$clone/.venv/var}
    BUILD=${MEGAFLOW_BUILD:-$MEGAFLOW_HOME}
    VENV=$clone/.venv
  else
    MEGAFLOW_HOME=${MEGAFLOW_HOME:-$home/.megaflow-hpc}
    # Short, because sockets live below it and their paths end at 107 characters.
    BUILD=${MEGAFLOW_BUILD:-$MEGAFLOW_HOME/$(basename "$clone" | tr -cd 'A-Za-z0-9._-' | cut -c1-20)-$(cksum <<<"$clone" | cut -d' ' -f1)}
    VENV=$BUILD/venv
  fi
  MEGAFLOW_ENGINE_VENV=${MEGAFLOW_ENGINE_VENV:-$MEGAFLOW_HOME/engine}
  MEGAFLOW_LAB_DIR=${MEGAFLOW_LAB_DIR:-$BUILD/lab}
  PREFIX=$MEGAFLOW_HOME/packages
  BASE_SIF=$MEGAFLOW_HOME/images/base.sif
  LOGS=$BUILD/logs
  export MEGAFLOW_SITE MEGAFLOW_HOME MEGAFLOW_BUILD=$BUILD MEGAFLOW_ENGINE_VENV MEGAFLOW_LAB_DIR
  export MEGAFLOW_TEST_BASE_SIF=$BASE_SIF
  # Programs of ours come after the site's own, except the venv, which is what all this is for.
  export PATH=$VENV/bin:$PATH:$MEGAFLOW_HOME/apptainer/bin:$PREFIX/bin
}

# --- small tools ----------------------------------------------------------------------------------------------------

hash_of() { sha256sum | cut -c1-16; }

# done_before FILE KEY: was this step finished with the same inputs? mark_done FILE KEY records it, in one rename.
done_before() { [[ -f $1 && $(cat "$1") == "$2" ]]; }
mark_done() { printf '%s\n' "$2" >"$1.new" && mv -f "$1.new" "$1"; }

# quietly LOG COMMAND…: output goes to LOG, and its tail to the terminal when the command fails.
quietly() {
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    tail -n 25 "$log" >&2
    say "failed: $* (all of it in $log)"
    return 1
  fi
}

# --- apt without root -----------------------------------------------------------------------------------------------

# apt_private DIR COMMAND…: apt-get or apt-cache with lists and cache below DIR. DIR/sources.list, where there is one,
# replaces the machine's sources; DIR/status, where there is one, its list of installed packages.
apt_private() {
  local dir=$1 command=$2
  shift 2
  mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial"
  local options=(-o "Dir::State::lists=$dir/lists" -o "Dir::Cache=$dir/cache" -o Debug::NoLocking=1
    -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=3)
  [[ -f $dir/sources.list ]] && options+=(-o "Dir::Etc::sourcelist=$dir/sources.list" -o Dir::Etc::sourceparts=/dev/null)
  [[ -f $dir/status ]] && options+=(-o "Dir::State::status=$dir/status")
  "$command" -qq "${options[@]}" "$@"
}

# The Debian archive: what the user names, else the one this machine installs from. Empty where there is none (Ubuntu).
debian_mirror() {
  if [[ -n ${MEGAFLOW_DEBIAN_MIRROR:-} ]]; then
    echo "${MEGAFLOW_DEBIAN_MIRROR%/}"
  else
    # shellcheck disable=SC2016  # apt's own placeholders
    apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m1 '/debian/*$' | sed 's,/*$,,' || true
  fi
}
