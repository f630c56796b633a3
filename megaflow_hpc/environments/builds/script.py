"""A Dockerfile's steps as text for the shell of the sandbox that carries them out.

Every step is a command of its own: it sets the variables that hold at its line, and goes to its directory. Nothing in
it is trusted, and nothing of it is read by any program outside of the sandbox.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megaflow_hpc.environments.images.dockerfile.steps import Copy, Mount, Run, Workdir

STEPS_DIR = "/.megaflow-build"
"""Where the sandbox sees, read-only, what its copies put in place: ``<number>/<i>/item``."""

_PROLOGUE = """\
set -e
umask 022
unset TAR_OPTIONS
tools() { PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
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
  from=$1
  if [ -n "$4$5" ]; then # the items are read-only: a copy of them takes owner and mode
    from=/.megaflow-placing
    tools rm -rf $from
    tools cp -a "$1" $from
  fi
  for item in "$from"/*/* "$from"/*/.[!.]*; do
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
  if [ "$from" != "$1" ]; then tools rm -rf "$from"; fi
}
"""
"""As Docker copies: of a directory its contents; a file under its own name where the target is a directory."""

_AS_USER = """\
as_user() { # user[:group], text for the shell
  who=${1%%:*} group=; case "$1" in *:*) group=${1#*:} ;; esac
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
  become="$(tools command -v setpriv) --reuid $uid --regid $gid --clear-groups" # busybox has one that cannot
  if $become /bin/sh -c : 2>/dev/null; then exec $become /bin/sh -c "$2"; fi
  exec "$(tools command -v su)" -s /bin/sh "$who" -c "$2"
}
"""

_COVER = """\
cover() { if [ -e "$1" ]; then tools mv "$1" "$1.megaflow-covered"; fi; }
uncover() {
  tools rm -rf "$1"
  if [ -e "$1.megaflow-covered" ]; then tools mv "$1.megaflow-covered" "$1"; else tools mkdir -p "$1"; fi
}
"""


def first_text() -> str:
    """Returns what every stage begins with: users other than root need a way in, and a place for their files."""
    return f"{_PROLOGUE}tools chmod a+rx /\ntools mkdir -p /tmp /var/tmp\ntools chmod 1777 /tmp /var/tmp\n"


def workdir_text(step: Workdir) -> str:
    """Returns what makes the directory of a ``WORKDIR``."""
    return f"{_PROLOGUE}tools mkdir -p -- {shlex.quote(step.path)}\n"


def copy_text(step: Copy, number: int, exports: Sequence[str]) -> str:
    """Returns what puts the items of a ``COPY`` or ``ADD`` in place.

    Args:
        number: directory of the items in :data:`STEPS_DIR`.
        exports: lines that set the variables which hold here.
    """
    return "\n".join((_PROLOGUE + _PLACE, *exports, _place(step, number))) + "\n"


def run_text(step: Run, exports: Sequence[str], numbers: Sequence[int]) -> str:
    """Returns what runs a ``RUN``.

    Args:
        exports: lines that set the variables which hold here.
        numbers: for each of its mounts the directory of its items in :data:`STEPS_DIR`; 0 for one that has none.
    """
    lines = [_PROLOGUE + (_PLACE + _COVER if step.mounts else "")]
    if not _is_root(step.user):
        lines += [_AS_USER]
    # PATH and the like are the image's from here on; what this script itself needs it finds by `tools`.
    lines += exports
    for mount, number in zip(step.mounts, numbers, strict=True):
        lines += _mount(mount, number)
    # Not indented: that would alter strings of several lines.
    lines += ["("] if step.mounts else []
    lines += [f"cd {shlex.quote(step.workdir)}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in step.exports.items()]
    command = " ".join(map(shlex.quote, step.argv))
    command = f"exec {command}"
    lines += [command if _is_root(step.user) else f"as_user {shlex.quote(step.user or '')} {shlex.quote(command)}"]
    lines += [")"] if step.mounts else []
    lines += [f"uncover {shlex.quote(mount.target)}" for mount in reversed(step.mounts)]
    return "\n".join(lines) + "\n"


def _is_root(user: str | None) -> bool:
    return user in (None, "", "root", "0", "root:root", "0:0")


def _mount(mount: Mount, number: int) -> list[str]:
    target = shlex.quote(mount.target)
    lines = [f"cover {target}", _place(mount.copy, number) if mount.copy else f"tools mkdir -p {target}"]
    return lines + ([f"tools chown {shlex.quote(mount.owner)} {target}"] if mount.owner else [])


def _place(step: Copy, number: int) -> str:
    words = (f"{STEPS_DIR}/{number}", step.target, "into" if step.into else "as", step.owner, step.mode)
    return "place " + " ".join(map(shlex.quote, words))
