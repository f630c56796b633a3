#!/usr/bin/env bash
# Provides a virtual environment with experiment trackers, Inspect and verifiers, and what megaflow-hpc needs, once;
# prints its interpreter's path.
#
# usage: launchers/viewers-env.sh
#
# They bring some two hundred packages that megaflow-hpc does not need, so they have an environment of their own
# (MEGAFLOW_HOME/viewers). The package itself is not installed there: put the sources on PYTHONPATH.
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
esac
# inspect-evals 0.28 needs a package (inspect-evals-utils) that not every index carries.
PACKAGES=(inspect-ai==0.3.285 inspect-evals==0.26.0 verifiers==0.4.0 wandb==0.31.0 mlflow-skinny==3.17.2 trackio==0.43.0
  tensorboard==2.21.0 pytest==9.* pytest-asyncio==1.*)
[[ $(id -u) != 0 ]] || die "run launchers/viewers-env.sh as an ordinary user"
SOURCES=$(cd "$(dirname "$0")/.." && pwd -P)
settings "${MEGAFLOW_CLONE:-$SOURCES}" "$HOME"
user_path
directory=$MEGAFLOW_HOME/viewers
mkdir -p "$LOGS" "$MEGAFLOW_HOME"
exec 8>"$MEGAFLOW_HOME/viewers.lock"
flock 8

# What is installed decides: other changes to pyproject.toml are no reason to do it again.
key=$({ sed -n '/^dependencies/,/^]/p' "$SOURCES/pyproject.toml"; cat "$0"; } | hash_of)
if ! done_before "$directory/.complete" "$key" || [[ ! -x $directory/bin/inspect ]]; then
  make_venv "$directory"
  say "installing Inspect, verifiers and experiment trackers into $directory (some minutes)"
  mapfile -t needed < <("$directory/bin/python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")' "$SOURCES/pyproject.toml")
  quietly "$LOGS/viewers.log" "$directory/bin/python" -m pip --disable-pip-version-check install --no-compile "${PACKAGES[@]}" "${needed[@]}"
  "$directory/bin/python" -c 'import inspect_ai, inspect_evals, verifiers, wandb, mlflow, trackio, tensorboard' ||
    die "what was installed cannot be imported: see $LOGS/viewers.log"
  mark_done "$directory/.complete" "$key"
fi
echo "$directory/bin/python"
