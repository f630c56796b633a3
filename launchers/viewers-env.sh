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
export MEGAFLOW_HOME=${MEGAFLOW_HOME:-$HOME/.megaflow-hpc}
LOGS=${LOGS:-$MEGAFLOW_HOME/logs}
VENV_DIR=$MEGAFLOW_HOME/viewers
mkdir -p "$LOGS" "$MEGAFLOW_HOME"
exec 8>"$MEGAFLOW_HOME/viewers.lock"
flock 8

python=$(bash "$SOURCES/launchers/python.sh" 3.11)
# What is installed decides: other changes to pyproject.toml are no reason to do it again.
key=$({ sed -n '/^dependencies/,/^]/p' "$SOURCES/pyproject.toml"; cat "$0"; "$python" -c 'import sys; print(sys.base_prefix, sys.version)'; } | hash_of)
if ! done_before "$VENV_DIR/.complete" "$key" || [[ ! -x $VENV_DIR/bin/inspect ]]; then
  [[ ! -e $VENV_DIR || -e $VENV_DIR/.megaflow ]] || die "$VENV_DIR is not an environment of ours: move it away"
  say "installing Inspect, verifiers and experiment trackers into $VENV_DIR ($("$python" --version); some minutes)"
  # Keep the mark, so a killed installation leaves a directory that is known to be ours.
  [[ ! -e $VENV_DIR ]] || find "${VENV_DIR:?}" -mindepth 1 -maxdepth 1 ! -name .megaflow -exec rm -rf {} +
  mkdir -p "$VENV_DIR"
  touch "$VENV_DIR/.megaflow"
  "$python" -m venv --without-pip "$VENV_DIR"
  # Debian splits ensurepip off: pip from the package of wheels beside that interpreter, or the interpreter's own.
  wheel=$(find "$(dirname "$(dirname "$python")")/share/python-wheels" -name 'pip-*.whl' 2>/dev/null | sed -n 1p || true)
  if [[ -n $wheel ]]; then pip=("$VENV_DIR/bin/python" "$wheel/pip"); else pip=("$python" -m pip --python "$VENV_DIR/bin/python"); fi
  pip+=(--disable-pip-version-check)
  mapfile -t needed < <("$VENV_DIR/bin/python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")' "$SOURCES/pyproject.toml")
  quietly "$LOGS/viewers.log" "${pip[@]}" install --no-compile "${PACKAGES[@]}" "${needed[@]}"
  "$VENV_DIR/bin/python" -c 'import inspect_ai, inspect_evals, verifiers, wandb, mlflow, trackio, tensorboard' ||
    die "what was installed cannot be imported: see $LOGS/viewers.log"
  mark_done "$VENV_DIR/.complete" "$key"
fi
echo "$VENV_DIR/bin/python"
