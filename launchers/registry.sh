#!/usr/bin/env bash
# Provides a container registry for the tests: from PATH, else from Debian's archive. It is unpacked, not installed: as a
# package it would start a server on this machine.
#
# usage: launchers/registry.sh OUTPUT     (called by launchers/setup)
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${MEGAFLOW_HOME:?called by launchers/setup}"

output=$1
apt=$MEGAFLOW_HOME/cache/apt-registry
found=$(command -v docker-registry || true)
if [[ -z $found ]]; then
  debian_files "$apt" docker-registry
  found=$apt/debs/usr/bin/docker-registry
fi
"$found" --version >/dev/null || die "no docker-registry that runs: put one at $output, or install the package docker-registry"
mkdir -p "$(dirname "$output")"
cp "$found" "$output.new"
mv -f "$output.new" "$output"
rm -rf "$apt/debs"
say "a container registry for the tests is at $output"
