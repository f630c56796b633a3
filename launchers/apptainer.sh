#!/usr/bin/env bash
# Provides Apptainer, as an ordinary user: from PATH, else from Debian's archive in a private prefix.
#
# usage: launchers/apptainer.sh        (called by launchers/setup, which has set MEGAFLOW_HOME)
#
# Debian packages Apptainer for sid only, built against a newer C library than stable has. The package runs anywhere if
# that C library lies beside it and the binaries are told so with patchelf. Suites are tried in turn, since the archive
# moves; what counts is that a container really starts. MEGAFLOW_DEBIAN_MIRROR names the archive on other systems.
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${MEGAFLOW_HOME:?called by launchers/setup}"

# A root directory of nothing but busybox: the shortest proof that a container starts.
starts() {
  local apptainer=$1 root=$2
  mkdir -p "$root"/{bin,dev,etc,proc,root,sys,tmp,usr,var/tmp}
  ln -sf busybox "$root/bin/sh"
  touch "$root"/etc/{passwd,group,hosts,resolv.conf,localtime}
  timeout 60 "$apptainer" -q exec --userns --no-home --containall "$root" /bin/busybox true >"$LOGS/apptainer.log" 2>&1 </dev/null
}

# Points every binary of the package at the C library of its own suite, with absolute paths: DIR is final.
relocate() {
  local dir=$1 libs loader file
  libs=$(dirname "$(find "$dir" -path '*/usr/lib/*-linux-gnu/libc.so.6' | head -n1)")
  loader=$(find "$libs" -maxdepth 1 -name 'ld-linux*.so.*' | head -n1)
  [[ -n $libs && -n $loader ]] || return 1
  for file in "$dir/usr/bin/apptainer" "$(find "$dir" -path '*/apptainer/bin/starter')"; do
    patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libs" "$file"
  done
  # The loader finds a library's own needs through the library's rpath, not the program's.
  for file in "$libs"/libseccomp.so.2 "$libs"/libsqlite3.so.0; do
    patchelf --force-rpath --set-rpath "$libs" "$(readlink -f "$file")"
  done
  # The package finds its files from the path of the binary it runs: the program from usr/bin, the starter from usr/lib.
  mkdir -p "$dir"/usr/var/lib/apptainer/mnt/session "$dir"/usr/lib/var/lib/apptainer/mnt/session
  mv "$dir/etc" "$dir/usr/etc"
  ln -s ../etc "$dir/usr/lib/etc"
  ln -s usr/bin "$dir/bin"
}

install_from() {
  local mirror=$1 suite=$2 apt=$MEGAFLOW_HOME/cache/apt-$2 version dir deb
  mkdir -p "$apt/debs"
  : >"$apt/status"
  debian_source "$apt" "$mirror" "$suite"
  apt_private "$apt" apt-get update || return 1
  version=$(apt_private "$apt" apt-cache show apptainer | sed -n 's/^Version: //p' | head -n1)
  [[ -n $version ]] || return 1
  dir=$MEGAFLOW_HOME/apptainer-$suite-${version//[^0-9A-Za-z.+-]/_}
  rm -rf "$dir" "$apt"/debs/*.deb
  mkdir -p "$dir"
  (cd "$apt/debs" && apt_private "$apt" apt-get download apptainer libc6 libseccomp2 libsqlite3-0 busybox-static) || return 1
  for deb in "$apt"/debs/[al]*.deb; do dpkg-deb -x "$deb" "$dir"; done
  rm -rf "$apt/root"
  dpkg-deb -x "$apt"/debs/busybox-static_*.deb "$apt/root"
  [[ -e $apt/root/bin/busybox ]] || cp -r "$apt/root/usr/bin" "$apt/root/bin"
  relocate "$dir" || return 1
  starts "$dir/bin/apptainer" "$apt/root" || return 1
  ln -sfn "$(basename "$dir")" "$MEGAFLOW_HOME/apptainer.new"
  mv -fT "$MEGAFLOW_HOME/apptainer.new" "$MEGAFLOW_HOME/apptainer"
  say "Apptainer $version of Debian $suite is in $MEGAFLOW_HOME/apptainer"
}

LOGS=${LOGS:-$MEGAFLOW_HOME/logs} PREFIX=${PREFIX:-$MEGAFLOW_HOME/packages}
mkdir -p "$LOGS"
if have apptainer; then
  apptainer version >"$LOGS/apptainer.log" 2>&1 && exit 0
  say "$(command -v apptainer) does not run: $(tail -n1 "$LOGS/apptainer.log")"
fi
mirror=$(debian_mirror)
[[ -n $mirror ]] || die "no Apptainer on PATH and no Debian archive in this machine's apt sources: load or install Apptainer, or set MEGAFLOW_DEBIAN_MIRROR to a Debian mirror's address"
for suite in sid testing stable-backports; do
  say "installing Apptainer of Debian $suite into $MEGAFLOW_HOME"
  install_from "$mirror" "$suite" && exit 0
  say "not usable: Apptainer of Debian $suite: $(tail -n1 "$LOGS/apptainer.log" 2>/dev/null || true)"
done
die "no Apptainer could be installed; put one on PATH (see $LOGS/apptainer.log)"
