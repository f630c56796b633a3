"""Generates the shell scripts of a Dockerfile's ``RUN`` steps.

Each script sets the variables in effect at its line and changes to the step's working directory. Scripts contain
untrusted text and are executed only in a sandbox.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megaflow_hpc.environments.builds.accounts import Account
from megaflow_hpc.environments.images.dockerfile.steps import Mount, RunStep
from megaflow_hpc.environments.sandbox import helper_python

STEPS_DIR = "/.megaflow-build"
"""Read-only directory in the sandbox. Contains the files of mounts as ``<number>/<i>/item``, and :data:`PYTHON`."""
PYTHON = helper_python.NAME

_SET_BY_SANDBOXES = ("HOME", "USER", "LOGNAME", "TAR_OPTIONS")
"""Variables that a sandbox sets for its commands, overriding the image's values."""
KEEP = "".join(f'if [ "${{{name}+x}}" ]; then export _mf_its_{name}="${name}"; fi\n' for name in _SET_BY_SANDBOXES)
"""Shell code that saves the image's values of variables that sandboxes override. A step's sandbox sources it first."""
_RESTORE = "".join(
    f'unset {name}\nif [ "${{_mf_its_{name}+x}}" ]; then export {name}="$_mf_its_{name}"; fi\nunset _mf_its_{name}\n'
    for name in _SET_BY_SANDBOXES
)

_PROLOGUE = f"""\
set -e
umask 022
{_RESTORE}\
if [ "${{LANG-}}" = C ]; then unset LANG; fi # Apptainer sets it
tools() {{ PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"; }}
"""

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
"""Python program that switches to another user in images without ``setpriv``. The mounted helper Python runs it."""

_MOUNTS = """\
place() { # directory of items, target
  for item in "$1"/*/* "$1"/*/.[!.]*; do
    if [ -d "$item" ] && [ ! -L "$item" ]; then
      tools mkdir -p "$2"
      tools cp -a "$item/." "$2"
    elif [ -e "$item" ] || [ -L "$item" ]; then
      tools mkdir -p "${2%/*}/"
      tools cp -a "$item" "$2"
    fi
  done
}
cover() { # target; moves an existing one away, and prints the topmost directory that has to be made for it
  if [ -e "$1" ]; then tools mv "$1" "$1.megaflow-covered"; echo "$1"; return; fi
  top=$1 place=${1%/*}
  while [ -n "$place" ] && [ ! -d "$place" ]; do top=$place place=${place%/*}; done
  echo "$top"
}
uncover() { # target, output of cover
  tools rm -rf "$1"
  place=$1
  while [ "$place" != "$2" ]; do place=${place%/*}; tools rmdir "$place" 2>/dev/null || break; done
  if [ -e "$1.megaflow-covered" ]; then tools mv "$1.megaflow-covered" "$1"; fi
}
"""


def run_text(
    step: RunStep,
    exports: Sequence[str],
    numbers: Sequence[int],
    account: Account,
    *,
    home: bool,
    temporary_directories: bool,
) -> str:
    """Generates the script of a ``RUN`` step.

    Args:
        exports: Shell lines of the preceding ``ENV`` instructions.
        numbers: For each mount, the number of its directory in :data:`STEPS_DIR`, or 0 if the mount has no files.
        account: User that runs the step.
        home: Set ``HOME`` to the account's home directory, because no ``ENV`` sets it.
        temporary_directories: Make ``/tmp`` and ``/var/tmp`` writable for every user.
    """
    lines = [_PROLOGUE]
    if step.mounts:
        lines.append(_MOUNTS)
    is_root = not account.uid and not account.gid
    if not is_root:
        lines.append(_AS_USER % {"python": f"{STEPS_DIR}/{PYTHON}", "program": shlex.quote(_BECOME)})
    if temporary_directories:
        lines.append("tools mkdir -p /tmp /var/tmp && tools chmod 1777 /tmp /var/tmp")
    # From here on, PATH and other variables are the image's. The script runs its own programs through `tools`.
    lines += exports
    for index, (mount, number) in enumerate(zip(step.mounts, numbers, strict=True)):
        lines += _mount(mount, index, number)
    # These lines are not indented, because indentation would change multi-line strings.
    if step.mounts:
        lines.append("(")
    workdir = shlex.quote(step.workdir)
    lines += [f"if [ ! -d {workdir} ]; then tools mkdir -p {workdir}; fi", f"cd -P {workdir}"]
    lines.append("unset PWD OLDPWD SHLVL MEGAFLOW_COMMAND")  # The step's shell sets the first three itself.
    if home:
        lines.append(f"export HOME={shlex.quote(account.home)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in step.exports.items()]
    command = "exec " + " ".join(map(shlex.quote, step.argv))
    if is_root:
        lines.append(command)
    else:
        user = step.user or ""
        name = "" if ":" in user or user.isdecimal() else user
        groups = ",".join(map(str, dict.fromkeys((account.gid, *account.groups))))
        arguments = (str(account.uid), str(account.gid), groups, name, command)
        lines.append("as_user " + " ".join(map(shlex.quote, arguments)))
    if step.mounts:
        lines.append(")")
    for index, mount in reversed(list(enumerate(step.mounts))):
        lines.append(f'uncover {shlex.quote(mount.target)} "$megaflow_made_{index}"')
    return "\n".join(lines) + "\n"


def _mount(mount: Mount, index: int, number: int) -> list[str]:
    target = shlex.quote(mount.target)
    lines = [f'megaflow_made_{index}="$(cover {target})"']
    if mount.copy:
        lines.append(f"place {STEPS_DIR}/{number} {target}")
    else:
        lines.append(f"tools mkdir -p {target}")
    if mount.owner:
        lines.append(f"tools chown {shlex.quote(mount.owner)} {target}")
    if mount.mode:
        lines.append(f"tools chmod {mount.mode} {target}")
    return lines
