"""Compares our builds of Dockerfiles with the recorded results of BuildKit (``bench/builder_peers``), file by file.

Every case is read here, and refused exactly if the table of differences says so. Some cases are built.
``python -m tests.bench.builder_peers ours`` builds all.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfile
from megaflow_hpc.errors import ConfigError
from tests.bench.builder_peers import ANSWERS, Ours
from tests.environments.images.conformance.answers import Answer, compare
from tests.environments.images.conformance.cases import CASES, make_base, write
from tests.environments.images.conformance.differences import DIFFERENT, LATER, MORE, REFUSED

BUILT = (
    """
add several tars, add tar through link, arg after env in words, arg of parent stage,
copy directory that cannot be written, copy empty directory, copy file below link that leads up,
copy file over name of two, copy file to link to file, copy several, chown and chmod, exclude option pattern,
run json, run shell instruction works, mount bind ignores, delete and make directory,
delete in one step make in next, directory by link, env expansion, env path twice, env quotes, add tar,
add tar chmod, add tar owner, copy hard links, mount as user, mount bind over files, mount cache mode,
workdir below link to nothing, workdir through link, heredoc copy escapes, heredoc copy several,
heredoc run redirected, ignore exception, ignore slash forms, link by directory, mode alone changed,
one name of two changed, rename directory, run chown, run devices, run environment, run hard link, run hosts,
stage twice, user and copy, user and group, user home variable set, user number unknown,
wildcard matches directory, wildcard optional
""".replace(",\n", ", ")
    .strip()
    .split(", ")
)
"""Cases that every run of the suite builds, one for each kind of mistake."""


@pytest.fixture(scope="module")
def known() -> dict[str, Answer]:
    """The results of BuildKit by case."""
    answers: dict[str, Answer] = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return answers


@pytest.fixture(scope="module")
def ours(base_sif: Path, tmp_path_factory: pytest.TempPathFactory) -> Ours:
    place = tmp_path_factory.mktemp("builds")
    return Ours(make_base(place / "base", base_sif.with_name("busybox")), place)


def context_of(name: str, context: Path) -> Path:
    """Writes the files of a case into a new directory."""
    context.mkdir()
    write(context, {**CASES[name].files, "Dockerfile": CASES[name].text})
    return context


def test_every_case_was_built_by_buildkit(known: dict[str, Answer]) -> None:
    assert list(known) == list(CASES)
    assert not {*REFUSED, *LATER} & {name for name, answer in known.items() if "fails" in answer}
    assert all("fails" in known[name] for name in MORE)


def test_what_buildkit_builds_is_read_or_refused_as_the_table_says(known: dict[str, Answer], tmp_path: Path) -> None:
    said: dict[str, str] = {}
    for number, name in enumerate(CASES):
        context = context_of(name, tmp_path / str(number))
        try:
            Dockerfile(context / "Dockerfile", build_args=CASES[name].args)
        except ConfigError as error:
            said[name] = str(error)
    refused = {name: text for name, text in said.items() if "fails" not in known[name]}
    assert refused.keys() == REFUSED.keys()
    assert [name for name, text in refused.items() if not re.search(REFUSED[name], text)] == []


@pytest.mark.parametrize("name", BUILT)
def test_an_image_has_the_files_that_buildkits_has(
    known: dict[str, Answer], ours: Ours, tmp_path: Path, name: str
) -> None:
    found = ours.build(context_of(name, tmp_path / "context"), CASES[name].args)
    assert not compare(known[name], found), CASES[name].text


@pytest.mark.parametrize("name", [*LATER, *DIFFERENT])
def test_nothing_is_silently_other_than_in_buildkit(
    known: dict[str, Answer], ours: Ours, tmp_path: Path, name: str
) -> None:
    ours.said.clear()
    found = ours.build(context_of(name, tmp_path / "context"), CASES[name].args)
    assert compare(known[name], found), CASES[name].text
    said = found.get("fails") or "\n".join(ours.said)
    assert re.search({**LATER, **DIFFERENT}[name], said), said
