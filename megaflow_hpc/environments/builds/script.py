"""A Dockerfile's steps as text for the shell of the sandbox that carries them out.

Every step is a command of its own: it sets the variables that hold at its line, and goes to its directory. Nothing in
it is trusted, and nothing of it is read by any program outside of the sandbox.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megaflow_hpc.environments.builds.accounts import Account
from megaflow_hpc.environments.images.dockerfile.steps import Copy, Mount, RunStep
from megaflow_hpc.environments.sandbox import helper_python

STEPS_DIR = "/.megaflow-build"
"""Where the sandbox sees, read-only, what its copies put in place: ``<number>/<i>/item``; and :data:`PYTHON`."""
PYTHON = helper_python.NAME

_SET_BY_SANDBOXES = ("HOME", "USER", "LOGNAME", "TAR_OPTIONS")
"""Variables that a sandbox sets for its commands, whatever its image says."""
KEEP = "".join(f'if [ "${{{name}+x}}" ]; then export _mf_its_{name}="${name}"; fi\n' for name in _SET_BY_SANDBOXES)
"""What a step's sandbox sources before it sets them."""
_GIVE_BACK = "".join(
    f'unset {name}\nif [ "${{_mf_its_{name}+x}}" ]; then export {name}="$_mf_its_{name}"; fi\nunset _mf_its_{name}\n'
    for name in _SET_BY_SANDBOXES
)

_PROLOGUE = f"""\
set -e
umask 022
{_GIVE_BACK}\
if [ "${{LANG-}}" = C ]; then unset LANG; fi # Apptainer sets it
tools() {{ PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }}
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
as_user() { # uid, gid, all groups, name, text for the shell
  become="$(tools command -v setpriv) --reuid $1 --regid $2 --groups $3" # busybox has one that cannot
  if $become /bin/sh -c : 2>/dev/null; then exec $become /bin/sh -c "$5"; fi
  python=%(python)s
  if [ -d $python ]; then
    set -- "$1" "$2" "$3" "$5" "${PYTHONHOME+PYTHONHOME=$PYTHONHOME}" "${PYTHONPATH+PYTHONPATH=$PYTHONPATH}"
    set -- --library-path $python/libraries $python/python -s -S -B -c %(program)s "$@"
    export PYTHONHOME=$python PYTHONPATH=
    exec $python/loader "$@"
  fi
  if [ -z "$4" ]; then echo "USER: a number or a group needs setpriv in the image" >&2; exit 1; fi
  exec "$(tools command -v su)" -s /bin/sh "$4" -c "$5"
}
"""

_BECOME = """
import os, sys
uid, gid, groups, text, *variables = sys.argv[1:]
os.setgroups([int(group) for group in groups.split(",")])
os.setgid(int(gid))
os.setuid(int(uid))
for name in ("PYTHONHOME", "PYTHONPATH"):
    os.environ.pop(name, None)
os.environ.update(entry.split("=", 1) for entry in variables if entry)
os.execv("/bin/sh", ["/bin/sh", "-c", text])
"""
"""Becomes a user where the image has no program for that, run by a Python that the sandbox is given."""

_COVER = """\
cover() { # target; sets aside what is there, and prints the topmost of what has to be made for it
  if [ -e "$1" ]; then tools mv "$1" "$1.megaflow-covered"; echo "$1"; return; fi
  top=$1 place=${1%/*}
  while [ -n "$place" ] && [ ! -d "$place" ]; do top=$place place=${place%/*}; done
  echo "$top"
}
uncover() { # target, what cover printed
  tools rm -rf "$1"
  place=$1
  while [ "$place" != "$2" ]; do place=${place%/*}; tools rmdir "$place" 2>/dev/null || break; done
  if [ -e "$1.megaflow-covered" ]; then tools mv "$1.megaflow-covered" "$1"; fi
}
"""


def run_text(
    step: RunStep, exports: Sequence[str], numbers: Sequence[int], who: Account, *, home: bool, room: bool
) -> str:
    """Returns what runs a ``RUN``.

    Args:
        who: runs it.
        home: set ``HOME``: no ``ENV`` does.
        room: give everybody a place for temporary files, which the image lacks.
        exports: lines that set the variables which hold here.
        numbers: for each of its mounts the directory of its items in :data:`STEPS_DIR`; 0 for one that has none.
    """
    lines = [_PROLOGUE + (_PLACE + _COVER if step.mounts else "")]
    switch = {"python": f"{STEPS_DIR}/{PYTHON}", "program": shlex.quote(_BECOME)}
    lines += [_AS_USER % switch] if who.uid or who.gid else []
    # Users other than root need a place for their files, which a base may keep for its owner.
    lines += ["tools mkdir -p /tmp /var/tmp && tools chmod 1777 /tmp /var/tmp"] if room else []
    # PATH and the like are the image's from here on; what this script itself needs it finds by `tools`.
    lines += exports
    for index, (mount, number) in enumerate(zip(step.mounts, numbers, strict=True)):
        lines += _mount(mount, index, number)
    # Not indented: that would alter strings of several lines.
    lines += ["("] if step.mounts else []
    workdir = shlex.quote(step.workdir)
    lines += [f"if [ ! -d {workdir} ]; then tools mkdir -p {workdir}; fi", f"cd -P {workdir}"]
    lines += ["unset PWD OLDPWD SHLVL MEGAFLOW_COMMAND"]  # the step's shell sets its own; the last is a sandbox's mark
    lines += [f"export HOME={shlex.quote(who.home)}"] if home else []
    lines += [f"export {name}={shlex.quote(value)}" for name, value in step.exports.items()]
    command = "exec " + " ".join(map(shlex.quote, step.argv))
    name = "" if ":" in (step.user or "") or (step.user or "").isdecimal() else step.user or ""
    groups = ",".join(map(str, dict.fromkeys((who.gid, *who.groups))))
    words = (str(who.uid), str(who.gid), groups, name, command)
    lines += ["as_user " + " ".join(map(shlex.quote, words)) if who.uid or who.gid else command]
    lines += [")"] if step.mounts else []
    for index, mount in reversed(list(enumerate(step.mounts))):
        lines += [f'uncover {shlex.quote(mount.target)} "$megaflow_made_{index}"']
    return "\n".join(lines) + "\n"


def _mount(mount: Mount, index: int, number: int) -> list[str]:
    target = shlex.quote(mount.target)
    lines = [f'megaflow_made_{index}="$(cover {target})"']
    lines += [_place(mount.copy, number) if mount.copy else f"tools mkdir -p {target}"]
    lines += [f"tools chown {shlex.quote(mount.owner)} {target}"] if mount.owner else []
    return lines + ([f"tools chmod {mount.mode} {target}"] if mount.mode else [])


def _place(step: Copy, number: int) -> str:
    words = (f"{STEPS_DIR}/{number}", step.target, "into" if step.into else "as", step.owner, step.mode)
    return "place " + " ".join(map(shlex.quote, words))
