#!/usr/bin/env bash
# Provides a Python of at least a given version, as an ordinary user: from PATH, else from Debian's archive in a private
# prefix. Prints the interpreter's path.
#
# usage: launchers/python.sh [VERSION] [--portable]        3.12 without an argument; --portable: Debian's in any case, and its tmux
#
# Some of what works with megaflow-hpc needs a newer Python than stable distributions have (Harbor: 3.12). Debian's
# package runs anywhere if the libraries of its own suite lie beside it and the interpreter is told so with patchelf.
# MEGAFLOW_DEBIAN_MIRROR names the archive on other systems.
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
esac
WANTED=${1:-3.12}
[[ $(id -u) != 0 ]] || die "run launchers/python.sh as an ordinary user"
MEGAFLOW_HOME=${MEGAFLOW_HOME:-$HOME/.megaflow-hpc}
LOGS=${LOGS:-$MEGAFLOW_HOME/logs} PREFIX=${PREFIX:-$MEGAFLOW_HOME/packages}
mkdir -p "$LOGS" "$MEGAFLOW_HOME/cache"

# Does it run, is it new enough, and has it what a virtual environment with TLS needs?
usable() {
  [[ -n $1 ]] && "$1" - "$WANTED" <<'PYTHON' >"$LOGS/python.log" 2>&1
import sys
import ctypes, sqlite3, ssl, venv, zlib
wanted = tuple(int(part) for part in sys.argv[1].split("."))
sys.exit(f"is {sys.version_info[:2]}" if sys.version_info < wanted else 0)
PYTHON
}

install_from() {
  local mirror=$1 suite=$2 apt=$MEGAFLOW_HOME/cache/apt-python-$2 name="" candidate version dir libs loader deb
  mkdir -p "$apt"
  : >"$apt/status" # nothing is installed: the C library comes with it
  debian_source "$apt" "$mirror" "$suite"
  apt_private "$apt" apt-get update || return 1
  for candidate in python3.13 python3.14 python3.12; do
    version=$(apt_private "$apt" apt-cache show "$candidate" 2>/dev/null | sed -n 's/^Version: //p' | sed -n 1p) || version=""
    [[ -n $version ]] && name=$candidate && break
  done
  [[ -n $name ]] || return 1
  dir=$MEGAFLOW_HOME/$name-$suite-${version//[^0-9A-Za-z.+-]/_}
  rm -rf "$dir" "$apt/cache/archives"
  mkdir -p "$apt/cache/archives/partial"
  quietly "$LOGS/apt-get.log" apt_private "$apt" apt-get install --yes --download-only --no-install-recommends \
    "$name" python3-pip-whl tmux || return 1
  mkdir -p "$dir"
  for deb in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$deb" "$dir"; done
  rm -rf "$apt/cache/archives"
  libs=$(dirname "$(find "$dir" -name libc.so.6 | sed -n 1p)")
  loader=$(find "$libs" -maxdepth 1 -name 'ld-linux*.so.*' | sed -n 1p)
  [[ -n $loader ]] || return 1
  patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libs" "$dir/usr/bin/$name"
  usable "$dir/usr/bin/$name" || return 1
  ln -sfn "$name" "$dir/usr/bin/python"
  ln -sfn "$(basename "$dir")" "$MEGAFLOW_HOME/python.new"
  mv -fT "$MEGAFLOW_HOME/python.new" "$MEGAFLOW_HOME/python"
  say "Python ${version%-*} of Debian $suite is in $MEGAFLOW_HOME/python"
}

# The interpreter's own path, not the link's: a virtual environment keeps it, and the link may move on.
ours() { readlink -f "$MEGAFLOW_HOME/python/usr/bin/python" 2>/dev/null || true; }

candidates=("${MEGAFLOW_PYTHON:-python3.13}" python3.13 python3.14 python3.12 python3)
[[ ${2:-} == --portable ]] && candidates=() # with the libraries of its own suite: it may be taken elsewhere
for candidate in "${candidates[@]}" "$(ours)"; do
  found=$(command -v "$candidate" 2>/dev/null) || continue
  if usable "$found" && [[ ${2:-} != --portable || -e ${found%/*}/tmux ]]; then
    echo "$found"
    exit 0
  fi
done
have patchelf || die "no Python $WANTED on PATH, and no patchelf to adapt Debian's: run launchers/setup first"
mirror=$(debian_mirror)
[[ -n $mirror ]] || die "no Python $WANTED on PATH and no Debian archive in this machine's apt sources: load or install one, or set MEGAFLOW_DEBIAN_MIRROR"
exec 9>"$MEGAFLOW_HOME/python.lock"
flock 9
for suite in stable testing sid; do
  usable "$(ours)" && [[ -e $(dirname "$(ours)")/tmux ]] && break
  say "installing a Python of Debian $suite into $MEGAFLOW_HOME"
  install_from "$mirror" "$suite" && break
  say "not usable: Python of Debian $suite: $(tail -n1 "$LOGS/python.log" 2>/dev/null || true)"
done
usable "$(ours)" || die "no Python $WANTED could be installed; put one on PATH"
ours
