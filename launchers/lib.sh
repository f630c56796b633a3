# shellcheck shell=bash
# Shared by the launchers; sourced, never run. Everything a script needs to know about the machine is settled here:
# where things go (settings), who does the work (user), and where missing programs come from (packages).
set -Eeuo pipefail
# No script stops without a word: die says why itself, this names the place of everything else.
trap 'echo "stopped at ${BASH_SOURCE[0]##*/}, line $LINENO: $BASH_COMMAND" >&2' ERR

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# Prints the comment block at the head of the calling script: the help is the documentation, written once.
usage() { awk 'NR == 1 { next } !/^#/ { exit } !/^# shellcheck/ { sub(/^# ?/, ""); print }' "$0"; }

have() { command -v "$1" >/dev/null 2>&1; }

# --- settings -------------------------------------------------------------------------------------------------------

# Debian keeps daemons in sbin, which is not on an ordinary user's PATH.
PATH=$PATH:/usr/sbin:/sbin

# A login node: a Slurm that answers and is not a lab whose environment this shell has.
site_slurm() {
  local conf=${SLURM_CONF:-}
  [[ -z $conf || ! -e ${conf%/*}/lab.json ]] && have sinfo && timeout 10 sinfo -h -o %P >/dev/null 2>&1
}

# Sets MEGAFLOW_HOME (shared by all clones of a user: engine, Apptainer, images) and BUILD (this clone's own: venv, lab,
# work of the demo). On a login node both lie in .venv: nothing else is ours to write to.
settings() {
  local clone=$1 home=$2
  if [[ -z ${MEGAFLOW_SITE:-} ]]; then
    if site_slurm; then MEGAFLOW_SITE=1; else MEGAFLOW_SITE=0; fi
  fi
  if [[ $MEGAFLOW_SITE == 1 && $(id -u) != 0 && -z ${MEGAFLOW_CLONE:-} ]]; then
    MEGAFLOW_HOME=${MEGAFLOW_HOME:-$clone/.venv/var}
    BUILD=${MEGAFLOW_BUILD:-$MEGAFLOW_HOME}
    VENV=$clone/.venv
  else
    MEGAFLOW_HOME=${MEGAFLOW_HOME:-$home/.megaflow-hpc}
    # Short, because sockets live below it and their paths end at 107 characters.
    BUILD=${MEGAFLOW_BUILD:-$MEGAFLOW_HOME/$(basename "$clone" | tr -cd 'A-Za-z0-9._-' | cut -c1-20)-$(cksum <<<"$clone" | cut -d' ' -f1)}
    VENV=$BUILD/venv
  fi
  PREFIX=$MEGAFLOW_HOME/packages
  LOGS=$BUILD/logs
  export MEGAFLOW_SITE MEGAFLOW_HOME MEGAFLOW_BUILD=$BUILD PREFIX LOGS
  export MEGAFLOW_ENGINE_VENV=${MEGAFLOW_ENGINE_VENV:-$MEGAFLOW_HOME/engine}
  export MEGAFLOW_LAB_DIR=${MEGAFLOW_LAB_DIR:-$BUILD/lab}
  export MEGAFLOW_AGENTS=${MEGAFLOW_AGENTS:-$MEGAFLOW_HOME/agents}
  export MEGAFLOW_TEST_BASE_SIF=$MEGAFLOW_HOME/images/base.sif
}

# PATH: what the machine has and this user may enter; ours after it, but the venv first: it is what all this is for.
user_path() {
  local entry
  MACHINE_PATH=""
  while read -r entry; do
    # Ours are left out here, or a script called by another would take them for the machine's.
    [[ -x $entry && :$MACHINE_PATH: != *:$entry:* && $entry != "$VENV"/* && $entry != "$MEGAFLOW_HOME"/* ]] || continue
    MACHINE_PATH+=${MACHINE_PATH:+:}$entry
  done < <(tr : '\n' <<<"$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
  export PATH=$VENV/bin:$MACHINE_PATH:$MEGAFLOW_HOME/apptainer/bin:$PREFIX/bin
}

# --- who works ------------------------------------------------------------------------------------------------------

# enter [--packages] [--fuse] SCRIPT ARGUMENTS…: called first by every launcher. As an ordinary user it settles the
# settings and returns. As root it hands SCRIPT to an ordinary user, from a copy of the sources that this user can read,
# and exits.
enter() {
  local packages=0 fuse=0
  while [[ $1 == --* ]]; do
    case $1 in
      --packages) packages=1 ;;
      --fuse) fuse=1 ;;
    esac
    shift
  done
  SOURCES=$(cd "$(dirname "$1")/.." && pwd -P)
  CLONE=${MEGAFLOW_CLONE:-$SOURCES}
  if [[ $(id -u) == 0 ]]; then
    as_root "$packages" "$fuse" "$@" # does not return
  fi
  settings "$CLONE" "$HOME"
  user_path
  mkdir -p "$BUILD" "$LOGS" || die "$(id -un) cannot write $BUILD: set MEGAFLOW_HOME to a directory of its own"
  [[ $packages == 0 || -n ${MEGAFLOW_CLONE:-} ]] || provide_packages
}

as_root() {
  local packages=$1 fuse=$2 script=$3 names status=0
  shift 3
  export MEGAFLOW_USER=${MEGAFLOW_USER:-megaflow}
  if ! id -u "$MEGAFLOW_USER" >/dev/null 2>&1; then
    say "creating the user $MEGAFLOW_USER"
    useradd --create-home --shell /bin/bash "$MEGAFLOW_USER"
  fi
  [[ $(id -u "$MEGAFLOW_USER") != 0 ]] || die "MEGAFLOW_USER is root: name an ordinary user"
  settings "$CLONE" "$(getent passwd "$MEGAFLOW_USER" | cut -d: -f6)"
  if [[ ! -e $MEGAFLOW_HOME ]]; then
    mkdir -p "$(dirname "$MEGAFLOW_HOME")"
    install -d -m 0755 -o "$MEGAFLOW_USER" "$MEGAFLOW_HOME"
  fi
  as_user mkdir -p "$BUILD" "$LOGS" || die "$MEGAFLOW_USER cannot write $BUILD: set MEGAFLOW_HOME to a directory of its own"
  copy_sources
  if [[ $packages == 1 ]]; then
    # Ask as the user, because that account has to run the programs. The account could forge the answer, so install_packages
    # takes only names that the list of this clone has.
    names=$(as_user env MEGAFLOW_CLONE="$CLONE" bash "$BUILD/src/launchers/setup" --missing) || die "the machine could not be examined"
    LOGS=$(mktemp -d) install_packages env "$names" # root writes no logs into a user's directory
  fi
  pip_settings
  [[ $fuse == 0 ]] || lend_fuse
  as_user env MEGAFLOW_CLONE="$CLONE" bash "$BUILD/src/launchers/$(basename "$script")" "$@" || status=$?
  link_venv
  # What root alone can do, if the launcher has such a part.
  if declare -F by_root >/dev/null && ! by_root "$@"; then status=1; fi
  exit "$status"
}

# Runs a command as MEGAFLOW_USER with an environment of its own, but for what tells pip, git and TLS where to look.
as_user() {
  local name kept=()
  while read -r name; do
    case $name in
      MEGAFLOW_* | PIP_* | UV_* | HF_* | *_proxy | *_PROXY | *_CA_BUNDLE | SSL_CERT_* | GIT_SSL_* | NODE_EXTRA_CA_CERTS | \
        LANG | LC_* | TERM | COLUMNS | TZ | CI | NO_COLOR | PYTEST_ADDOPTS | PATH) kept+=("$name=${!name}") ;;
    esac
  done < <(compgen -e)
  local home
  home=$(getent passwd "$MEGAFLOW_USER" | cut -d: -f6)
  (
    cd "$home" 2>/dev/null || cd /
    exec runuser -u "$MEGAFLOW_USER" -- env -i "${kept[@]}" HOME="$home" USER="$MEGAFLOW_USER" LOGNAME="$MEGAFLOW_USER" SHELL=/bin/bash "$@"
  )
}

# Lends the user a FUSE device where /dev/fuse is closed to users: a node beside it, which goes when this script ends.
# (A descriptor would not do: the kernel wants the device to be opened in the user namespace that mounts.)
lend_fuse() {
  local old
  for old in "/dev/fuse-$MEGAFLOW_USER"-*; do # of launchers that were killed
    [[ ! -c $old || -d /proc/${old##*-} ]] || rm -f "$old"
  done
  [[ -c /dev/fuse ]] && ! as_user test -w /dev/fuse || return 0
  export MEGAFLOW_FUSE=/dev/fuse-$MEGAFLOW_USER-$$
  trap 'rm -f "/dev/fuse-$MEGAFLOW_USER-$$"' EXIT
  # shellcheck disable=SC2046  # its two numbers
  if ! mknod -m 0600 "$MEGAFLOW_FUSE" c $(stat -c '0x%t 0x%T' /dev/fuse) || ! chown "$MEGAFLOW_USER" "$MEGAFLOW_FUSE"; then
    say "no FUSE device can be lent to $MEGAFLOW_USER: the tests that mount with FUSE are left out"
    unset MEGAFLOW_FUSE
  fi
}

# Root's own pip settings (indexes, certificates) lie where the user cannot read them. They may hold passwords.
pip_settings() {
  local files=("${PIP_CONFIG_FILE:-}" "$HOME/.pip/pip.conf" "$HOME/.config/pip/pip.conf") merged
  merged=$(python3 - "${files[@]}" <<'EOF'
import configparser, io, sys
merged = configparser.RawConfigParser(strict=False)
merged.read([name for name in sys.argv[1:] if name])
text = io.StringIO()
merged.write(text)
print(text.getvalue().strip())
EOF
  ) || merged=""
  unset PIP_CONFIG_FILE
  [[ -n $merged ]] || return 0
  # shellcheck disable=SC2016  # expanded by the user's shell
  as_user bash -c 'umask 077; cat >"$1.new" && mv -f "$1.new" "$1"' - "$MEGAFLOW_HOME/pip.conf" <<<"$merged"
  export PIP_CONFIG_FILE=$MEGAFLOW_HOME/pip.conf
}

# The sources by way of a pipe, since the user may not be able to read the clone: BUILD/src is the latest of a few copies,
# each named after its content, so that none changes under the feet of something that runs.
copy_sources() {
  local archive key
  archive=$(mktemp)
  # Status 1 is a file that was written to meanwhile: a cache, or an editor at work.
  tar -C "$CLONE" --exclude=./.git --exclude=./.venv --exclude=./runs --exclude='__pycache__' --exclude='.*_cache' \
    --exclude=./.hypothesis --sort=name --owner=0 --group=0 --mtime=@0 -cf "$archive" . || [[ $? == 1 ]]
  key=$(hash_of <"$archive")
  # shellcheck disable=SC2016  # expanded by the user's shell
  as_user bash -c '
    set -e
    cd "$1"
    if [[ ! -d src-$2 ]]; then
      rm -rf src.new
      mkdir src.new
      tar -xmf - -C src.new
      chmod -R u+rwX src.new
      mv -T src.new "src-$2"
    fi
    touch "src-$2"
    ln -sfnT "src-$2" src
    ls -dt src-*/ | tail -n +5 | xargs -r rm -rf' - "$BUILD" "$key" <"$archive" || die "the sources could not be copied to $BUILD"
  rm -f "$archive"
}

# .venv in the clone, as users know it: a link to where the environment is.
link_venv() {
  [[ $VENV != "$CLONE/.venv" && -x $VENV/bin/python ]] || return 0
  if [[ -e $CLONE/.venv && ! -L $CLONE/.venv ]]; then
    say "$CLONE/.venv is a directory of yours and is left alone; the environment is $VENV"
  else
    ln -sfnT "$VENV" "$CLONE/.venv"
  fi
}

# --- small tools ----------------------------------------------------------------------------------------------------

hash_of() { sha256sum | cut -c1-16; }

# done_before FILE KEY: was this step finished with the same inputs? mark_done FILE KEY records it, in one rename.
done_before() { [[ -f $1 && $(cat "$1") == "$2" ]]; }
mark_done() { printf '%s\n' "$2" >"$1.new" && mv -f "$1.new" "$1"; }

# quietly LOG COMMAND…: output goes to LOG, and its tail to the terminal when the command fails. (Not for functions of
# several commands: inside a condition the shell goes on after one that fails.)
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
    # (What update would fetch: it needs no lists to be there yet.)
    apt-get update --print-uris -o Debug::NoLocking=1 2>/dev/null | sed -n "s,^'\(.*/debian\)/*/dists/.*,\1,p" | head -n1 || true
  fi
}

# debian_source DIR MIRROR SUITE: has apt_private DIR use this archive in place of the machine's sources.
debian_source() {
  local key=/usr/share/keyrings/debian-archive-keyring.gpg
  [[ -f $key ]] || key=$PREFIX$key
  echo "deb [signed-by=$key] $2 $3 main" >"$1/sources.list"
}

# debian_files DIR PACKAGE: unpacks one package, and none that it depends on, below DIR/debs.
debian_files() {
  local dir=$1 package=$2 mirror
  rm -rf "$dir/debs" && mkdir -p "$dir/debs"
  mirror=$(debian_mirror)
  [[ -z $mirror ]] || debian_source "$dir" "$mirror" bookworm
  apt_private "$dir" apt-get update
  (cd "$dir/debs" && apt_private "$dir" apt-get download "$package" && dpkg-deb -x "$package"_*.deb .)
}

# --- packages: what a machine may lack ------------------------------------------------------------------------------

# program:package, the program being what shows that the package is there.
# (fuse-overlayfs is what Apptainer falls back to where the kernel refuses users an overlay; the browser is for the tests
# of reports, 96 MB; gcc for the program that starts commands in sandboxes; groff for that of the man page, zsh and tcsh for those of completion, modules for that of jobs.)
TOOLS=(h5dump:hdf5-tools mksquashfs:squashfs-tools squashfuse:squashfuse fuse-overlayfs:fuse-overlayfs fakeroot:fakeroot
  patchelf:patchelf git:git patch:patch gcc:gcc chromium-headless-shell:chromium-headless-shell
  groff:groff-base zsh:zsh tcsh:tcsh modulecmd:environment-modules)
SLURM=(slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client slurmdbd:slurmdbd munged:munge mariadbd:mariadb-server-core)
# Packages without a program of their own that the lab needs beside those.
SLURM_MORE=(slurm-wlm-basic-plugins slurm-wlm-mysql-plugin mariadb-client-core)

# listed_packages: prints every package that may be installed: those that missing_packages can name, and those of launchers/fresh.
listed_packages() {
  printf '%s\n' "${TOOLS[@]##*:}" "${SLURM[@]##*:}" "${SLURM_MORE[@]}" libpmix2 uidmap linux-libc-dev debian-archive-keyring \
    python3-venv python3.11 python3.{11..19}-venv mmdebstrap
}

# The packages that this machine lacks for us. On a login node: none, the site's are used.
missing_packages() {
  local pair slurm=0
  [[ $MEGAFLOW_SITE == 1 ]] && return
  for pair in "${TOOLS[@]}" "${SLURM[@]}"; do
    have "${pair%%:*}" && continue
    echo "${pair##*:}"
    [[ " ${SLURM[*]} " == *" $pair "* ]] && slurm=1
  done
  [[ $slurm == 0 ]] || printf '%s\n' "${SLURM_MORE[@]}"
  # The library that Slurm's plugin for PMIx opens, which is how Open MPI's ranks find each other.
  compgen -G '/usr/lib/*/libpmix.so.2' >/dev/null || echo libpmix2
  # A range of user ids for --fakeroot, if root can be had; unpacked by a user newuidmap has no power.
  [[ -z ${1:-} ]] || have newuidmap || echo uidmap
  # Debian splits off what a virtual environment needs.
  python_with_venv || printf '%s\n' python3-venv "$(basename "$(readlink -f "$(find_python)")")-venv"
  # The kernel's headers, whose numbers of calls the tests compare with.
  [[ -f /usr/include/asm-generic/unistd.h ]] || echo linux-libc-dev
  # The keys of the Debian archive, where Apptainer comes from, on the systems derived from it.
  [[ -f /usr/share/keyrings/debian-archive-keyring.gpg ]] || echo debian-archive-keyring
  find_python >/dev/null || printf '%s\n' python3.11 python3.11-venv
}

# How to become root for apt-get: nothing to add, sudo, or not at all.
root_prefix() {
  if [[ $(id -u) == 0 ]]; then
    echo env
  elif have sudo && sudo -n true 2>/dev/null; then
    echo "sudo -n"
  fi
}

provide_packages() {
  local root names
  root=$(root_prefix)
  # What the machine lacks, not counting what was unpacked before: the same answer every time.
  names=$(PATH=$MACHINE_PATH PREFIX=/nonexistent missing_packages "$root")
  [[ -n $names ]] || return 0
  have apt-get || die "missing: ${names//$'\n'/ } (and no apt-get to fetch them with): install them, or load them as modules"
  if [[ -n $root ]]; then install_packages "$root" "$names"; else unpack_packages "$names"; fi
}

# install_packages "env" or "sudo -n" NAMES: installs packages as root. Skips names that the list of this clone does not have,
# because apt-get would accept a path, an option or any other package.
install_packages() {
  local root=$1 others wanted names
  others=$(grep -Fvx -f <(listed_packages) <<<"$2" || true)
  [[ -z $others ]] || say "not in the list of packages of launchers/lib.sh, and not installed: $(printf '%q' "$others")"
  wanted=$(grep -Fx -f <(listed_packages) <<<"$2" || true)
  [[ -n $wanted ]] || return 0
  have apt-get || die "missing: ${wanted//$'\n'/ } (and no apt-get to install them with)"
  # shellcheck disable=SC2086  # two words
  $root apt-get -qq -o DPkg::Lock::Timeout=120 update >/dev/null || say "apt-get update failed; trying with the lists there are"
  mapfile -t names < <(known_packages apt-cache "$wanted")
  [[ ${#names[@]} -gt 0 ]] || return 0
  say "installing ${names[*]}"
  # shellcheck disable=SC2086
  quietly "$LOGS/apt-get.log" $root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 \
    install --yes --no-install-recommends -- "${names[@]}" || die "apt-get could not install: ${names[*]}"
}

# Those of the packages that this distribution has: names differ between releases.
known_packages() {
  local query=$1 name
  sort -u <<<"$2" | while read -r name; do
    if [[ -n $($query show "$name" 2>/dev/null) ]]; then echo "$name"; else say "this distribution has no package $name"; fi
  done
}

# The same packages, with everything they depend on that the machine lacks, unpacked into a directory of our own.
unpack_packages() {
  local apt=$MEGAFLOW_HOME/cache/apt-packages names dir deb
  dir=$MEGAFLOW_HOME/packages-$(sort -u <<<"$1" | hash_of)
  [[ $(readlink "$PREFIX") != "$(basename "$dir")" ]] || return 0
  apt_private "$apt" apt-get update || die "apt-get could not fetch the lists of packages"
  mapfile -t names < <(known_packages "apt_private $apt apt-cache" "$1")
  say "without root: unpacking ${names[*]} into $PREFIX"
  rm -rf "$apt/cache/archives"
  mkdir -p "$apt/cache/archives/partial"
  quietly "$LOGS/apt-get.log" apt_private "$apt" apt-get install --yes --download-only --no-install-recommends "${names[@]}" ||
    die "apt-get could not download: ${names[*]}"
  rm -rf "$dir"
  mkdir -p "$dir/bin"
  for deb in "$apt"/cache/archives/*.deb; do
    # Never a second C library beside the machine's own.
    [[ $(basename "$deb") == libc6_* ]] || dpkg-deb -x "$deb" "$dir"
  done
  # (Not in the foreground of a condition: there the shell would go on after an error.)
  relocate_packages "$dir" >"$LOGS/relocate.log" 2>&1 &
  wait "$!" || die "the unpacked packages could not be adapted to $dir: $(tail -n1 "$LOGS/relocate.log")"
  ln -sfn "$(basename "$dir")" "$PREFIX.new"
  mv -fT "$PREFIX.new" "$PREFIX"
  rm -rf "$apt/cache/archives"
}

# Tells every binary (and fakeroot, a script) where its libraries are now, and gathers the programs in one bin.
relocate_packages() {
  local dir=$1 patch file name libraries
  patch=$(command -v patchelf || echo "$dir/usr/bin/patchelf")
  libraries=$(find "$dir" \( -type f -o -type l \) -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
  find "$dir" -type f \( -name '*.so*' -o -perm -u+x \) ! -path '*/bin/patchelf' | while read -r file; do
    [[ $(head -c4 "$file" | tr -d '\0') == $'\x7fELF' ]] || continue
    "$patch" --force-rpath --set-rpath "$libraries" "$file" || echo "left as it is: $file"
  done
  sed -i "s,=/usr,=$dir/usr," "$dir"/usr/bin/fakeroot-*
  for file in "$dir"/usr/{bin,sbin}/* "$dir"/sbin/*; do
    # Python finds its library from where it is called: it must be called by its own path.
    [[ -x $file && ! -d $file && $file != */python* ]] || continue
    # Under its own name, and under that which the package's scripts would have given it (update-alternatives).
    name=$(basename "$file")
    ln -sfn "$file" "$dir/bin/$name"
    name=${name%-wlm}
    ln -sfn "$file" "$dir/bin/${name%-sysv}"
  done
}

# --- Python ---------------------------------------------------------------------------------------------------------

# An interpreter 3.11 or later that the present user can run. 3.11 first: the engine's wheels exist for it for certain.
find_python() {
  local candidate
  for candidate in ${MEGAFLOW_PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3 \
    /usr/bin/python3.1[1-9] /usr/local/bin/python3.1[1-9] "$PREFIX/usr/bin/python3.11"; do
    candidate=$(PATH=$MACHINE_PATH command -v "$candidate") || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

# Is there one that can make a virtual environment? (No interpreter at all is another matter.)
python_with_venv() {
  local python
  python=$(find_python) || return 0
  "$python" -c 'import venv, ensurepip' >/dev/null 2>&1
}

# make_venv DIR: a virtual environment with pip in it, unless it is there and its interpreter runs.
make_venv() {
  local dir=$1 python wheel
  "$dir/bin/python" -m pip --version >/dev/null 2>&1 && return 0
  python=$(find_python) || die "no Python 3.11 or later that $(id -un) can run: install one, or name it in MEGAFLOW_PYTHON"
  # An environment that is broken is made anew, if it was we who made it.
  if [[ -e $dir/pyvenv.cfg && ! -e $dir/.megaflow ]]; then
    die "$dir is a virtual environment whose Python does not run, and not one of ours: repair it or name another"
  fi
  rm -rf "${dir:?}"/{bin,lib,lib64,pyvenv.cfg,.dependencies,.wheel}
  mkdir -p "$dir"
  touch "$dir/.megaflow"
  say "creating $dir with $("$python" --version) ($python)"
  if "$python" -c 'import ensurepip' 2>/dev/null && "$python" -m venv "$dir" 2>/dev/null; then
    return 0
  fi
  # Without ensurepip: pip from the package of wheels that Debian's ensurepip would have used, or the interpreter's own.
  "$python" -m venv --without-pip "$dir"
  wheel=$(find "${python%/bin/*}/share/python-wheels" "$PREFIX/usr/share/python-wheels" /usr/share/python-wheels -name 'pip-*.whl' 2>/dev/null | head -n1 || true)
  if [[ -n $wheel ]]; then
    "$dir/bin/python" "$wheel/pip" install -q pip
  else
    "$python" -m pip --python "$dir/bin/python" install -q pip
  fi
}
