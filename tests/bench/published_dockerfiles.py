"""Published Dockerfiles of tasks, built by BuildKit or Buildah and by us, their trees compared: run by hand.

::

    python -m tests.bench.published_dockerfiles docker|buildah

They are fetched with the packages of the package index that bring them, and each distinct one is built once. What needs
a network is stood in for: every image by ``base`` (busybox and a few files), every ``RUN`` that fetches by ``true``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import remove_tree
from tests.bench.builder_peers import Buildah, Docker, Ours
from tests.environments.images.conformance.answers import compare
from tests.environments.images.conformance.cases import make_base
from tests.support.sources import fetch_sources

PACKAGES = (
    "aeval-harbor==0.4.0",
    "harbor==0.25.0",
    "terminal-bench==0.2.18",
    "tolokaforge-adapter-terminal-bench==0.2.0",
)
_FETCHES = re.compile(r"apt-get|apk |pip3? install|uv pip|curl|wget|npm |git clone")
_NEEDS = re.compile(r"sha256sum -c|bash|python|node |useradd")


def fetch(place: Path) -> list[Path]:
    """Downloads the packages' sources below ``place``. Returns their distinct Dockerfiles."""
    fetch_sources(PACKAGES, place)
    files = sorted(path for path in place.rglob("*ockerfile*") if path.is_file())
    return list({path.read_bytes(): path for path in reversed(files)}.values())


def stood_in(text: str, images: list[str]) -> tuple[str, list[str]]:
    """Removes the need for a network from a Dockerfile. Returns its text and the commands that it lost."""
    for name in images:
        text = text.replace(name, "base")
    lost: list[str] = []

    def replaced(found: re.Match[str]) -> str:
        if not _FETCHES.search(found[0]) and not _NEEDS.search(found[0]):
            return found[0]
        lost.append(" ".join(found[0].split())[:90])
        return "RUN true\n"

    return re.sub(r"^RUN(?:.*\\\n(?:\s*#.*\n)*)*.*\n?", replaced, text, flags=re.MULTILINE), lost


def main() -> None:
    """Entry point."""
    which = sys.argv[1]
    place = Path(tempfile.mkdtemp(prefix="published"))
    place.chmod(0o755)
    base = make_base(place / "base", Path(os.environ["MEGAFLOW_TEST_BASE_SIF"]).with_name("busybox"))
    peer = {"docker": Docker, "buildah": Buildah}[which](shlex.split(os.environ.get(which.upper(), which)), base, place)
    ours = Ours(base, place)
    (place / "sources").mkdir()
    same = 0
    files = fetch(place / "sources")
    for number, file in enumerate(files):
        name = file.relative_to(place / "sources")
        text = file.read_text()
        lost: list[str] = []
        try:
            text, lost = stood_in(text, Dockerfile(file).bases)
        except ConfigError as error:
            print(f"{name}: refused: {str(error).removeprefix(f'{file}:')[:120]}")
        context = place / f"context{number}"
        shutil.copytree(file.parent, context, symlinks=True)
        (context / "Dockerfile").write_text(text)
        theirs, found = peer.build(context, {}), ours.build(context, {})
        lines = compare(theirs, found)
        same += not lines
        if "fails" in theirs:
            print(f"{name}: {which} fails: {theirs['fails'][:150]}")
        print(
            f"{name}: {'differs' if lines else 'the same'}", *lines, *(f"not run: {each}" for each in lost), sep="\n  "
        )
    remove_tree(place)
    print(f"{len(files)} distinct Dockerfiles, {same} the same")


if __name__ == "__main__":
    main()
