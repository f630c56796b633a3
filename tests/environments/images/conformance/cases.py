"""Dockerfiles of a few lines, each for one thing that the reference of Dockerfiles says or that BuildKit does."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LONG_AGO = 981_173_106
"""When every file of a context and of the base was changed last."""


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Hard:
    """Another name of a file."""

    other: str


@dataclass(frozen=True)
class Directory:
    """A directory, of which otherwise only what lies in it is named."""

    mode: int = 0o755


@dataclass(frozen=True)
class File:
    """A regular file."""

    content: bytes = b""
    mode: int = 0o644


@dataclass(frozen=True)
class Tar:
    """A tar archive of entries: name → what it is; ``kind`` is how ``tarfile`` compresses it."""

    entries: Mapping[str, Entry]
    kind: str = ""
    owner: tuple[int, int] = (0, 0)


Entry = str | Link | Hard | Directory | File | Tar


@dataclass(frozen=True)
class Case:
    """One Dockerfile and its context."""

    text: str
    files: Mapping[str, Entry] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)


def write(root: Path, files: Mapping[str, Entry]) -> None:
    """Makes a tree of files whose modes, links and times are known."""
    made: list[Path] = []
    modes: dict[Path, int] = {}
    for name, entry in files.items():
        path = root / name
        for parent in reversed(path.relative_to(root).parents[:-1]):
            if not (root / parent).exists():
                (root / parent).mkdir()
                (root / parent).chmod(0o755)
        if isinstance(entry, Link):
            path.symlink_to(entry.target)
        elif isinstance(entry, Hard):
            path.hardlink_to(root / entry.other)
        elif isinstance(entry, Directory):
            path.mkdir(exist_ok=True)
            modes[path] = entry.mode
        elif isinstance(entry, Tar):
            path.write_bytes(_tar(entry))
            path.chmod(0o644)
        else:
            path.write_bytes(entry.encode() if isinstance(entry, str) else entry.content)
            path.chmod(0o644 if isinstance(entry, str) else entry.mode)
    for directory, names, more in os.walk(root, topdown=False):
        made += [Path(directory, name) for name in [*names, *more]]
    for path, mode in modes.items():
        path.chmod(mode)
    for path in [*made, root]:
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)


def _tar(tar: Tar) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=f"w:{tar.kind}") as archive:  # type: ignore[call-overload]
        for name, entry in tar.entries.items():
            info = tarfile.TarInfo(name)
            info.mtime, (info.uid, info.gid) = LONG_AGO, tar.owner
            data = b""
            if isinstance(entry, Link):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
            elif isinstance(entry, Hard):
                info.type, info.linkname = tarfile.LNKTYPE, entry.other
            elif isinstance(entry, Directory):
                info.type, info.mode = tarfile.DIRTYPE, entry.mode
            else:
                assert isinstance(entry, str | File)
                data = entry.encode() if isinstance(entry, str) else entry.content
                info.mode = 0o644 if isinstance(entry, str) else entry.mode
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def make_base(root: Path, busybox: Path) -> Path:
    """Makes the files of the image ``base``: busybox, its other names, and :data:`BASE`."""
    (root / "bin").mkdir(parents=True)
    shutil.copy2(busybox, root / "bin" / "busybox")
    for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    write(root, BASE)
    return root


BASE: dict[str, Entry] = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n"
    "agent:x:1000:1001:an agent:/home/agent:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "etc/group": "root:x:0:\nagent:x:1001:\nstaff:x:50:agent\nnobody:x:65534:\n",
    "home/agent": Directory(),
    "root": Directory(0o700),
    "tmp": Directory(0o1777),
    "var/tmp": Directory(0o1777),
    "proc": Directory(),
    "sys": Directory(),
    "dev": Directory(),
    "base/full/a": "a\n",
    "base/full/b": File(b"b\n", 0o600),
    "base/full/deep/c": "c\n",
    "base/closed": Directory(0o700),
    "base/closed/inside": "inside\n",
    "base/shared": Directory(0o1777),
    "base/setgid": Directory(0o2775),
    "base/to-full": Link("full"),
    "base/to-full-absolute": Link("/base/full"),
    "base/to-file": Link("full/a"),
    "base/to-nothing": Link("/made/later"),
    "base/up": Link("../../../base/full"),
    "base/first": "one file, two names\n",
    "base/second": Hard("base/first"),
    "base/tool": File(b"#!/bin/sh\necho tool\n", 0o4755),
    "base/empty": Directory(),
}
"""What the image ``base`` holds besides busybox."""

_TREE: dict[str, Entry] = {
    "d/f": "f\n",
    "d/x": File(b"#!/bin/sh\n", 0o750),
    "d/.hidden": "h\n",
    "d/sub/g": File(b"g\n", 0o400),
    "d/sub/deep/h": "h\n",
    "d/none": Directory(0o711),
    "d/link": Link("f"),
    "d/dirlink": Link("sub"),
    "d/away": Link("/etc/passwd"),
    "d/broken": Link("nowhere"),
}

# ruff: noqa: E501
# fmt: off
CASES: dict[str, Case] = {
    # --- COPY: where it goes -------------------------------------------------------------------------------------
    "copy file to new name": Case("FROM base\nCOPY f /new\n", {"f": "1\n"}),
    "copy file into directory by slash": Case("FROM base\nCOPY f /new/\n", {"f": "1\n"}),
    "copy file into directory that is there": Case("FROM base\nCOPY f /base/full\n", {"f": "1\n"}),
    "copy file over file": Case("FROM base\nCOPY f /base/full/b\n", {"f": File(b"1\n", 0o755)}),
    "copy file over name of two": Case("FROM base\nCOPY f /base/first\n", {"f": "1\n"}),
    "copy file through link to directory": Case("FROM base\nCOPY f /base/to-full/\n", {"f": "1\n"}),
    "copy file to link to directory": Case("FROM base\nCOPY f /base/to-full\n", {"f": "1\n"}),
    "copy file below absolute link": Case("FROM base\nCOPY f /base/to-full-absolute/sub/n\n", {"f": "1\n"}),
    "copy file below link that leads up": Case("FROM base\nCOPY f /base/up/n\n", {"f": "1\n"}),
    "copy file to link to file": Case("FROM base\nCOPY f /base/to-file\n", {"f": "1\n"}),
    "copy file to link to nothing": Case("FROM base\nCOPY f /base/to-nothing\n", {"f": "1\n"}),
    "copy file below link to nothing": Case("FROM base\nCOPY f /base/to-nothing/n\n", {"f": "1\n"}),
    "copy link that directory replaces": Case("FROM base\nCOPY d /base/\n", {"d/to-full/n": "1\n"}),
    "copy link over directory": Case("FROM base\nCOPY d /base/\n", {"d/empty": Link("full")}),
    "copy link over file": Case("FROM base\nCOPY d /base/full/\n", {"d/a": Link("b")}),
    "copy link over directory with files": Case("FROM base\nCOPY d /base/\n", {"d/full": Link("empty")}),
    "copy file over directory of same name": Case("FROM base\nCOPY d /base/\n", {"d/empty": "1\n"}),
    "copy directory over file": Case("FROM base\nCOPY d /base/full/\n", {"d/a/n": "1\n"}),
    "copy file that merges over link": Case("FROM base\nCOPY d /base/\n", {"d/to-file": "1\n"}),
    "copy directory makes parents": Case("FROM base\nCOPY d /p/q/r\n", _TREE),
    "copy directory into directory that is there": Case("FROM base\nCOPY d /base/full\n", {**_TREE, "d/deep/n": "1"}),
    "copy directory takes mode of source": Case("FROM base\nCOPY d /base/\n", {"d/shared": Directory(0o750)}),
    "copy directory root mode": Case("FROM base\nCOPY d /base/shared\n", {"d": Directory(0o700), "d/n": "1\n"}),
    "copy directory to new root mode": Case("FROM base\nCOPY d /new\n", {"d": Directory(0o700), "d/n": "1\n"}),
    "copy directory to root": Case("FROM base\nCOPY d /\n", {"d": Directory(0o700), "d/etc/n": "1\n"}),
    "copy empty directory": Case("FROM base\nCOPY d /new\n", {"d": Directory()}),
    "copy dot": Case("FROM base\nWORKDIR /w\nCOPY . .\n", _TREE),
    "copy dot slash": Case("FROM base\nWORKDIR /w\nCOPY ./ ./\n", _TREE),
    "copy slash is the context": Case("FROM base\nCOPY / /w/\n", _TREE),
    "copy relative to workdir": Case("FROM base\nWORKDIR /w\nCOPY d/f e/\n", _TREE),
    "copy absolute ignores workdir": Case("FROM base\nWORKDIR /w\nCOPY d/f /e/\n", _TREE),
    "copy target leads up": Case("FROM base\nWORKDIR /w/x\nCOPY d/f ../e\n", _TREE),
    "copy target leads above root": Case("FROM base\nCOPY d/f /../../e\n", _TREE),
    "copy source leads up within": Case("FROM base\nCOPY d/../d/f /e\n", _TREE),
    "copy source above context": Case("FROM base\nCOPY ../d/f /e\n", _TREE),
    "copy several": Case("FROM base\nCOPY d/f d/x d/sub /e/\n", _TREE),
    "copy several without slash": Case("FROM base\nCOPY d/f d/x /e\n", _TREE),
    "copy several into directory without slash": Case("FROM base\nCOPY d/f d/x /base/full\n", _TREE),
    "copy json": Case('FROM base\nCOPY ["a b", "/new dir/"]\n', {"a b": "1\n"}),
    "copy json variables": Case('FROM base\nARG N=f\nCOPY ["$N", "/$N.d/"]\n', {"f": "1\n"}),
    "copy twice last wins": Case("FROM base\nCOPY a /e\nCOPY b /e\n", {"a": "1\n", "b": File(b"2\n", 0o700)}),
    "copy missing": Case("FROM base\nCOPY gone /e\n"),
    "copy to workdir without slash": Case("FROM base\nWORKDIR /w\nCOPY f .\n", {"f": "1\n"}),
    "copy file to file that ends in dot": Case("FROM base\nCOPY f /w/.\n", {"f": "1\n"}),
    "copy file name with slash behind": Case("FROM base\nCOPY f/ /w\n", {"f": "1\n"}),
    "copy directory with slash behind": Case("FROM base\nCOPY d/ /w\n", _TREE),
    "copy directory with dot behind": Case("FROM base\nCOPY d/. /w\n", _TREE),
    "copy file below file": Case("FROM base\nCOPY f /base/full/a/n\n", {"f": "1\n"}),
    "copy file to file with slash": Case("FROM base\nCOPY f /base/full/a/\n", {"f": "1\n"}),
    "copy directory to file": Case("FROM base\nCOPY d /base/full/a\n", {"d/n": "1\n"}),
    "copy keeps mode bits": Case("FROM base\nCOPY d /e/\n", {"d/suid": File(b"1", 0o4755), "d/sticky": Directory(0o1777), "d/gid": Directory(0o2755)}),
    "copy directory that cannot be written": Case("FROM base\nCOPY d /e\n", {"d/r": Directory(0o500), "d/r/f": "1\n"}),
    "copy hard links": Case("FROM base\nCOPY d /e\n", {"d/a": "1\n", "d/b": Hard("d/a")}),
    "copy link as source": Case("FROM base\nCOPY d/link /e\n", _TREE),
    "copy link as source into directory": Case("FROM base\nCOPY d/link /e/\n", _TREE),
    "copy link to directory as source": Case("FROM base\nCOPY d/dirlink /e\n", _TREE),
    "copy link to directory as source into": Case("FROM base\nCOPY d/dirlink /e/\n", _TREE),
    "copy through link to directory": Case("FROM base\nCOPY d/dirlink/g /e\n", _TREE),
    "copy link out of context as source": Case("FROM base\nCOPY d/away /e\n", _TREE),
    "copy broken link as source": Case("FROM base\nCOPY d/broken /e\n", _TREE),
    "copy odd names": Case("FROM base\nCOPY d /e\n", {"d/a b": "1", "d/-r": "2", "d/*": "3", "d/ä€": "4", "d/a\nb": "5", "d/\\x": "6"}),
    "copy into base directory keeps its time": Case("FROM base\nCOPY d /base\n", {"d/full/n": "1\n"}),
    # --- COPY: wildcards -----------------------------------------------------------------------------------------
    "wildcard star": Case("FROM base\nCOPY *.txt /e/\n", {"a.txt": "1", "b.txt": "2", "c.md": "3", "s/d.txt": "4"}),
    "wildcard star one match no slash": Case("FROM base\nCOPY *.txt /e\n", {"a.txt": "1", "c.md": "3"}),
    "wildcard star two matches no slash": Case("FROM base\nCOPY *.txt /e\n", {"a.txt": "1", "b.txt": "3"}),
    "wildcard star two matches into directory": Case("FROM base\nCOPY *.txt /base\n", {"a.txt": "1", "b.txt": "3"}),
    "wildcard matches directory": Case("FROM base\nCOPY d* /e/\n", {"d1/f": "1", "d2/g": "2"}),
    "wildcard across": Case("FROM base\nCOPY */f /e/\n", {"d1/f": "1", "d2/g": "2"}),
    "wildcard question and class": Case("FROM base\nCOPY a?[12] /e/\n", {"ax1": "1", "ay2": "2", "az3": "3"}),
    "wildcard negated class": Case("FROM base\nCOPY a[^1] /e/\n", {"a1": "1", "a2": "2", "a!": "3"}),
    "wildcard hidden": Case("FROM base\nCOPY * /e/\n", {".h": "1", "v": "2"}),
    "wildcard no match": Case("FROM base\nCOPY *.gone /e/\n", {"a": "1"}),
    "wildcard no match beside a file": Case("FROM base\nCOPY a *.gone /e/\n", {"a": "1"}),
    "wildcard optional": Case("FROM base\nCOPY a b* /e/\n", {"a": "1"}),
    "wildcard escaped": Case("FROM base\nCOPY a\\*b /e/\n", {"a*b": "1", "axb": "2"}),
    "wildcard escaped bracket": Case("FROM base\nCOPY arr[[]0].txt /e/\n", {"arr[0].txt": "1", "arr0.txt": "2"}),
    "wildcard double star": Case("FROM base\nCOPY **/*.txt /e/\n", {"a.txt": "1", "s/b.txt": "2", "s/t/c.txt": "3"}),
    "wildcard matches link": Case("FROM base\nCOPY d/l* /e/\n", _TREE),
    "wildcard through link": Case("FROM base\nCOPY d/dirl*/g /e/\n", _TREE),
    "wildcard in variable": Case("FROM base\nARG P=*.txt\nCOPY $P /e/\n", {"a.txt": "1", "b.md": "2"}),
    # --- COPY: options -------------------------------------------------------------------------------------------
    "chown numbers": Case("FROM base\nCOPY --chown=7:8 d /p/e\n", _TREE),
    "chown name": Case("FROM base\nCOPY --chown=agent d/f /p/e\n", _TREE),
    "chown name and group": Case("FROM base\nCOPY --chown=agent:staff d/f /p/e\n", _TREE),
    "chown number alone": Case("FROM base\nCOPY --chown=1000 d/f /p/e\n", _TREE),
    "chown number unknown alone": Case("FROM base\nCOPY --chown=77 d/f /p/e\n", _TREE),
    "chown group by name of number": Case("FROM base\nCOPY --chown=77:staff d/f /p/e\n", _TREE),
    "chown empty user": Case("FROM base\nCOPY --chown=:staff d/f /p/e\n", _TREE),
    "chown unknown name": Case("FROM base\nCOPY --chown=stranger d/f /p/e\n", _TREE),
    "chown variable": Case("FROM base\nARG U=agent\nCOPY --chown=$U:${U} d/f /p/e\n", _TREE),
    "chown directory that is there": Case("FROM base\nCOPY --chown=7:8 d /base/full\n", _TREE),
    "chown file into directory that is there": Case("FROM base\nCOPY --chown=7:8 d/f /base/full\n", _TREE),
    "chown user added by run": Case("FROM base\nRUN echo 'new:x:77:78::/:/bin/sh' >> /etc/passwd\nCOPY --chown=new d/f /e\n", _TREE),
    "chmod octal": Case("FROM base\nCOPY --chmod=640 d /p/e\n", _TREE),
    "chmod octal four": Case("FROM base\nCOPY --chmod=4755 d/f /p/e\n", _TREE),
    "chmod symbolic": Case("FROM base\nCOPY --chmod=u=rwX,go=rX d /p/e\n", _TREE),
    "chmod symbolic add": Case("FROM base\nCOPY --chmod=+x d /p/e\n", _TREE),
    "chmod variable": Case("FROM base\nARG M=600\nCOPY --chmod=$M d/f /p/e\n", _TREE),
    "chmod nonsense": Case("FROM base\nCOPY --chmod=rwx d/f /p/e\n", _TREE),
    "chmod on link": Case("FROM base\nCOPY --chmod=600 d/sub d/link /p/\n", _TREE),
    "chmod directory that is there": Case("FROM base\nCOPY --chmod=700 d /base/full\n", _TREE),
    "chown and chmod": Case("FROM base\nCOPY --chown=agent --chmod=0500 d /p/e\n", _TREE),
    "link option": Case("FROM base\nCOPY --link d/f /p/e\n", _TREE),
    "link option through link": Case("FROM base\nCOPY --link d/f /base/to-full/e\n", _TREE),
    "link option false": Case("FROM base\nCOPY --link=false d/f /base/to-full/e\n", _TREE),
    "parents option": Case("# syntax=docker/dockerfile:1\nFROM base\nCOPY --parents d/sub/g d/x /e/\n", _TREE),
    "parents option directory": Case("FROM base\nCOPY --parents d/sub /e/\n", _TREE),
    "parents option wildcard": Case("FROM base\nCOPY --parents d/*/g /e/\n", _TREE),
    "parents option double star": Case("FROM base\nCOPY --parents d/**/h /e/\n", _TREE),
    "parents option pivot": Case("FROM base\nCOPY --parents ./d/./sub/g /e/\n", _TREE),
    "parents option chown": Case("FROM base\nCOPY --parents --chown=7:8 d/sub/g /e/\n", _TREE),
    "exclude option": Case("FROM base\nCOPY --exclude=f --exclude=sub/deep d /e/\n", _TREE),
    "exclude option pattern": Case("FROM base\nCOPY --exclude=*.txt . /e/\n", {"a.txt": "1", "b.md": "2", "s/c.txt": "3"}),
    "exclude option everywhere": Case("FROM base\nCOPY --exclude=**/*.txt . /e/\n", {"a.txt": "1", "s/c.txt": "3", "s/d": "4"}),
    "exclude option of directory": Case("FROM base\nCOPY --exclude=d/f . /e/\n", _TREE),
    "exclude option path of source": Case("FROM base\nCOPY --exclude=d/f d /e/\n", _TREE),
    "exclude option exception": Case("FROM base\nCOPY --exclude=*.txt --exclude=!b.txt . /e/\n", {"a.txt": "1", "b.txt": "2", "c": "3"}),
    "exclude option file itself": Case("FROM base\nCOPY --exclude=f d/f d/x /e/\n", _TREE),
    "exclude option wildcard source": Case("FROM base\nCOPY --exclude=b* *.txt /e/\n", {"a.txt": "1", "b.txt": "2"}),
    "unknown option": Case("FROM base\nCOPY --chwon=1 f /e\n", {"f": "1"}),
    # --- .dockerignore -------------------------------------------------------------------------------------------
    "ignore names": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "*.log\n# no\n\nsub/x\n", "a.log": "1", "b": "2", "sub/a.log": "3", "sub/x/y": "4", "sub/z": "5"}),
    "ignore everywhere": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "**/*.log\n", "a.log": "1", "s/t/a.log": "3", "s/k": "4"}),
    "ignore exception": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "*\n!keep\n!d/f\n", "keep": "1", "no": "2", "d/f": "3", "d/g": "4", "e/h": "5"}),
    "ignore exception order": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "!d/f\nd\n", "d/f": "3", "d/g": "4"}),
    "ignore slash forms": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "/a\nb/\n./c\nd/../x\n  y  \n", "a": "1", "b/c": "2", "c": "3", "x": "4", "y": "5", "s/a": "6"}),
    "ignore directory leaves none": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "d/**\n", "d/f": "1", "k": "2"}),
    "ignore directory star": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "d/*\n", "d/f": "1", "d/s/g": "1", "k": "2"}),
    "ignore dockerfile itself": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "Dockerfile\n.dockerignore\n", "k": "2"}),
    "ignore named file": Case("FROM base\nCOPY f /e/\n", {".dockerignore": "f\n", "f": "2"}),
    "ignore wildcard match": Case("FROM base\nCOPY *.t /e/\n", {".dockerignore": "a.t\n", "a.t": "2", "b.t": "1"}),
    "ignore link in the way": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "l/f\n", "l": Link("d"), "d/f": "1"}),
    "ignore of add": Case("FROM base\nADD . /e/\n", {".dockerignore": "a\n", "a": "1", "b": "1"}),
    "ignore empty directory": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "d/x\n", "d/x": "1", "k": "1"}),
    "ignore own file": Case("FROM base\nCOPY . /e/\n", {".dockerignore": "a\n", "Dockerfile.dockerignore": "b\n", "a": "1", "b": "1"}),
    # --- COPY from elsewhere -------------------------------------------------------------------------------------
    "from stage file": Case("FROM base AS one\nRUN echo 1 > /f && chmod 751 /f\nFROM base\nCOPY --from=one /f /e/\n"),
    "from stage number": Case("FROM base\nRUN echo 1 > /f\nFROM base\nCOPY --from=0 f /e\n"),
    "from stage name in capitals": Case("FROM base AS One\nRUN echo 1 > /f\nFROM base\nCOPY --from=ONE f /e\n"),
    "from stage directory": Case("FROM base AS one\nRUN mkdir -p /t/d /t/n && echo 1 > /t/d/f && ln -s d/f /t/l && ln -s /t/d /t/m " "&& ln /t/d/f /t/h && chmod 700 /t/d && chmod 1777 /t && chown 7:8 /t/d/f\nFROM base\nCOPY --from=one /t /e\n"),
    "from stage keeps owner": Case("FROM base AS one\nRUN echo > /f && chown 7:8 /f\nFROM base\nCOPY --from=one /f /e\n"),
    "from stage chown": Case("FROM base AS one\nRUN echo > /f && chown 7:8 /f\nFROM base\nCOPY --from=one --chown=agent /f /e\n"),
    "from stage link": Case("FROM base AS one\nFROM base\nCOPY --from=one /base/to-file /e\n"),
    "from stage link to directory": Case("FROM base AS one\nFROM base\nCOPY --from=one /base/to-full /e\n"),
    "from stage absolute link below": Case("FROM base AS one\nFROM base\nCOPY --from=one /base/to-full-absolute/a /e\n"),
    "from stage wildcard": Case("FROM base AS one\nFROM base\nCOPY --from=one /base/full/* /e/\n"),
    "from stage exclude": Case("FROM base AS one\nFROM base\nCOPY --from=one --exclude=a /base/full /e/\n"),
    "from stage parents": Case("FROM base AS one\nFROM base\nCOPY --from=one --parents /base/full/deep /e/\n"),
    "from stage relative to root": Case("FROM base AS one\nWORKDIR /base\nFROM base\nCOPY --from=one base/full/a /e\n"),
    "from image": Case("FROM base\nCOPY --from=base /base/full /e\n"),
    "from stage unknown": Case("FROM base\nCOPY --from=gone /f /e\n"),
    "from later stage": Case("FROM base\nCOPY --from=later /f /e\nFROM base AS later\n"),
    "from variable": Case("ARG S=one\nFROM base AS one\nRUN echo > /f\nFROM base\nARG S\nCOPY --from=$S /f /e\n"),
    "from stage whole": Case("FROM base AS one\nRUN rm -r /base && mkdir /n\nFROM base\nCOPY --from=one / /e/\nRUN rm -r /e/bin\n"),
    "from stage of a deleted file": Case("FROM base AS one\nRUN rm /base/full/a && echo > /base/full/n\nFROM base\nCOPY --from=one /base/full /e\n"),
    "from stage missing file": Case("FROM base AS one\nFROM base\nCOPY --from=one /gone /e\n"),
    "ignore does not reach stages": Case("FROM base AS one\nRUN echo > /f\nFROM base\nCOPY --from=one /f /e\n", {".dockerignore": "f\n"}),
    # --- here-documents ------------------------------------------------------------------------------------------
    "heredoc copy": Case("FROM base\nARG W=world\nCOPY <<E /e\nhello $W\nE\n"),
    "heredoc copy quoted": Case("FROM base\nCOPY <<'E' /e\nhello $W \\$\nE\n"),
    "heredoc copy escapes": Case("FROM base\nARG W=1\nCOPY <<E /e\na\\$b \\W \"q\" '$W' \\\\ ${W:-x}\nE\n"),
    "heredoc copy tabs": Case("FROM base\nCOPY <<-E /e\n\t\ttabs\n\t  blanks\n\tE\n"),
    "heredoc copy several": Case("FROM base\nCOPY <<A <<B f /e/\na\nA\nb\nB\n", {"f": "1"}),
    "heredoc copy into": Case("FROM base\nCOPY <<name /e/\nx\nname\n"),
    "heredoc copy options": Case("FROM base\nCOPY --chmod=755 --chown=agent <<E /e\n#!/bin/sh\nE\n"),
    "heredoc copy empty": Case("FROM base\nCOPY <<E /e\nE\n"),
    "heredoc add": Case("FROM base\nADD <<E /e\nx\nE\n"),
    "heredoc run": Case("FROM base\nRUN <<E\necho one > /e\necho two >> /e\nE\n"),
    "heredoc run fails late": Case("FROM base\nRUN <<E\nfalse\necho two >> /e\nE\n"),
    "heredoc run interpreter": Case("FROM base\nRUN <<E\n#!/bin/sh -e\necho $0 | wc -l > /e\nE\n"),
    "heredoc run redirected": Case("FROM base\nRUN cat <<A <<B > /e\na\nA\nb\nB\n"),
    "heredoc run variables": Case("FROM base\nARG W=1\nRUN cat <<A > /e; cat <<'B' >> /e\n$W\nA\n$W\nB\n"),
    "heredoc run other command": Case("FROM base\nRUN sh <<E\necho x > /e\nE\n"),
    "heredoc run umask": Case("FROM base\nRUN <<E\numask > /e\nmkdir /d\nE\n"),
    # --- ADD -----------------------------------------------------------------------------------------------------
    "add file": Case("FROM base\nADD f /e\n", {"f": "1\n"}),
    "add directory": Case("FROM base\nADD d /e\n", _TREE),
    "add tar": Case("FROM base\nADD t.tar /e\n", {"t.tar": Tar({"a": "1", "s": Directory(0o700), "s/b": File(b"2", 0o4750), "l": Link("a"), "h": Hard("a")})}),
    "add tar gz": Case("FROM base\nADD t.tgz /e/\n", {"t.tgz": Tar({"a": "1"}, "gz")}),
    "add tar bz2": Case("FROM base\nADD t.tbz /e/\n", {"t.tbz": Tar({"a": "1"}, "bz2")}),
    "add tar xz": Case("FROM base\nADD t.txz /e/\n", {"t.txz": Tar({"a": "1"}, "xz")}),
    "add tar owner": Case("FROM base\nADD t.tar /e/\n", {"t.tar": Tar({"d": Directory(), "d/a": "1"}, "", (7, 8))}),
    "add tar chown": Case("FROM base\nADD --chown=agent t.tar /e/\n", {"t.tar": Tar({"d": Directory(), "d/a": "1"}, "", (7, 8))}),
    "add tar chmod": Case("FROM base\nADD --chmod=600 t.tar /e/\n", {"t.tar": Tar({"d": Directory(), "d/a": "1"})}),
    "add tar over files": Case("FROM base\nADD t.tar /base\n", {"t.tar": Tar({"full/a": "new", "empty": "now a file", "to-full": Directory(), "to-full/n": "1"})}),
    "add tar through link": Case("FROM base\nADD t.tar /base\n", {"t.tar": Tar({"to-full/n": "1"})}),
    "add tar directory mode over": Case("FROM base\nADD t.tar /base\n", {"t.tar": Tar({"shared": Directory(0o700)})}),
    "add tar parents without entries": Case("FROM base\nADD t.tar /e\n", {"t.tar": Tar({"p/q/f": "1"})}),
    "add tar to file target": Case("FROM base\nADD t.tar /base/full/a\n", {"t.tar": Tar({"f": "1"})}),
    "add tar by content": Case("FROM base\nADD t.txt /e/\n", {"t.txt": Tar({"a": "1"}, "gz")}),
    "add tar by name only": Case("FROM base\nADD t.tar.gz /e/\n", {"t.tar.gz": "not an archive"}),
    "add gzip of text": Case("FROM base\nADD f.gz /e/\n", {"f.gz": File(gzip.compress(b"text\n", mtime=0))}),
    "add empty tar": Case("FROM base\nADD t.tar /e/\n", {"t.tar": Tar({})}),
    "add tar in directory": Case("FROM base\nADD d /e/\n", {"d/t.tar": Tar({"a": "1"})}),
    "add several tars": Case("FROM base\nADD *.tar f /e/\n", {"a.tar": Tar({"a": "1"}), "b.tar": Tar({"b": "1"}), "f": "3"}),
    "add unpack false": Case("FROM base\nADD --unpack=false t.tar /e/\n", {"t.tar": Tar({"a": "1"})}),
    "add tar leads up": Case("FROM base\nADD t.tar /e/\n", {"t.tar": Tar({"../up": "1", "/absolute": "2"})}),
    "add tar absolute link": Case("FROM base\nADD t.tar /e/\n", {"t.tar": Tar({"l": Link("/base/full"), "l/n": "1"})}),
    "add link to tar": Case("FROM base\nADD l /e/\n", {"t.tar": Tar({"a": "1"}), "l": Link("t.tar")}),
    "add exclude": Case("FROM base\nADD --exclude=f d /e/\n", _TREE),
    "copy tar": Case("FROM base\nCOPY t.tar /e/\n", {"t.tar": Tar({"a": "1"})}),
    "add address": Case("FROM base\nADD http://127.0.0.1:9/x /e\n"),
    "add git": Case("FROM base\nADD https://127.0.0.1:9/x.git /e\n"),
    # --- ENV, ARG ------------------------------------------------------------------------------------------------
    "env forms": Case('FROM base\nENV A=1 B="two words" C=three\\ words D=\'q $A\' E="$A"\nENV OLD old  style  "v" \nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n'),
    "env same line": Case("FROM base\nENV A=old\nENV A=new B=$A\nENV C=$A\nRUN echo $A $B $C > /e\n"),
    "env expansion": Case("FROM base\nENV A=1 E=\nENV B=${A:-x} C=${N:-x$A} D=${E:-x} F=${E-x} G=${A:+y} H=${N:+y} I=${E:+y} J=${E+y} K=${N-z} " "L=$A$A M=${A}b O=\\$A P='$A' Q=$N\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "env pattern removal": Case("FROM base\nENV A=foobarbaz\nENV B=${A#foo} C=${A##*b} D=${A%baz} E=${A%%b*} F=${A/bar/X} G=${A//a/A}\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "env error form": Case("FROM base\nENV A=1\nENV B=${A:?wrong} C=${A?wrong}\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "env error form unset": Case("FROM base\nENV B=${N:?is missing}\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "env unset variable": Case("FROM base\nENV B=a${NOTHING}b\nRUN echo $B > /e\n"),
    "env path": Case("FROM base\nENV PATH=/opt/bin:$PATH\nRUN echo $PATH > /e\n"),
    "env path twice": Case("FROM base\nENV PATH=/opt/bin:$PATH\nENV PATH=/srv/bin:$PATH P=$PATH\nENV Q=$P:$PATH\nRUN echo $PATH $P $Q > /e\n"),
    "env in run is the shell's": Case("FROM base\nENV A=1\nRUN A=2 && echo $A ${A:-x} '$A' > /e\n"),
    "env quotes": Case('FROM base\nENV A="a\\"b" B=\'a"b\' C=a\\"b D="a\\nb" E="a\\\\b" F=a\\\\b G="$" H="a\'b"\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n'),
    "env value with equals": Case("FROM base\nENV A=b=c D==\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "env empty": Case("FROM base\nENV A=\nRUN echo ${A-unset} > /e\n"),
    "env continued": Case("FROM base\nENV A=1 \\\n    B=2 \\\n# between\n\n    C=3\nRUN echo $A$B$C > /e\n"),
    "env overrides arg": Case("FROM base\nARG A=arg\nENV A=env\nRUN echo $A > /e\n", args={"A": "given"}),
    "env from arg": Case("FROM base\nARG A=arg\nENV B=$A\nRUN echo $B > /e\n", args={"A": "given"}),
    "env whole file": Case("FROM base\nENV A=1\nFROM base\nRUN echo ${A-unset} > /e\n"),
    "env home": Case("FROM base\nENV HOME=/srv\nRUN echo $HOME > /e; cd; pwd >> /e\n"),
    "env lower case instruction": Case("from base\nenv A=1\nrun echo $A > /e\n"),
    "arg default": Case("FROM base\nARG A=1\nARG B\nRUN echo ${A-unset} ${B-unset} > /e\n"),
    "arg given": Case("FROM base\nARG A=1\nARG B\nRUN echo ${A-unset} ${B-unset} > /e\n", args={"A": "x", "B": "y"}),
    "arg before its line": Case("FROM base\nRUN echo ${A-unset} > /e\nARG A=1\nRUN echo ${A-unset} >> /e\n", args={"A": "x"}),
    "arg of one stage": Case("FROM base AS one\nARG A=1\nFROM base\nRUN echo ${A-unset} > /e\n", args={"A": "x"}),
    "arg of parent stage": Case("FROM base AS one\nARG A=1\nFROM one\nRUN echo ${A-unset} > /e\n", args={"A": "x"}),
    "arg global": Case("ARG A=1\nFROM base\nRUN echo ${A-unset} > /e\nARG A\nRUN echo ${A-unset} >> /e\n"),
    "arg global not declared": Case("ARG A=1\nFROM base\nENV B=${A:-none}\nRUN echo $B > /e\n"),
    "arg global other default": Case("ARG A=1\nFROM base\nARG A=2\nRUN echo ${A-unset} > /e\n"),
    "arg global empty given": Case('ARG A=1\nFROM base\nARG A\nRUN echo "[${A-unset}]" > /e\n', args={"A": ""}),
    "arg in from": Case("ARG A=ba\nARG B=${A}se\nFROM $B\nRUN echo > /e\n"),
    "arg in from default": Case("FROM ${A:-base}\nRUN echo > /e\n"),
    "arg uses arg": Case("FROM base\nARG A=1\nARG B=${A}2\nRUN echo $B > /e\n", args={"A": "x"}),
    "arg several": Case("FROM base\nARG A=1 B=2\nRUN echo $A$B > /e\n"),
    "arg quotes": Case('FROM base\nARG A="two  words"\nRUN echo "$A" > /e\n'),
    "arg does not stay": Case("FROM base\nARG A=1\nRUN true\nCMD env\n"),
    "arg after env": Case("FROM base\nENV A=env\nARG A=arg\nRUN echo $A > /e\n", args={"A": "x"}),
    "arg predefined proxy": Case("FROM base\nRUN echo ${http_proxy-unset} > /e\n", args={"http_proxy": "http://x"}),
    "arg platform": Case('FROM base\nARG TARGETARCH\nARG TARGETOS\nARG TARGETPLATFORM\nARG BUILDPLATFORM\nARG TARGETVARIANT\nRUN echo $TARGETOS/$TARGETARCH $TARGETPLATFORM $BUILDPLATFORM "[${TARGETVARIANT-unset}]" > /e\n'),
    "arg platform not declared": Case("FROM base\nRUN echo ${TARGETARCH-unset} > /e\n"),
    "arg with mode of shell": Case("FROM base\nARG A='x y'\nRUN printf '%s\\n' $A > /e\n"),
    "arg undeclared in copy": Case("FROM base\nCOPY $GONE/f /e\n", {"f": "1"}),
    "variables in many places": Case("FROM base\nARG D=dir U=agent\nENV W=/w/$D\nWORKDIR $W/sub\nCOPY ${D}/f $W/\nUSER $U\nRUN pwd > /tmp/e; id -u >> /tmp/e\n", {"dir/f": "1"}),
    # --- WORKDIR -------------------------------------------------------------------------------------------------
    "workdir makes parents": Case("FROM base\nWORKDIR /p/q/r\n"),
    "workdir relative": Case("FROM base\nWORKDIR /p\nWORKDIR q\nWORKDIR ../r\nRUN pwd > /e\n"),
    "workdir relative first": Case("FROM base\nWORKDIR p\nRUN pwd > /e\n"),
    "workdir through link": Case("FROM base\nWORKDIR /base/to-full\nRUN pwd > /e; pwd -P >> /e; touch here\n"),
    "workdir below absolute link": Case("FROM base\nWORKDIR /base/to-full-absolute/new\nRUN pwd -P > /e\n"),
    "workdir link to nothing": Case("FROM base\nWORKDIR /base/to-nothing\nRUN pwd -P > /e\n"),
    "workdir below link to nothing": Case("FROM base\nWORKDIR /base/to-nothing/new\nRUN pwd -P > /e\n"),
    "workdir that is there": Case("FROM base\nWORKDIR /base/closed\nRUN pwd > /e\n"),
    "workdir is a file": Case("FROM base\nWORKDIR /base/full/a\n"),
    "workdir after user": Case("FROM base\nUSER agent\nWORKDIR /home/agent/w/x\nRUN id -u > /tmp/e\n"),
    "workdir quotes": Case('FROM base\nWORKDIR "/a b"\nRUN pwd > /e\n'),
    "workdir blanks": Case("FROM base\nWORKDIR /a b\nRUN pwd > /e\n"),
    "workdir slash behind": Case("FROM base\nWORKDIR /p/\nRUN pwd > /e\n"),
    "workdir variable unset": Case("FROM base\nWORKDIR /p/$N\nRUN pwd > /e\n"),
    "workdir of parent stage": Case("FROM base AS one\nWORKDIR /p\nFROM one\nRUN pwd > /e\n"),
    "workdir then removed": Case("FROM base\nWORKDIR /p\nRUN cd / && rmdir /p\nRUN pwd > /e\n"),
    "workdir removed then copied to": Case("FROM base\nWORKDIR /p\nRUN cd / && rmdir /p\nCOPY f .\n", {"f": "1"}),
    "workdir dotdot above root": Case("FROM base\nWORKDIR /../../p\nRUN pwd > /e\n"),
    # --- USER ----------------------------------------------------------------------------------------------------
    "user name": Case("FROM base\nUSER agent\nRUN id > /tmp/e; echo $HOME >> /tmp/e; pwd >> /tmp/e\n"),
    "user number": Case("FROM base\nUSER 1000\nRUN id > /tmp/e; echo $HOME >> /tmp/e\n"),
    "user number unknown": Case("FROM base\nUSER 4321\nRUN id > /tmp/e; echo $HOME >> /tmp/e\n"),
    "user and group": Case("FROM base\nUSER agent:staff\nRUN id > /tmp/e\n"),
    "user and group numbers": Case("FROM base\nUSER 12:34\nRUN id > /tmp/e\n"),
    "user unknown name": Case("FROM base\nUSER stranger\nRUN id > /tmp/e\n"),
    "user unknown name without run": Case("FROM base\nUSER stranger\n"),
    "user unknown group": Case("FROM base\nUSER agent:strangers\nRUN id > /tmp/e\n"),
    "user back to root": Case("FROM base\nUSER agent\nRUN touch /tmp/a\nUSER root\nRUN touch /b; echo $HOME > /e\n"),
    "user and copy": Case("FROM base\nUSER agent\nCOPY f /e\nCOPY d /home/agent/d\n", {"f": "1", "d/f": "2"}),
    "user cannot write": Case("FROM base\nUSER agent\nRUN touch /nope 2>/dev/null || echo refused > /tmp/e\n"),
    "user makes files": Case("FROM base\nUSER agent\nRUN mkdir /tmp/d && echo > /tmp/d/f && ln -s f /tmp/d/l\n"),
    "user of parent stage": Case("FROM base AS one\nUSER agent\nFROM one\nRUN id -u > /tmp/e\n"),
    "user added by run": Case("FROM base\nRUN echo 'new:x:77:78::/n:/bin/sh' >> /etc/passwd\nUSER new\nRUN id -u > /tmp/e; id -g >> /tmp/e; echo $HOME >> /tmp/e\n"),
    "user keeps variables": Case("FROM base\nENV A=1\nUSER agent\nRUN echo $A $PATH > /tmp/e\n"),
    "user home variable set": Case("FROM base\nENV HOME=/srv\nUSER agent\nRUN echo $HOME > /tmp/e\n"),
    # --- SHELL and RUN -------------------------------------------------------------------------------------------
    "run json": Case('FROM base\nENV A=1\nRUN ["/bin/sh", "-c", "echo $A $0 > /e", "zero"]\n'),
    "run json no shell": Case('FROM base\nENV A=1\nRUN ["touch", "/$A"]\n'),
    "run json found on path": Case('FROM base\nRUN ["touch", "/e"]\n'),
    "run json broken is shell": Case("FROM base\nRUN ['touch', '/e'] || true; echo > /e\n"),
    "run fails": Case("FROM base\nRUN exit 7\n"),
    "run pipe fails": Case("FROM base\nRUN false | true; echo $? > /e\n"),
    "run umask": Case("FROM base\nRUN umask > /e; touch /f; mkdir /d\n"),
    "run state does not stay": Case("FROM base\nRUN cd /base; export A=1\nRUN pwd > /e; echo ${A-unset} >> /e\n"),
    "run continued": Case("FROM base\nRUN echo one \\\n  # a comment\n  two \\\n\n  three > /e\n"),
    "run comment at end": Case("FROM base\nRUN echo one # two\nRUN echo '#' > /e\n"),
    "run quotes": Case("FROM base\nRUN echo \"a 'b' \\\"c\\\"\" > /e; echo 'x\\ty' >> /e\n"),
    "run backslashes": Case("FROM base\nRUN printf '%s' 'a\\\\b\\n' > /e\n"),
    "run dollar is the shell's": Case("FROM base\nARG A=1\nRUN A=2; echo $A $$ > /dev/null; echo \\$A > /e\n"),
    "run environment": Case("FROM base\nRUN env | sort > /e\n"),
    "run shell instruction": Case('FROM base\nSHELL ["/bin/busybox", "sh", "-ec"]\nRUN false; echo no > /e\n'),
    "run shell instruction works": Case('FROM base\nSHELL ["/bin/busybox", "sh", "-xc"]\nRUN echo $0 > /e\n'),
    "shell of parent stage": Case('FROM base AS one\nSHELL ["/bin/sh", "-euc"]\nFROM one\nRUN case $- in *u*) echo u > /e;; *) echo none > /e;; esac\n'),
    "shell not of other stage": Case('FROM base AS one\nSHELL ["/bin/sh", "-euc"]\nFROM base\nRUN case $- in *u*) echo u > /e;; *) echo none > /e;; esac\n'),
    "shell does not hold for json": Case('FROM base\nSHELL ["/gone"]\nRUN ["touch", "/e"]\n'),
    "run tmp stays": Case("FROM base\nRUN echo > /tmp/f\nRUN cat /tmp/f && touch /tmp/g\n"),
    "run mounts are not of the image": Case("FROM base\nRUN ls -d /proc/self > /e; echo > /dev/null; touch /run-was-here\n"),
    "run devices": Case("FROM base\nRUN for d in null zero full random urandom tty; do [ -c /dev/$d ] && echo $d; done > /e\n"),
    "run hosts": Case("FROM base\nRUN grep -c localhost /etc/hosts > /dev/null && echo has localhost > /e\n"),
    "run fifo": Case("FROM base\nRUN mkfifo /e\n"),
    "run hard link": Case("FROM base\nRUN echo > /e && ln /e /f && ln /base/first /base/third\n"),
    "run sparse": Case("FROM base\nRUN truncate -s 10000000 /e\n"),
    "run root mode": Case("FROM base\nRUN chmod 700 / && stat -c %a / > /e\n"),
    "run touch keeps": Case("FROM base\nRUN touch -d '1999-01-01 00:00:00' /e /base/full/a\n"),
    "run chown": Case("FROM base\nRUN chown -R agent:staff /base/full && chown 1:2 /base/to-file -h\n"),
    "run setuid": Case("FROM base\nRUN echo > /e && chmod 6755 /e && chmod 1777 /base/empty\n"),
    "run background ends": Case("FROM base\nRUN (sleep 30; echo > /late) & echo > /e\nRUN ls /late 2>/dev/null; true\n"),
    # --- deletion and replacement --------------------------------------------------------------------------------
    "delete file": Case("FROM base\nRUN rm /base/full/a\n"),
    "delete directory": Case("FROM base\nRUN rm -r /base/full\n"),
    "delete and make directory": Case("FROM base\nRUN rm -r /base/full && mkdir /base/full && echo > /base/full/n\n"),
    "delete in one step make in next": Case("FROM base\nRUN rm -r /base/full\nRUN mkdir /base/full && echo > /base/full/n\n"),
    "delete and copy": Case("FROM base\nRUN rm -r /base/full\nCOPY f /base/full/n\n", {"f": "1"}),
    "delete link": Case("FROM base\nRUN rm /base/to-full\n"),
    "directory by file": Case("FROM base\nRUN rm -r /base/full && echo > /base/full\n"),
    "file by directory": Case("FROM base\nRUN rm /base/first && mkdir /base/first && echo > /base/first/n\n"),
    "link by directory": Case("FROM base\nRUN rm /base/to-full && mkdir /base/to-full && echo > /base/to-full/n\n"),
    "directory by link": Case("FROM base\nRUN rm -r /base/full && ln -s empty /base/full\n"),
    "rename directory": Case("FROM base\nRUN mv /base/full /base/moved\n"),
    "rename directory and back": Case("FROM base\nRUN mv /base/full /base/moved\nRUN mv /base/moved /base/full\n"),
    "rename over": Case("FROM base\nRUN mv /base/full/a /base/first\n"),
    "delete of a copied file": Case("FROM base\nCOPY d /e\nRUN rm -r /e/sub /e/f\n", _TREE),
    "delete copied again": Case("FROM base\nCOPY d /e\nRUN rm -r /e\nCOPY d/sub /e\n", _TREE),
    "one name of two deleted": Case("FROM base\nRUN rm /base/first\n"),
    "one name of two changed": Case("FROM base\nRUN echo more >> /base/first\n"),
    "mode alone changed": Case("FROM base\nRUN chmod 711 /base/full && chmod 600 /base/full/a\n"),
    "whiteout names": Case("FROM base\nRUN echo > /base/.wh.full && mkdir /base/full/.wh..wh..opq\n"),
    "delete with glob": Case("FROM base\nRUN rm -rf /base/* && ls -A /base > /e\n"),
    # --- RUN --mount ---------------------------------------------------------------------------------------------
    "mount bind": Case("FROM base\nRUN --mount=type=bind,source=d,target=/m cat /m/f > /e; stat -c %a /m/x >> /e\n", _TREE),
    "mount bind leaves directory": Case("FROM base\nRUN --mount=type=bind,source=d,target=/m/n true\n", _TREE),
    "mount bind default type": Case("FROM base\nRUN --mount=source=d,target=/m ls /m > /e\n", _TREE),
    "mount bind file": Case("FROM base\nRUN --mount=type=bind,source=d/f,target=/m/f cat /m/f > /e\n", _TREE),
    "mount bind read only": Case("FROM base\nRUN --mount=type=bind,source=d,target=/m echo > /m/n; [ -e /m/n ] && echo written > /e || echo refused > /e\n", _TREE),
    "mount bind rw": Case("FROM base\nRUN --mount=type=bind,source=d,target=/m,rw echo > /m/n; ls /m > /e\nRUN ls -A /m >> /e 2>&1 || true\n", _TREE),
    "mount bind over files": Case("FROM base\nRUN --mount=type=bind,source=d,target=/base/full ls -A /base/full > /e\n", _TREE),
    "mount bind from stage": Case("FROM base AS one\nRUN echo 1 > /f\nFROM base\nRUN --mount=type=bind,from=one,source=/f,target=/m cat /m > /e\n"),
    "mount bind from stage whole": Case("FROM base AS one\nRUN echo 1 > /f\nFROM base\nRUN --mount=from=one,target=/m cat /m/f > /e\n"),
    "mount bind relative": Case("FROM base\nWORKDIR /w\nRUN --mount=type=bind,source=d,target=m ls m > e\n", _TREE),
    "mount bind ignores": Case("FROM base\nRUN --mount=type=bind,target=/m ls -A /m > /e\n", {".dockerignore": "a\n", "a": "1", "b": "1"}),
    "mount cache": Case("FROM base\nRUN --mount=type=cache,target=/c echo > /c/f; ls -A /c > /e\n"),
    "mount cache mode": Case("FROM base\nRUN --mount=type=cache,id=mode,target=/c,mode=0700,uid=7,gid=8 stat -c '%a %u %g' /c > /e\n"),
    "mount cache over files": Case("FROM base\nRUN --mount=type=cache,id=over,target=/base/full ls -A /base/full > /e\n"),
    "mount tmpfs": Case("FROM base\nRUN --mount=type=tmpfs,target=/t,size=1000000 echo > /t/f; ls -A /t > /e\nRUN ls -Ad /t >> /e 2>&1 || true\n"),
    "mount tmpfs over files": Case("FROM base\nRUN --mount=type=tmpfs,target=/base/full ls -A /base/full > /e\n"),
    "mount secret absent": Case("FROM base\nRUN --mount=type=secret,id=s ls -A /run/secrets > /e 2>/dev/null; [ -e /run/secrets/s ] && echo yes >> /e || echo no >> /e\n"),
    "mount secret required": Case("FROM base\nRUN --mount=type=secret,id=s,required cat /run/secrets/s > /e\n"),
    "mount several": Case("FROM base\nRUN --mount=type=bind,source=d,target=/m --mount=type=tmpfs,target=/t cp /m/f /t/ && cat /t/f > /e\n", _TREE),
    "mount unknown type": Case("FROM base\nRUN --mount=type=odd,target=/m true\n"),
    "run network none": Case("FROM base\nRUN --network=none echo > /e\n"),
    "run network host": Case("FROM base\nRUN --network=default echo > /e\n"),
    "run security insecure": Case("FROM base\nRUN --security=insecure echo > /e\n"),
    # --- stages --------------------------------------------------------------------------------------------------
    "stage on stage": Case("FROM base AS one\nRUN echo 1 > /f\nFROM one AS two\nRUN echo 2 >> /f\n"),
    "stage twice": Case("FROM base AS one\nRUN echo 1 > /f\nFROM one AS two\nRUN echo 2 >> /f\nFROM one\nCOPY --from=two /f /g\nRUN echo 3 >> /f\n"),
    "stage unused is not built": Case("FROM base AS one\nRUN false\nFROM base\nRUN echo > /e\n"),
    "stage named like image": Case("FROM base AS base\nRUN echo 1 > /f\nFROM base\nRUN cat /f > /e\n"),
    "stage names twice": Case("FROM base AS one\nRUN echo 1 > /f\nFROM base AS one\nRUN echo 2 > /f\nFROM base\nCOPY --from=one /f /e\n"),
    "stage platform": Case("FROM --platform=linux/amd64 base\nRUN echo > /e\n"),
    "from scratch": Case("FROM scratch\nCOPY f /f\n", {"f": "1"}),
    "from scratch as last of two": Case("FROM base AS one\nFROM scratch\nCOPY --from=one /base/full /e\n"),
    "from nothing": Case("FROM\nRUN true\n"),
    "no from": Case("RUN true\n"),
    "arg only": Case("ARG A=1\n"),
    # --- the file ------------------------------------------------------------------------------------------------
    "byte order mark": Case("\ufeffFROM base\nRUN echo > /e\n"),
    "carriage returns": Case("FROM base\r\nRUN echo one > /e && \\\r\n  echo two >> /e\r\nENV A=1\r\nRUN echo $A >> /e\r\n"),
    "escape directive": Case("# escape=`\nFROM base\nRUN echo one `\n  two > /e\n"),
    "check directive": Case("# check=skip=all\nFROM base\nRUN echo > /e\n"),
    "comments indented": Case("   # comment\nFROM base\n   # another\n   RUN echo > /e\n"),
    "last line without end": Case("FROM base\nRUN echo > /e"),
    "last line continued": Case("FROM base\nRUN echo > /e \\\n"),
    "empty continuation": Case("FROM base\nRUN echo a && \\\n\n\n  echo b > /e\n"),
    "unknown instruction": Case("FROM base\nRUNN true\n"),
    "onbuild": Case("FROM base\nONBUILD RUN echo > /e\n"),
    "onbuild of parent stage": Case("FROM base AS one\nONBUILD RUN echo > /e\nFROM one\n"),
    "metadata": Case('FROM base\nLABEL a=b\nEXPOSE 80\nSTOPSIGNAL 9\nHEALTHCHECK NONE\nMAINTAINER me\nCMD ["x"]\nENTRYPOINT ["y"]\n'),
    "volume": Case("FROM base\nVOLUME /v /base/full\nRUN echo > /v/f\n"),
    "volume then copy": Case("FROM base\nVOLUME /base/full\nCOPY f /base/full/\n", {"f": "1"}),
    "cmd without from": Case("CMD x\nFROM base\n"),
    # --- found while comparing -----------------------------------------------------------------------------------
    "arg after env not given": Case("FROM base\nENV A=env\nARG A\nRUN echo $A > /e\n"),
    "arg after env in words": Case("FROM base\nENV A=env\nARG A=arg\nENV B=$A\nRUN echo $A $B > /e\n"),
    "arg of parent stage in words": Case("FROM base AS one\nARG A=1\nFROM one\nENV B=$A\nRUN echo $B > /e\n"),
    "heredoc run interpreter reads": Case("FROM base\nRUN <<E\n#!/bin/sh\ncat > /e\necho end >> /e\nE\n"),
    "heredoc run interpreter quoted": Case("FROM base\nARG A=1\nRUN <<'E'\n#!/bin/sh\necho $A > /e\nE\n"),
    "heredoc run interpreter user": Case("FROM base\nUSER agent\nRUN <<E\n#!/bin/sh\nid -u > /tmp/e\nE\n"),
    "copy json quotes": Case('FROM base\nCOPY ["it\'s", "/e/"]\n', {"it's": "1"}),
    "copy json double quotes": Case('FROM base\nCOPY ["a\\"b\\"", "/e/"]\n', {'a"b"': "1", "ab": "2"}),
    "copy json backslash": Case('FROM base\nCOPY ["a\\\\b", "/e/"]\n', {"a\\b": "1", "ab": "2"}),
    "copy json dollar escaped": Case('FROM base\nARG N=1\nCOPY ["a\\\\$N", "/e/"]\n', {"a$N": "1", "a1": "2"}),
    "copy quoted word": Case("FROM base\nCOPY \"a\" '/e/'\n", {"a": "1"}),
    "copy quoted blank": Case('FROM base\nCOPY "a b" /e/\n', {"a b": "1"}),
    "copy escaped blank": Case("FROM base\nCOPY a\\ b /e/\n", {"a b": "1", "b": "2"}),
    "from later stage needed": Case("FROM base AS one\nCOPY --from=two /f /e\nFROM base AS two\nRUN echo > /f\nFROM base\nCOPY --from=one /e /e\n"),
    "wildcard no match no slash": Case("FROM base\nCOPY *.gone /e\n", {"a": "1"}),
    "chown unknown group": Case("FROM base\nCOPY --chown=agent:strangers f /e\n", {"f": "1"}),
    "env special names": Case("FROM base\nENV A=$1x B=$@x C=$$x D=a$ E=$ F=${1}x\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "env hash in value": Case('FROM base\nENV A=#1 B="#2" C=a#3\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n'),
    "env tab": Case("FROM base\nENV\tA=1\tB=2\nRUN echo $A $B > /e\n"),
    "env nested": Case("FROM base\nENV A=1\nENV B=${N:-${A}x} C=${N:-'q r'} D=${N:-\"$A\"} E=${A:+a}b\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "env backslash at end": Case("FROM base\nENV A=a\\\\\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "env old style quotes": Case("FROM base\nENV A 'x y'\nENV B it\\'s $A\nRUN env | sort | grep -e ^.= -e ^OLD= > /e\n"),
    "continuation with blank behind": Case("FROM base\nRUN echo one \\  \n  two > /e\n"),
    "mount cache of two steps": Case("FROM base\nRUN --mount=type=cache,id=two,target=/c echo > /c/f\nRUN --mount=type=cache,id=two,target=/c ls /c > /e\n"),
    "mount bind parent used": Case("FROM base\nRUN --mount=type=bind,source=d,target=/m/n echo > /m/o\n", _TREE),
    "mount target variable": Case("FROM base\nARG T=/m\nRUN --mount=type=bind,source=d,target=$T cat /m/f > /e\n", _TREE),
    "mount as user": Case("FROM base\nUSER agent\nRUN --mount=type=bind,source=d,target=/m --mount=type=tmpfs,target=/t " "cat /m/f > /tmp/e; touch /t/x && echo t >> /tmp/e\n", _TREE),
    "mount cache as user": Case("FROM base\nUSER agent\nRUN --mount=type=cache,id=u,uid=1000,gid=1001,target=/c touch /c/x && echo c >> /tmp/e\n"),
    "add tar long name": Case("FROM base\nADD t.tar /e/\n", {"t.tar": Tar({"n" * 150 + "/" + "m" * 150: "1"})}),
    "add tar same name twice": Case("FROM base\nADD t.tar /e/\n", {"t.tar": Tar({"a": "1", "./a": "2"})}),
    "copy over and under": Case("FROM base\nCOPY a b /e/\n", {"a/x": "1", "a/s/y": "2", "b/x": "3", "b/s": Directory(0o700), "b/s/z": "4"}),
    "copy to dot of root": Case("FROM base\nCOPY f .\n", {"f": "1"}),
    "copy same file twice": Case("FROM base\nCOPY f f /e/\n", {"f": "1"}),
    "user in child stage workdir": Case("FROM base AS one\nUSER agent\nFROM one\nWORKDIR /home/agent/x\n"),
    "workdir in directory of other": Case("FROM base\nRUN mkdir /o && chown 7:8 /o\nUSER agent\nWORKDIR /o/p\n"),
    "workdir user unknown number": Case("FROM base\nUSER 4321:99\nWORKDIR /p/q\n"),
    "user name with number group": Case("FROM base\nUSER agent:0\nRUN id > /tmp/e\n"),
    "run in missing directory json": Case('FROM base\nWORKDIR /p\nRUN cd / && rmdir /p\nRUN ["/bin/sh", "-c", "pwd > /e"]\n'),
    "run stdin": Case("FROM base\nRUN cat > /e; echo end >> /e\n"),
    "run long text": Case("FROM base\nRUN " + "true; " * 5000 + "echo > /e\n"),
    "arg with quotes given": Case('FROM base\nARG A\nENV B=$A\nRUN echo "$B" > /e\n', args={"A": 'it\'s "x" $HOME \\'}),
    "arg given in copy": Case("FROM base\nARG A\nCOPY f /$A\n", {"f": "1"}, args={"A": "a b"}),
}
# fmt: on
