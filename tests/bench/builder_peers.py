"""Dockerfiles built by BuildKit and by Buildah, to be set beside ours: run by hand where one of them is there.

::

    python -m tests.bench.builder_peers ours              the cases by our builder, against what BuildKit made of them
    python -m tests.bench.builder_peers buildah           the same by Buildah, as the user who runs it: chroot, no root
    python -m tests.bench.builder_peers docker --record   by the BuildKit of a Docker daemon; writes buildkit.json anew
    … NAME-PATTERN                                        of the cases whose name has it

``DOCKER`` and ``BUILDAH`` say how the programs are called, where that is not their name. Neither needs a network:
``base`` is busybox and a few files, handed over as an archive.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.sources import ImageMapping
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.files import remove_tree
from tests.environments.images.conformance.answers import PATH, Answer, answer, compare
from tests.environments.images.conformance.cases import CASES, Case, make_base, write
from tests.environments.images.conformance.differences import DIFFERENT, LATER, MORE, REFUSED
from tests.support.image_trees import Tree, tree_of, tree_of_archive

ANSWERS = Path(__file__).parents[1] / "environments" / "images" / "conformance" / "buildkit.json"
Build = Callable[[Path, Mapping[str, str]], Answer]


class Peer:
    """Another builder, called as a program."""

    def __init__(self, words: list[str], base: Path, place: Path) -> None:
        self.words, self.place = words, place
        self.base = tree_of(base)
        archive = place / "base.tar"
        owners = ["--numeric-owner", "--owner=0", "--group=0"]
        subprocess.run(["tar", "-C", str(base), *owners, "-cf", str(archive), "."], check=True)
        self.load(archive)

    def run(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        """Runs one of its commands."""
        return subprocess.run([*self.words, *words], capture_output=True, check=False, timeout=600)

    def load(self, archive: Path) -> None:
        """Makes the image ``base`` from an archive."""
        raise NotImplementedError

    def build(self, context: Path, args: Mapping[str, str]) -> Answer:
        """Builds a directory with a Dockerfile."""
        raise NotImplementedError

    def _failed(self, done: subprocess.CompletedProcess[bytes]) -> Answer:
        lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if "error" in line.lower()]
        said = lines[-1].removeprefix("ERROR: failed to build: failed to solve: ")[:300] if lines else "?"
        return {"fails": re.sub(r"/\S+/merged| of ref \S+:|: failed to do request.*|: dial tcp.*", "", said)}

    def _answer(self, tree: Tree, config: Mapping[str, Any]) -> Answer:
        lines = config.get("Env") or []
        env = {name: value for name, _, value in (line.partition("=") for line in lines)}
        return answer(tree, self.base, env, str(config.get("WorkingDir") or ""), str(config.get("User") or ""))


class Docker(Peer):
    """BuildKit in a Docker daemon."""

    def load(self, archive: Path) -> None:
        done = self.run("import", str(archive), "base:latest")
        assert done.returncode == 0, done.stderr

    def build(self, context: Path, args: Mapping[str, str]) -> Answer:
        given = [word for name, value in args.items() for word in ("--build-arg", f"{name}={value}")]
        words = ["buildx", "build", "--network", "none", "--progress", "plain", *given]
        packed = self.run(*words, "-o", f"type=tar,dest={context}.tar", str(context))
        if packed.returncode:
            return self._failed(packed)
        with open(f"{context}.tar", "rb") as archive:
            tree = tree_of_archive(archive)
        os.unlink(f"{context}.tar")
        done = self.run(*words, "--iidfile", f"{context}.id", str(context))
        assert done.returncode == 0, done.stderr
        image = Path(f"{context}.id").read_text()
        return self._answer(tree, json.loads(self.run("image", "inspect", image).stdout)[0]["Config"])


class Buildah(Peer):
    """Buildah, without root: its steps run in a chroot."""

    def load(self, archive: Path) -> None:
        context = self.place / "base-of-peer"
        context.mkdir()
        shutil.copy(archive, context / "base.tar")
        env = f"ENV PATH={PATH}"
        (context / "Dockerfile").write_text(f"FROM scratch\nADD base.tar /\n{env}\n")
        done = self.run("build", *self._options, "-t", "base", str(context))
        assert done.returncode == 0, done.stderr
        (context / "Dockerfile").write_text("FROM base\n")
        self.base = self._exported(context, [])  # it loses set-uid bits

    def _exported(self, context: Path, given: list[str]) -> Tree:
        done = self.run("build", *self._options, *given, "-o", f"type=tar,dest={context}.tar", str(context))
        assert done.returncode == 0, done.stderr
        with open(f"{context}.tar", "rb") as archive:
            tree = tree_of_archive(archive)
        os.unlink(f"{context}.tar")
        return tree

    @property
    def _options(self) -> list[str]:
        return ["--isolation", "chroot", "--layers=false", "--pull=never", "-q"]

    def build(self, context: Path, args: Mapping[str, str]) -> Answer:
        given = [word for name, value in args.items() for word in ("--build-arg", f"{name}={value}")]
        image = f"localhost/case-{context.name}:latest".lower()
        done = self.run("build", *self._options, *given, "-t", image, str(context))
        if done.returncode:
            return self._failed(done)
        tree = self._exported(context, given)
        config = json.loads(self.run("inspect", "--type", "image", image).stdout)["OCIv1"]["config"]
        self.run("rmi", image)
        return self._answer(tree, config)


class Ours:
    """Our builder."""

    def __init__(self, base: Path, place: Path) -> None:
        self.base = tree_of(base)
        self.images = Images(ImageStore(place / "store"), builder=Builder())
        self.mapping = ImageMapping({"base": str(base)}, place)
        self.said: list[str] = []
        self.images.say = self.said.append

    def build(self, context: Path, args: Mapping[str, str]) -> Answer:
        """Builds a directory with a Dockerfile."""
        try:
            dockerfile = Dockerfile(context / "Dockerfile", build_args=args)
            image = self.images.resolve_dockerfile(dockerfile, self.mapping, timeout_s=120.0)
        except MegaflowError as error:
            return {"fails": str(error).replace(f"{context}/", "")}
        shell = "\n".join([*dockerfile.last.exports, "env -0"])
        done = subprocess.run(["/bin/sh", "-c", shell], env={"PATH": PATH}, capture_output=True, check=True)
        variables = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line)
        env = {name: value for name, value in variables.items() if name not in ("PWD", "OLDPWD", "SHLVL", "_")}
        return answer(tree_of(image), self.base, env, dockerfile.workdir, dockerfile.user)


def build_cases(build: Build, place: Path, cases: Mapping[str, Case]) -> dict[str, Answer]:
    """Builds each case."""

    def one(name: str, context: Path) -> Answer:
        context.mkdir()
        write(context, {**cases[name].files, "Dockerfile": cases[name].text})
        found = build(context, cases[name].args)
        remove_tree(context)
        return found

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(one, cases, (place / f"case{n}" for n in range(len(cases)))), strict=True))


def main() -> None:
    """Entry point."""
    which, *rest = [word for word in sys.argv[1:] if word != "--record"]
    cases = {name: case for name, case in CASES.items() if re.search(rest[0] if rest else "", name)}
    known = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    place = Path(tempfile.mkdtemp(prefix="builders"))
    try:
        place.chmod(0o755)
        base = make_base(place / "base", Path(os.environ["MEGAFLOW_TEST_BASE_SIF"]).with_name("busybox"))
        words = shlex.split(os.environ.get(which.upper(), which))
        builder = (
            {"docker": Docker, "buildah": Buildah}[which](words, base, place) if which != "ours" else Ours(base, place)
        )
        answers = build_cases(builder.build, place, cases)
    finally:
        remove_tree(place)
    if "--record" in sys.argv:
        known |= answers
        lines = [
            f"{json.dumps(name)}: {json.dumps(known[name], ensure_ascii=False)}" for name in CASES if name in known
        ]
        ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return
    expected = {*REFUSED, *LATER, *MORE, *DIFFERENT} if which == "ours" else set()
    different = {name: lines for name, found in answers.items() if (lines := compare(known[name], found))}
    for name, lines in different.items():
        if name not in expected:
            print(f"{name}: {CASES[name].text!r}\n  " + "\n  ".join(lines))
    for name in sorted(expected & answers.keys() - different.keys()):
        print(f"{name}: no longer differs")
    new = len(different.keys() - expected)
    print(f"{len(answers)} cases, {len(different)} differ, {new} of them not in differences.py")


if __name__ == "__main__":
    main()
