# shellcheck shell=bash
# Sourced by demo and test: a Slurm for the rest of the script. The site's own on a login node, else this clone's lab,
# which is stopped at the end if it was not running before.
[[ $MEGAFLOW_SITE == 1 ]] || {
  if ! bash "$SOURCES/launchers/lab" status >/dev/null 2>&1 && [[ ${MEGAFLOW_KEEP_LAB:-} != 1 ]]; then
    trap 'bash "$SOURCES/launchers/lab" stop' EXIT
  fi
  bash "$SOURCES/launchers/lab" start
  eval "$(bash "$SOURCES/launchers/lab" env)"
}
