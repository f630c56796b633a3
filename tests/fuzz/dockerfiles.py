"""Fuzz the readers of Dockerfiles and of ``.dockerignore``."""

from __future__ import annotations

import os

from megaflow_hpc.environments.images.dockerfile.context import Context, patterns
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile, context_digest, last_workdir
from megaflow_hpc.environments.images.dockerfile.steps import RunStep
from tests.fuzz.contract import PART, Target, parts, reader, scratch

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
    b"ARG A\nFROM x:${A:-1}\nWORKDIR a\nWORKDIR /b/../c\nADD --exclude=*.md dir /x/\nCOPY dir/a /y/\n" + PART,
)
_WORDS = (
    b"FROM ", b"RUN ", b"COPY ", b"ADD ", b"ENV ", b"ARG ", b"ONBUILD ", b"AS ", b"--from=", b"link.txt", b"../",
    b"--mount=type=bind,from=build,target=", b"<<EOF\n", b"<<-'E'\n", b"# escape=`\n", b"# syntax=",
    b"\\\n", b"${", b":-", b"$(", b"**/", b"[!", b"[^a-", b'["',
)  # fmt: skip
_IGNORE_WORDS = (b"**/", b"*", b"?", b"[", b"]", b"!", b"\\", b"^", b"-", b"a*")


@reader
def dockerfile(data: bytes) -> None:
    """Read a Dockerfile and its ``.dockerignore`` as planning does."""
    text, ignore = parts(data, 2)
    with scratch() as folder:
        (folder / "dir" / "deep").mkdir(parents=True)
        for name in ("one.txt", "two.txt", "keep.log", "dir/a", "dir/deep/x", "dir/deep/b.md"):
            (folder / name).write_text(name)
        (folder / "link.txt").symlink_to("one.txt")
        (folder / "out").symlink_to("/etc")
        (folder / ".dockerignore").write_bytes(ignore)
        file = folder / "Dockerfile"
        file.write_bytes(text)
        last_workdir(file)
        found = Dockerfile(file)
        assert found.bases[0] == found.base
        assert all(isinstance(value, str) for value in found.environment.values())
        assert found.needed[-1] is found.last
        for step in (step for stage in found.stages for step in stage.steps if isinstance(step, RunStep)):
            assert b"\0" not in b"".join(map(os.fsencode, step.argv))
        context_digest(found)


@reader
def dockerignore(data: bytes) -> None:
    """Match patterns of a ``.dockerignore``, a source of ``COPY`` and its ``--exclude``."""
    ignore, source, exclude = parts(data, 3)
    with scratch() as folder:
        (folder / "a" / "b").mkdir(parents=True)
        for name in ("a/b/c.txt", "a/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "x" * 200, "é"):
            (folder / name).write_text("")
        (folder / ".dockerignore").write_bytes(ignore)
        context = Context(folder)
        excluded = patterns(exclude.decode("utf-8", "surrogateescape").splitlines())
        list(context.files(".", excluded))
        context.find(source.decode("utf-8", "surrogateescape").replace("\0", ""))  # Dockerfile lines have no NUL


def _dockerfiles_found() -> list[bytes]:
    """Make a word that its error quotes with six characters a byte, and texts that only JSON can spell."""
    spelled = [b'FROM x\nRUN ["a\\u0000"]\n', b'FROM x\nCOPY ["a\\u0000", "/"]\n', b'FROM x\nRUN ["\\ud800"]\n']
    return [b"FROM x:${" + b"\x91" * 20_000, *spelled]


def _patterns() -> list[bytes]:
    inputs = ((b"*.log\n", b"a", b"x*"), (b"a/**\n!a/b", b"*/?", b"[a-b]"), (b"**/c.*", b".", b""))
    return [PART.join(each) for each in inputs]


TARGETS = {
    "dockerfile": Target(dockerfile, lambda: _SEEDS, _dockerfiles_found, words=_WORDS),
    "dockerignore": Target(dockerignore, _patterns, words=_IGNORE_WORDS),
}
