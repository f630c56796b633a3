#!/usr/bin/env bash
# Builds the base image of the tasks without root and without a container registry: Debian's packages, Python and git.
#
# usage: launchers/base-image.sh OUTPUT.sif     (called by launchers/setup; containers/task-base.def is its twin)
#
# apt-get and dpkg-deb put the packages' files together, and `apptainer build` runs their scripts inside. It needs no
# debootstrap and no range of user ids of one's own. MEGAFLOW_DEBIAN_MIRROR names
# the archive of Debian bookworm. If no archive is known, the image has the system that this machine has.
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${MEGAFLOW_HOME:?called by launchers/setup}"

PACKAGES=(python3 python3-pip python3-venv python-is-python3 git patch ca-certificates procps)

output=$1
suite=bookworm
mirror=$(debian_mirror)
apt=$MEGAFLOW_HOME/cache/apt-base
work=$MEGAFLOW_HOME/cache/base-image
log=$MEGAFLOW_HOME/logs/base-image.log

# Downloads what an empty machine needs to have PACKAGES.
download() {
  mkdir -p "$apt"
  : >"$apt/status"
  rm -f "$apt/sources.list"
  [[ -z $mirror ]] || debian_source "$apt" "$mirror" "$suite"
  apt_private "$apt" apt-get update
  rm -f "$apt"/cache/archives/*.deb
  apt_private "$apt" apt-get install --yes --download-only --no-install-recommends '?essential' apt "${PACKAGES[@]}"
}

# The files of all packages, and the packages themselves for dpkg to install over them.
unpack() {
  local deb name
  chmod -R u+w "$work" 2>/dev/null || true
  rm -rf "$work"
  mkdir -p "$work"/root/{usr/{bin,sbin,lib,lib64},debs,dev,proc,sys,tmp,root}
  for name in bin sbin lib lib64; do ln -s "usr/$name" "$work/root/$name"; done
  for deb in "$apt"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$work/root" --no-same-owner --keep-directory-symlink
  done
  cp "$apt"/cache/archives/*.deb "$work/root/debs/"
  mkdir -p "$work/root/var/lib/dpkg/"{info,updates}
  touch "$work/root/var/lib/dpkg/status" "$work/root/var/lib/dpkg/available"
  cp "$work/root/usr/share/base-passwd/passwd.master" "$work/root/etc/passwd"
  cp "$work/root/usr/share/base-passwd/group.master" "$work/root/etc/group"
  if [[ -n $mirror ]]; then
    echo "deb $mirror $suite main" >"$work/root/etc/apt/sources.list"
  fi
}

build() {
  cat >"$work/base.def" <<EOF
Bootstrap: localimage
From: $work/root

%post
    set -e
    export DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true PATH=/usr/sbin:/usr/bin
    cd /debs
    # The order that every package's scripts count on: users, then awk and perl, then the rest.
    for package in base-passwd base-files libc6 mawk perl-base dpkg; do
        dpkg --force-depends --force-unsafe-io --install "\$package"_*.deb || true
    done
    dpkg --force-depends --force-unsafe-io --force-confnew --install ./*.deb || dpkg --configure --pending
    test -z "\$(dpkg --audit)"
    cd /
    rm -rf /debs /var/cache/debconf/*-old /var/log/*.log /usr/share/doc /usr/share/man
    # Nobody but us installs into this Python, so pip needs no leave of the distribution.
    rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
    # Sandboxes have one user id: apt must not change to another.
    echo 'APT::Sandbox::User "root";' >/etc/apt/apt.conf.d/01one-user
    python3 -m pip --version && git --version

%environment
    export LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
EOF
  env -u APPTAINER_BINDPATH apptainer build --force --fakeroot "$output.new.sif" "$work/base.def"
}

mkdir -p "$(dirname "$output")" "$(dirname "$log")"
exec 3>&2 >"$log" 2>&1 </dev/null
trap '[[ $? == 0 ]] || { tail -n 25 "$log" && echo "failed: the base image (all of it in $log)"; } >&3' EXIT
download
unpack
cd "$MEGAFLOW_HOME"
build
mv -f "$output.new.sif" "$output"
chmod -R u+w "$work" && rm -rf "$work"
say "the base image of the tasks is $output" 2>&3
