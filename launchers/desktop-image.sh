#!/usr/bin/env bash
# Builds the image of desktops over the base image: an X server, a window manager, Chromium, two programs and `screen`.
#
# usage: launchers/desktop-image.sh BASE.sif OUTPUT.sif     (called by launchers/test; containers/desktop.def is its twin)
#
# It is built once: a second call with the same base and recipe does nothing.
# The packages come from the archive of the base image, without root and without a container registry. The pages of
# MiniWoB++ come from the wheel `miniwob`.
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
: "${MEGAFLOW_HOME:?called by launchers/test}"

# (dbus-x11: what GTK wants of a session bus, without systemd.)
PACKAGES=(xvfb xdotool openbox chromium python3-pil l3afpad pcmanfm xterm dbus-x11 fonts-dejavu-core fonts-liberation2)
PAGES=miniwob==1.1.0

base=$1 output=$2
recipes=$(cd "$(dirname "${BASH_SOURCE[0]}")/../containers" && pwd)
apt=$MEGAFLOW_HOME/cache/apt-desktop
work=$MEGAFLOW_HOME/cache/desktop-image
log=$MEGAFLOW_HOME/logs/desktop-image.log

# Downloads the packages that the base image lacks, which its own list of packages shows.
download() {
  local mirror
  rm -rf "$work" "$apt/sources.list" "$apt/cache/archives"
  mkdir -p "$apt" "$work/debs"
  apptainer build --sandbox "$work/root" "$base"
  cp "$work/root/var/lib/dpkg/status" "$apt/status"
  mirror=$(debian_mirror)
  [[ -z $mirror ]] || debian_source "$apt" "$mirror" bookworm
  apt_private "$apt" apt-get update
  apt_private "$apt" apt-get install --yes --download-only --no-install-recommends "${PACKAGES[@]}"
  mv "$apt"/cache/archives/*.deb "$work/debs/"
  MACHINE_PATH=$PATH make_venv "$work/venv"
  "$work/venv/bin/python" -m pip download -q --no-deps --dest "$work" "$PAGES"
  "$work/venv/bin/python" -m zipfile -e "$(echo "$work"/miniwob-*.whl)" "$work/wheel"
  echo "${PAGES#*==}" >"$work/wheel/miniwob/html/VERSION"
}

build() {
  cat >"$work/desktop.def" <<END
Bootstrap: localimage
From: $work/root

%files
    $work/debs /debs
    $work/wheel/miniwob/html /opt/miniwob
    $recipes/screen.py /usr/local/bin/screen
    $recipes/screen_server.py /usr/local/lib/screen_server.py
    $recipes/chromium-policy.json /etc/chromium/policies/managed/screen.json

%post
    set -e
    export DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true PATH=/usr/sbin:/usr/bin
    dpkg --force-unsafe-io --force-confnew --install /debs/*.deb || dpkg --configure --pending
    test -z "\$(dpkg --audit)"
    rm -rf /debs /var/cache/debconf/*-old /var/log/*.log /usr/share/doc /usr/share/man
    chmod 755 /usr/local/bin/screen /usr/local/lib/screen_server.py
    command -v xdotool Xvfb openbox && chromium --version && python3 -c 'import PIL.ImageGrab'

%environment
    export LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
END
  # Compressed lightly, where Apptainer can be told so: a tenth larger, in a fifth of the time.
  local light=()
  ! apptainer build --help | grep -q mksquashfs-args || light=(--mksquashfs-args "-Xcompression-level 1")
  env -u APPTAINER_BINDPATH apptainer build --force --fakeroot "${light[@]}" "$output.new.sif" "$work/desktop.def"
}

mkdir -p "$(dirname "$output")" "$(dirname "$log")" "$(dirname "$work")"
exec 8>"$work.lock" # not of the output: builds share the folders above
flock 8
key=$(cat "$base" "${BASH_SOURCE[0]}" "$recipes"/{screen.py,screen_server.py,chromium-policy.json} | hash_of)
[[ ! -f $output ]] || ! done_before "$output.key" "$key" || exit 0
say "building the image of desktops"
exec 3>&2 >"$log" 2>&1 </dev/null
trap '[[ $? == 0 ]] || { tail -n 25 "$log" && echo "failed: the image of desktops (all of it in $log)"; } >&3' EXIT
download
cd "$MEGAFLOW_HOME"
build
mv -f "$output.new.sif" "$output"
mark_done "$output.key" "$key"
rm -rf "$work"
say "the image of desktops is $output" 2>&3
