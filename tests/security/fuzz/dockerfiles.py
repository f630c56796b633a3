"""Dockerfiles, with the ``.dockerignore`` beside them, read as planning reads them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.environments.images.dockerfile.context import Context, patterns
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile, context_digest, last_workdir
from megaflow_hpc.environments.images.dockerfile.steps import RunStep
from tests.security.fuzz.target import PART, Feed, Target, parts

_SEEDS = (
    b"""# syntax=docker/dockerfile:1
ARG BASE=debian:12
FROM ${BASE} AS build
ARG WHO=me VERSION="1.2 3"
ENV PATH=/opt/bin:$PATH A='x y' B="${WHO:-you}" C=${NONE:+set}
ENV OLD style value
WORKDIR /src/$WHO
COPY --chown=1:2 --chmod=755 one.txt dir/ ./
COPY *.txt sub/
RUN --mount=type=cache,target=/root/.cache --network=default apt-get update && \\
    # a comment within
    apt-get install -y git
RUN ["/bin/sh", "-c", "echo json"]
SHELL ["/bin/bash", "-ec"]
USER root:root
FROM build
COPY --from=build /src /src
ADD link.txt /there
RUN <<EOT
echo here
EOT
COPY <<"ONE" <<-TWO /etc/
one $WHO
ONE
	two
TWO
LABEL a=b
EXPOSE 80/tcp
CMD ["bash"]
"""
    + PART
    + b"# no\n*.log\n!keep.log\ndir/**/x\n/sub\n",
    b"FROM debian\nRUN <<A cat <<B\nx\nA\ny\nB\nHEALTHCHECK CMD true\nONBUILD RUN x\n" + PART + b"**\n!one.txt\n",
    b"FROM scratch\n" + PART + b"[a-z]?\\*\n",
    b"ARG A\nFROM x:${A:-1}\nWORKDIR a\nWORKDIR /b/../c\nADD --exclude=*.md dir /x/\nCOPY --parents dir/a /y/\n" + PART,
)
_WORDS = (
    b"FROM ",
    b"RUN ",
    b"COPY ",
    b"ADD ",
    b"ENV ",
    b"ARG ",
    b"--from=",
    b"--mount=type=bind,from=build,target=",
    b"<<EOF\n",
    b"<<-'E'\n",
    b"\\\n",
    b"${",
    b":-",
    b"$(",
    b"# escape=`\n",
    b"# syntax=",
    b"**/",
    b"[!",
    b"[^a-",
    b"ONBUILD ",
    b'["',
    b"AS ",
    b"../",
    b"link.txt",
)


@contextlib.contextmanager
def _read(folder: Path) -> Iterator[Feed]:
    (folder / "dir" / "deep").mkdir(parents=True)
    for name in ("one.txt", "two.txt", "keep.log", "dir/a", "dir/deep/x", "dir/deep/b.md"):
        (folder / name).write_text(name)
    (folder / "link.txt").symlink_to("one.txt")
    (folder / "out").symlink_to("/etc")
    file = folder / "Dockerfile"

    def feed(data: bytes) -> None:
        text, ignore = parts(data, 2)
        file.write_bytes(text)
        (folder / ".dockerignore").write_bytes(ignore)
        last_workdir(file)
        found = Dockerfile.read(file)
        assert found.bases[0] == found.base
        assert all(isinstance(value, str) for value in found.environment.values())
        assert found.needed[-1] is found.last
        for argv in (step.argv for stage in found.stages for step in stage.steps if isinstance(step, RunStep)):
            assert b"\0" not in b"".join(map(os.fsencode, argv))
        context_digest(found)

    yield feed


@contextlib.contextmanager
def _match(folder: Path) -> Iterator[Feed]:
    (folder / "a" / "b").mkdir(parents=True)
    for name in ("a/b/c.txt", "a/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "x" * 200, "é"):
        (folder / name).write_text("")

    def feed(data: bytes) -> None:
        ignore, source, exclude = parts(data, 3)
        (folder / ".dockerignore").write_bytes(ignore)
        context = Context(folder)
        excluded = patterns(exclude.decode("utf-8", "surrogateescape").splitlines())
        list(context.files(".", excluded))
        context.find(source.decode("utf-8", "surrogateescape").replace("\0", ""))  # of a line that has none

    yield feed


def targets() -> list[Target]:
    """The Dockerfile reader, and the patterns of its context."""
    ways = [
        PART.join(each)
        for each in ((b"*.log\n", b"a", b"x*"), (b"a/**\n!a/b", b"*/?", b"[a-b]"), (b"**/c.*", b".", b""))
    ]
    return [
        Target("dockerfile", _read, lambda: _SEEDS, words=_WORDS),
        Target(
            "dockerignore", _match, lambda: ways, words=(b"**/", b"*", b"?", b"[", b"]", b"!", b"\\", b"^", b"-", b"a*")
        ),
    ]
