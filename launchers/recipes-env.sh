#!/usr/bin/env bash
# Provides a virtual environment with the packages that recipes need, once; prints its interpreter's path.
#
# usage: launchers/recipes-env.sh
#
# Installs what the recipe.toml files name, in the versions that they name, beside the environment of launchers/setup
# (MEGAFLOW_BUILD/recipes). Everything else comes from that environment, which stays as it is.
# shellcheck source=launchers/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
  -h | --help)
    usage
    exit 0
    ;;
esac
[[ $(id -u) != 0 ]] || die "run launchers/recipes-env.sh as an ordinary user"
SOURCES=$(cd "$(dirname "$0")/.." && pwd -P)
settings "${MEGAFLOW_CLONE:-$SOURCES}" "$HOME"
user_path
directory=$BUILD/recipes
[[ -x $VENV/bin/python ]] || die "$VENV has no Python: run launchers/setup first"
mkdir -p "$LOGS"
exec 8>"$BUILD/recipes.lock"
flock 8

mapfile -t needed < <("$VENV/bin/python" - "$SOURCES"/share/recipes/*/recipe.toml <<'PYTHON'
import sys, tomllib

for path in sys.argv[1:]:
    for package in tomllib.load(open(path, "rb"))["needs"].get("packages", ()):
        print(f"{package['name']}=={package['version']}")
PYTHON
)
key=$({ printf '%s\n' "${needed[@]}" "$VENV"; cat "$0"; } | hash_of)
if ! done_before "$directory/.complete" "$key"; then
  MEGAFLOW_PYTHON=$VENV/bin/python make_venv "$directory"
  # What is installed there counts as installed for pip, too, and comes after what is installed here.
  "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/megaflow.pth"
  say "installing ${needed[*]} into $directory"
  quietly "$LOGS/recipes.log" "$directory/bin/python" -m pip --disable-pip-version-check install "${needed[@]}" ||
    die "the packages of recipes could not be installed: see $LOGS/recipes.log"
  mark_done "$directory/.complete" "$key"
fi
echo "$directory/bin/python"
