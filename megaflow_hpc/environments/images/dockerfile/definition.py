"""A Dockerfile's steps → an Apptainer definition, in their order, and the files its copies need.

::

    WORK/                  on local disk, seen by the build as /.megaflow-build
      definition
      steps/<n>/<i>/item   what the n-th copy puts in place, finished on the host (context.py)
      tmp/  vartmp/        what the build has as /tmp and /var/tmp
      build-temp-…/rootfs  where Apptainer assembles the image

``%post`` is one shell script: each ``RUN`` in a subshell with the directory, variables, user and shell that hold at
its line, each copy in between. Apptainer would give a build the host's own /tmp: it gets one of its own instead, and
what is left there is put into the image.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from megaflow_hpc.environments.images.dockerfile.context import lay_out
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.dockerfile.steps import Copy, Run, Stage, copies
from megaflow_hpc.errors import ConfigError

BUILD_DIR = "/.megaflow-build"
FROM_DIR = "/.megaflow-from"
"""What comes from another stage, while ``%post`` runs."""

_PROLOGUE = """\
line=0
tools() {{ PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }}
empty() {{ for place in "$@"; do tools rm -rf "$place"/* "$place"/.[!.]*; done; }}
finish() {{ # nothing may stay on the host that belongs to another uid
  status=$?
  [ $status = 0 ] || echo "{name}:$line: exit status $status" >&2
  empty /tmp /var/tmp
  if {last} || [ $status != 0 ]; then empty {build}/steps; fi
  exit $status
}}
trap finish EXIT
umask 022
image=${{APPTAINER_CONTAINER:-$SINGULARITY_CONTAINER}}
image={build}${{image#{work}}}
if [ ! -d "$image/etc" ]; then echo "the image is not assembled below {work}" >&2; exit 1; fi
while IFS= read -r name; do
  name=${{name#export }}; name=${{name#declare -x }}
  case "$name" in APPTAINER* | SINGULARITY*) unset "${{name%%=*}}" ;; esac
done <<END
$(export -p)
END
unset name TMPDIR PS1 PROMPT_COMMAND
case "$LD_LIBRARY_PATH" in /.singularity.d/libs) unset LD_LIBRARY_PATH ;; esac
for place in /tmp /var/tmp; do
  if [ -d "$image$place" ]; then tools cp -a "$image$place/." $place/; fi
  tools chmod 1777 $place
done
"""

_EPILOGUE = """\
line=end
for place in /tmp /var/tmp; do
  if [ -d "$image$place" ]; then tools cp -a $place/. "$image$place/"; fi
done
tools rm -rf {from_dir}
"""

_PLACE = """\
make_way() ( # directory, owner of what has to be made of it and above it
  directory=${1%/}
  if [ -z "$directory" ] || [ -d "$directory" ]; then exit 0; fi
  make_way "${directory%/*}" "$2"
  tools mkdir "$directory"
  if [ -n "$2" ]; then tools chown "$2" "$directory"; fi
)
place() { # directory of items, target, into|as, owner, mode
  for item in "$1"/*/* "$1"/*/.[!.]*; do
    if [ ! -e "$item" ] && [ ! -L "$item" ]; then continue; fi
    if [ -n "$4" ]; then tools chown -R "$4" "$item"; fi
    if [ -n "$5" ]; then tools chmod -R "$5" "$item"; fi
    if [ -d "$item" ] && [ ! -L "$item" ]; then
      make_way "$2" "$4"
      for inner in "$item"/* "$item"/.[!.]* "$item"/..?*; do
        if [ -e "$inner" ] || [ -L "$inner" ]; then tools cp -a "$inner" "${2%/}/"; fi
      done
    else
      target=$2
      if [ "$3" = into ] || [ -d "$2" ]; then target=${2%/}/${item##*/}; fi
      make_way "${target%/*}" "$4"
      tools cp -a "$item" "$target"
    fi
  done
}"""
"""As Docker copies: of a directory its contents; a file under its own name where the target is a directory."""

_AS_USER = """\
as_user() { # user[:group], command
  who=${1%%:*} group=; case "$1" in *:*) group=${1#*:} ;; esac; shift
  uid= gid= home=/
  while IFS=: read -r name _ number primary _ place _; do
    if [ "$name" = "$who" ] || [ "$number" = "$who" ]; then uid=$number gid=$primary home=$place; break; fi
  done </etc/passwd
  if [ -z "$uid" ]; then
    case "$who" in *[!0-9]*) echo "USER $who: the image has no such user" >&2; exit 1 ;; esac
    uid=$who gid=0
  fi
  if [ -n "$group" ]; then
    gid=; while IFS=: read -r name _ number _; do if [ "$name" = "$group" ]; then gid=$number; fi; done </etc/group
    gid=${gid:-$group}
  fi
  export HOME=$home
  if program=$(tools command -v setpriv); then
    exec "$program" --reuid "$uid" --regid "$gid" --clear-groups -- "$@"
  fi
  exec su -s /bin/sh "$who" -c 'exec "$@"' -- sh "$@"
}"""

_COVER = """\
cover() { if [ -e "$1" ]; then tools mv "$1" "$1.megaflow-covered"; fi; }
uncover() {
  tools rm -rf "$1"
  if [ -e "$1.megaflow-covered" ]; then tools mv "$1.megaflow-covered" "$1"; else tools mkdir -p "$1"; fi
}"""


def write_definition(dockerfile: Dockerfile, images: Mapping[str, str], work: Path) -> Path:
    """Writes the definition and lays out what it copies.

    Args:
        images: a file or directory for each of ``dockerfile.bases``.
        work: an empty directory on local disk, which also has to be the build's ``TMPDIR``.

    Raises:
        ConfigError: a source that cannot be copied.
    """
    for name in ("steps", "tmp", "vartmp"):
        (work / name).mkdir()
    text: list[str] = []
    stages = dockerfile.needed
    names = {stage.name for stage in stages}
    number = 0
    for external in dockerfile.bases:
        if any(copy.origin == external for stage in stages for copy in copies(stage)) and external not in names:
            text += ["Bootstrap: localimage", f"From: {images[external]}", f"Stage: {_stage_name(external)}", ""]
    for stage in stages:
        for copy in copies(stage):
            number += 1
            copy.number = number
            if copy.origin is None:
                _lay_out(dockerfile, copy, work / "steps" / str(number))
        text += _stage_text(dockerfile, stage, images[stage.base], work)
    path = work / "definition"
    path.write_text("\n".join(text), encoding="utf-8", errors="surrogateescape")
    return path


def build_options(work: Path) -> list[str]:
    """Options that ``apptainer build`` needs beside the definition, for the same ``work``."""
    binds = f"{work}:{BUILD_DIR},{work}/tmp:/tmp,{work}/vartmp:/var/tmp"
    return ["--bind", binds]


def _lay_out(dockerfile: Dockerfile, copy: Copy, place: Path) -> None:
    place.mkdir()
    try:
        lay_out(
            dockerfile.context, copy.sources, place, extract=copy.extract, parents=copy.parents, exclude=copy.exclude
        )
        for name, content in copy.texts.items():
            target = place / f"text-{name}" / (name if copy.into else os.path.basename(copy.target))
            target.parent.mkdir()
            target.write_text(content, encoding="utf-8", errors="surrogateescape")
            target.chmod(0o644)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{dockerfile.path}:{copy.line}: {error}") from error


def _stage_text(dockerfile: Dockerfile, stage: Stage, image: str, work: Path) -> list[str]:
    inside = f'"${{APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}}{BUILD_DIR}"'
    lines = ["Bootstrap: localimage", f"From: {image}", f"Stage: {_stage_name(stage.name)}", ""]
    lines += ["%setup", f"    mkdir -p {inside}", ""]
    for copy in copies(stage):
        if copy.origin is not None:
            lines += [f"%files from {_stage_name(copy.origin)}"]
            lines += [
                f"    {_plain(dockerfile, copy, each)} {FROM_DIR}/{copy.number}/{i}/"
                for i, each in enumerate(copy.sources)
            ]
            lines += [""]
    prologue = _PROLOGUE.format(
        name=dockerfile.path.name,
        build=BUILD_DIR,
        work=shlex.quote(os.path.realpath(work)),
        last="true" if stage is dockerfile.last else "false",
    )
    lines += ["%post -c /bin/sh", "set -e", prologue + "\n".join((_PLACE, _AS_USER, _COVER))]
    for step in stage.steps:
        if isinstance(step, Copy):
            lines += [f"line={step.line}", _place(step)]
        elif isinstance(step, Run):
            lines += _run(step)
        else:
            # PATH and the like are the image's from here on; what the script itself needs it finds by `tools`.
            lines += [re.sub(r"^mkdir ", "tools mkdir ", step.text)]
    lines += [_EPILOGUE.format(from_dir=FROM_DIR)]
    if stage.exports:
        lines += ["%environment", *stage.exports, ""]
    return lines


def _run(run: Run) -> list[str]:
    lines = [f"line={run.line}"]
    for mount in run.mounts:
        target = shlex.quote(mount.target)
        lines += [f"cover {target}"]
        lines += [_place(mount.copy)] if mount.copy else [f"tools mkdir -p {target}"]
        lines += [f"tools chown {shlex.quote(mount.owner)} {target}"] if mount.owner else []
    as_user = (
        "" if run.user in (None, "", "root", "0", "root:root", "0:0") else f"as_user {shlex.quote(run.user or '')} "
    )
    # Not indented: that would alter strings of several lines.
    lines += ["(", f"cd {shlex.quote(run.workdir)}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in run.exports.items()]
    lines += [as_user + " ".join(map(shlex.quote, run.argv)), ")"]
    lines += [f"uncover {shlex.quote(mount.target)}" for mount in reversed(run.mounts)]
    return lines


def _place(copy: Copy) -> str:
    where = f"{BUILD_DIR}/steps/{copy.number}" if copy.origin is None else f"{FROM_DIR}/{copy.number}"
    words = (where, copy.target, "into" if copy.into else "as", copy.owner, copy.mode)
    return "place " + " ".join(map(shlex.quote, words))


def _plain(dockerfile: Dockerfile, copy: Copy, source: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9._/@+~-]+", source):
        raise ConfigError(
            f"{dockerfile.path}:{copy.line}: --from={copy.origin} {source!r}: expected a path of letters, digits and "
            "._/@+~- below /; copy its directory"
        )
    return source


def _stage_name(name: str) -> str:
    return "stage-" + re.sub(r"[^A-Za-z0-9-]", "-", name)
