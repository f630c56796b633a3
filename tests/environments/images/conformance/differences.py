"""Where we do other than BuildKit: what is refused, and what is made differently. Nothing else may differ."""

from __future__ import annotations

REFUSED = {
    "add unpack false": "ADD --unpack is not supported",
    "arg undeclared in copy": r"\$GONE is set neither by ARG nor by ENV in this file",
    "copy several into directory without slash": "several sources need a target that ends with /",
    "copy several without slash": "several sources need a target that ends with /",
    "copy source above context": "outside of the build context",
    "env error form": r"'\$\{A:\?wrong\}' is not supported",
    "env pattern removal": r"'\$\{A#foo\}' is not supported",
    "env special names": r"'\$\{1\}': expected the name of a variable",
    "escape directive": "escape=` is not supported",
    "from later stage": "a stage before copies from it",
    "from scratch": "FROM scratch: an image without a shell cannot be a sandbox",
    "from scratch as last of two": "FROM scratch: an image without a shell cannot be a sandbox",
    "from stage exclude": "patterns in a copy from another stage are not supported",
    "from stage wildcard": "patterns in a copy from another stage are not supported",
    "onbuild": "ONBUILD is not supported",
    "onbuild of parent stage": "ONBUILD is not supported",
    "run network none": "RUN --network=none is not supported",
    "workdir variable unset": r"\$N is set neither by ARG nor by ENV in this file",
}
"""Case → what is said while the file is read, of what BuildKit builds."""

LATER = {
    "add tar absolute link": r"Dockerfile:2: \d\.archive: cannot be unpacked: .*l/n.* is below a link",
    "chown unknown group": "Dockerfile:2: group 'strangers': the image has no such group",
    "chown unknown name": "Dockerfile:2: --chown=stranger: the image has no user 'stranger'",
    "whiteout names": r"/base/\.wh\.full: a name that begins with \.wh\. marks deletions in a layer",
}
"""Case → what is said when the step is reached, of what BuildKit builds."""

MORE = (
    "copy escaped blank",
    "copy quoted blank",
    "from variable",
)
"""Cases that are built here and not by the BuildKit that was asked, which is stricter."""

DIFFERENT = {
    "mount bind read only": "a bind mount is a copy; what is written to it is lost, and does not fail",
    "mount cache of two steps": "a cache mount is empty in every step",
}
"""Case → what the build says, of those whose images differ from BuildKit's."""
