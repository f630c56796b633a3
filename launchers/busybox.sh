#!/usr/bin/env bash
# Provides a static busybox, of which tests make the barest image there is: from PATH, else from the apt archive.
#
# usage: launchers/busybox.sh OUTPUT     (called by launchers/setup)
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${MEGAFLOW_HOME:?called by launchers/setup}"

# What runs in a root directory of its own needs no library.
is_static() { [[ -x $1 ]] && ! ldd "$1" >/dev/null 2>&1; }

output=$1
apt=$MEGAFLOW_HOME/cache/apt-busybox
found=$(command -v busybox || true)
if ! is_static "${found:-/nonexistent}"; then
  debian_files "$apt" busybox-static
  found=$(find "$apt/debs" -name busybox -type f -perm -u+x | head -n1)
  is_static "$found" || die "no static busybox: put one at $output, or install the package busybox-static"
fi
mkdir -p "$(dirname "$output")"
cp "$found" "$output.new"
mv -f "$output.new" "$output"
say "a static busybox is at $output"
