#!/usr/bin/env bash
# Provides a virtual environment with Harbor and what megaflow-hpc needs, once; prints its interpreter's path.
#
# usage: launchers/harbor-env.sh
#
# Harbor needs a newer Python than megaflow-hpc does, so it has an environment of its own
# (MEGAFLOW_HOME/harbor). The package itself is not installed there: who runs Harbor puts the sources on PYTHONPATH, or
# installs megaflow-hpc beside Harbor as usual (docs/how-to/harbor.md).
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
esac
HARBOR=0.25.0
[[ $(id -u) != 0 ]] || die "run launchers/harbor-env.sh as an ordinary user"
SOURCES=$(cd "$(dirname "$0")/.." && pwd -P)
export MEGAFLOW_HOME=${MEGAFLOW_HOME:-$HOME/.megaflow-hpc}
LOGS=${LOGS:-$MEGAFLOW_HOME/logs} PREFIX=${PREFIX:-$MEGAFLOW_HOME/packages}
VENV_DIR=$MEGAFLOW_HOME/harbor
mkdir -p "$LOGS" "$MEGAFLOW_HOME"
exec 8>"$MEGAFLOW_HOME/harbor.lock"
flock 8

python=$(bash "$SOURCES/launchers/python.sh" 3.12)
# What is installed decides: other changes to pyproject.toml are no reason to do it again.
key=$({ sed -n '/^dependencies/,/^]/p' "$SOURCES/pyproject.toml"; cat "$0"; "$python" -c 'import sys; print(sys.base_prefix, sys.version)'; } | hash_of)
if ! done_before "$VENV_DIR/.complete" "$key" || [[ ! -x $VENV_DIR/bin/harbor ]]; then
  MACHINE_PATH=$PATH MEGAFLOW_PYTHON=$python make_venv "$VENV_DIR"
  say "installing Harbor $HARBOR into $VENV_DIR"
  # Its newest dependency is a CA bundle of a few days' age, which package indexes with a delay lack: any will do.
  quietly "$LOGS/harbor.log" "$VENV_DIR/bin/python" -m pip --disable-pip-version-check install --no-compile --no-deps "harbor==$HARBOR"
  mapfile -t needed < <("$VENV_DIR/bin/python" - "$SOURCES/pyproject.toml" <<'PYTHON'
import importlib.metadata, sys, tomllib

for line in importlib.metadata.requires("harbor") or ():
    if "extra ==" not in line:
        print("certifi" if line.startswith("certifi") else line)
print("click")  # its command line imports what typer no longer brings
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")
PYTHON
  )
  quietly "$LOGS/harbor.log" "$VENV_DIR/bin/python" -m pip --disable-pip-version-check install --no-compile "${needed[@]}"
  "$VENV_DIR/bin/python" -c 'import harbor.cli.main' || die "Harbor cannot be imported: see $LOGS/harbor.log"
  mark_done "$VENV_DIR/.complete" "$key"
fi
echo "$VENV_DIR/bin/python"
