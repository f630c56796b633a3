"""Images built from Dockerfiles: what they contain, which steps are carried out, and what a build reports."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megaflow_hpc.environments.builds import tree, workspace
from megaflow_hpc.environments.builds.workspace import Trees
from megaflow_hpc.environments.images.layered import read_layered
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import SiteError
from tests.support.builds import build, layers_of
from tests.support.image_trees import tree_of
from tests.support.layers import Entries, add_image
from tests.support.namespaces import no_subordinate_ids
from tests.support.sandboxes import runs

# --- what an image contains -------------------------------------------------------------------------------------------

RICH = r"""
# syntax=docker/dockerfile:1
ARG BASE=base
FROM ${BASE} AS tools
WORKDIR /out
RUN mkdir -p bin && printf '#!/bin/sh\necho tool\n' > bin/tool && chmod 750 bin/tool && ln -s tool bin/alias
RUN echo unwanted > /tmp/of-the-other-stage

FROM $BASE
ARG WHO=nobody
ENV LAYERED=/opt/bin:$PATH PLAIN="two  words" \
    QUOTED='$PLAIN'
ENV OLD style value
LABEL ignored=yes
RUN echo "hello $WHO|$PLAIN|$QUOTED|$OLD" > /log && pwd >> /log
WORKDIR /srv
WORKDIR app
COPY one.txt sub ./
RUN ls -A >> /log && rm one.txt
COPY --chown=www-data:www-data ["with blank.txt", "sub", "/data/"]
RUN stat -c '%n %U:%G' /data "/data/with blank.txt" /data/nested/kept.secret >> /log
COPY . /all/
COPY --from=tools /out /from/
SHELL ["/bin/bash", "-c"]
RUN [[ -n "$BASH_VERSION" ]] && echo bash >> /log
RUN --mount=type=cache,target=/var/cache/pip --mount=type=bind,source=sub,target=/bound \
    ls /bound >> /log && echo x > /var/cache/pip/x
RUN chmod 666 /log && useradd --create-home --uid 1234 agent
USER agent
WORKDIR /home/agent
RUN echo "$(id -un) $(id -gn) $HOME $PWD" >> /log; ! touch /root/x 2>/dev/null
ENTRYPOINT ["tool"]
"""

LOG = """\
hello me|two  words|$PLAIN|style value
/
nested
one.txt
three
/data www-data:www-data
/data/with blank.txt www-data:www-data
/data/nested/kept.secret www-data:www-data
bash
nested
three
agent agent /home/agent /home/agent
"""


@pytest.mark.slow
def test_a_built_image_ran_every_step_and_holds_what_was_copied_where_and_as_it_was_asked(
    base_sif: Path, scratch: Path, tmp_path: Path
) -> None:
    context = tmp_path / "context"
    (context / "sub" / "nested").mkdir(parents=True)
    texts = {
        ".dockerignore": "*.log\n**/*.secret\n!sub/nested/kept.secret\n",
        "one.txt": "1\n",
        "with blank.txt": "blank\n",
        "noise.log": "n",
        "sub/three": "3\n",
        "sub/nested/lost.secret": "s",
        "sub/nested/kept.secret": "k",
    }
    for name, text in texts.items():
        (context / name).write_text(text)
    before = set(os.listdir("/tmp"))
    image = build(context, RICH, {"base": str(base_sif)}, args={"WHO": "me"})
    assert "of-the-other-stage" not in set(os.listdir("/tmp")) - before
    absent = "/srv/app/one.txt /all/noise.log /tmp/of-the-other-stage /.megaflow-build /root/x /bound /var/cache/pip"

    async def look(sandbox: ApptainerSandbox) -> None:
        for command, said in (
            ("cat /log", LOG),
            ("cat /srv/app/three", "3\n"),
            ("ls /data", "nested\nthree\nwith blank.txt\n"),
            ("ls /all/sub/nested", "kept.secret\n"),
            ("stat -c %a /from/bin/tool; readlink /from/bin/alias", "750\ntool\n"),
            (f"ls -d {absent} 2>/dev/null", ""),
            # The variables are set over those of the base.
            ('[ "$LAYERED" = "/opt/bin:$PATH" ] && echo "$PLAIN|$QUOTED|$OLD"', "two  words|$PLAIN|style value\n"),
            ("echo $LC_ALL", "C.UTF-8\n"),
        ):
            assert (await sandbox.exec(command)).stdout == said, command

    runs(str(image), scratch)(look)


# --- which steps are carried out --------------------------------------------------------------------------------------


def test_a_step_that_fails_names_its_line(small_rootfs: str, tmp_path: Path) -> None:
    text = "FROM base\nRUN true\n\nRUN echo trying && \\\n  exit 7\nRUN true\n"
    said = r"Dockerfile: the build failed at line 4(.|\n)*trying(.|\n)*Dockerfile:4: exit status 7"
    with pytest.raises(SiteError, match=said):
        build(tmp_path / "context", text, {"base": small_rootfs})
    assert list((tmp_path / "store" / "work").glob("*/")) == []


@pytest.mark.slow
def test_a_build_on_an_image_begins_in_its_directory_and_makes_no_step_twice(
    busybox_rootfs: str, tmp_path: Path
) -> None:
    bases = {"base": busybox_rootfs}

    def made(name: str, text: str) -> tuple[Path, list[str]]:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "f").write_text(name)
        said: list[str] = []
        image = build(tmp_path / name, text, bases, said=said)
        return image, [line for line in said if "differs from Docker" not in line]

    first, said = made("first", "FROM base\nENV A=1\nWORKDIR /w\nRUN echo made > made\n")
    assert len(said) == 2
    bases["first"] = str(first)
    text = "FROM first\nENV B=$A-2\nCOPY f .\nWORKDIR sub\nRUN echo $B > ../b; pwd > pwd\n"
    second, _ = made("second", text)
    image = read_layered(second)
    assert (image.workdir, image.settings.splitlines()[0]) == ("/w/sub", "export A=1")
    found = {name: layers_of(second).read(f"w/{name}").decode().strip() for name in ("made", "f", "b", "sub/pwd")}
    assert found == {"made": "made", "f": "second", "b": "1-2", "sub/pwd": "/w/sub"}
    third, said = made("third", text)  # its file differs
    assert third != second
    assert not any("first" in line for line in said)
    assert made("third", text) == (third, [])


def test_without_an_overlay_a_chain_is_laid_out_once_for_all_its_steps(
    small_rootfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay")
    laid: list[str] = []

    async def counted(prefix: Sequence[str], *words: str, request: object = None) -> str:
        laid.extend(words[2:] if words[0] == "lay" else ())
        return await tree.run_tree(prefix, *words, request=request)

    monkeypatch.setattr(workspace, "run_tree", counted)
    text = (
        "FROM base AS first\nRUN echo 1 > /one\nRUN rm /one && echo 2 > /two\n"
        "RUN mkdir /d && cat /two > /d/two && rm /two\nRUN ls /d / > /seen\n"
        "FROM first\nRUN echo 3 > /d/three\nCOPY --from=first /d /e\nRUN ls /e >> /seen\n"
    )
    found = tree_of(build(tmp_path / "context", text, {"base": small_rootfs}))
    assert {"/d/two", "/d/three", "/e/two", "/seen"} <= found.keys()
    assert not {"/one", "/two", "/e/three"} & found.keys()
    assert len(laid) == len(set(laid)) == 7, laid  # the base, and six layers


LONG = """\
FROM base
RUN rm /d/f0 && echo one >/d/one
RUN rm /d/f1 && rm -r /opt && test "$(cat /d/one)" = one && echo two >/d/two
RUN test ! -e /d/f0 && test ! -e /opt && mkdir /opt && ls -A /d | wc -l >/opt/count
COPY --from=base /d/f2 /d/f3 /copied/
"""


def test_steps_run_over_as_many_layers_as_an_overlay_takes_and_over_more(
    busybox_rootfs: str, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step is the first beyond the limit. With ``LAYERS=400``, an overlay's real limit, it takes a minute."""
    most = int(os.environ.get("LAYERS", "8"))
    monkeypatch.setattr(overlay, "MAX_LOWERS", most)
    count = most - 3
    layers: list[Entries] = [{"d/": "", f"d/f{number}": f"{number}\n"} for number in range(count - 1)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # writes hundreds of layers fast
        store = ImageStore(Path(place, "store"))
        long = add_image(store, busybox_rootfs, [{"opt/": "", "opt/below/": ""}, *layers])
        image = build(Path(place, "context"), LONG, {"base": long})
        assert len(read_layered(image).layers) == count + 4 > most

        async def look(sandbox: ApptainerSandbox) -> str:
            return (await sandbox.exec("ls /d | wc -l; cat /opt/count /d/one /d/two; ls /opt; cat /copied/*")).stdout

        assert runs(str(image), scratch)(look) == f"{count - 1}\n{count - 1}\none\ntwo\ncount\n2\n3\n"
        made = layers_of(image)
        opt, names = made.names("opt"), made.names("d")
    assert opt == {"count"}
    assert names == {f"f{number}" for number in range(2, count - 1)} | {"one", "two"}


class Disk(NamedTuple):
    """A result of :func:`shutil.disk_usage`, in GB."""

    total: float
    used: float
    free: float


@pytest.mark.parametrize(
    ("total", "free", "stay"),
    [
        (250, 60, ["a", "b"]),  # less than a quarter is free, but enough
        (24, 8, ["a", "b"]),
        (250, 10, []),
        (24, 4, []),
    ],
)
def test_trees_stay_for_the_next_build_as_long_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, stay: list[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(total * 1e9, (total - free) * 1e9, free * 1e9))
    trees, made = Trees(tmp_path), list[str]()

    def make(target: Path) -> None:
        target.mkdir()
        made.append(target.name)

    with trees.holding() as first:
        first("a", make)
        with trees.holding() as second:
            second("b", make)
        assert (tmp_path / "trees" / "a").is_dir(), "it is in use"
    assert sorted(path.name for path in (tmp_path / "trees").iterdir()) == stay
    with trees.holding() as third:
        third("a", make)
    assert len(made) == (2 if stay else 3)


# --- what a build reports ---------------------------------------------------------------------------------------------

DIFFERS = ": differs from Docker: "
NO_OWNERS = ": no subordinate ids here (/etc/subuid): root owns every file while steps run"


def differences(place: Path, base: str, text: str) -> tuple[list[str], Path]:
    """Returns the reported differences from Docker, as ``LINE: …``, and the image."""
    (place / "context").mkdir(exist_ok=True)
    (place / "context" / "own").touch()
    said: list[str] = []
    image = build(place / "context", f"FROM base\n{text}", {"base": base}, said=said)
    return [line.partition("Dockerfile:")[2].replace(DIFFERS, ": ") for line in said if DIFFERS in line], image


def test_a_volume_is_told_where_any_image_is_built(busybox_rootfs: str, tmp_path: Path) -> None:
    text = "RUN mkdir /data\nVOLUME /data\nLABEL a=b\nRUN echo kept >/data/f\n"
    said, image = differences(tmp_path, busybox_rootfs, text)
    assert said == ["3: a volume's directory is an ordinary directory"]
    assert layers_of(image).read("data/f") == b"kept\n"
    assert differences(tmp_path, busybox_rootfs, text) == ([], image)


@pytest.mark.parametrize("step", ["echo 10.0.0.1 lab >>/etc/hosts", "rm /etc/hosts"])
def test_names_of_hosts_that_a_step_changed_are_told(busybox_rootfs: str, tmp_path: Path, step: str) -> None:
    said, _ = differences(tmp_path, busybox_rootfs, f"RUN cat /etc/hosts; touch /etc/other\nRUN {step}\n")
    assert said == ["3: /etc/hosts was changed, which is read-only there"]


def test_that_no_other_owners_can_be_had_is_told_once(busybox_rootfs: str, tmp_path: Path) -> None:
    text = "COPY --chown=7:8 own /file\nRUN stat -c %u:%g /file >/owner\nRUN touch /more\n"
    assert differences(tmp_path, busybox_rootfs, text)[0] == []
    with no_subordinate_ids(tmp_path / "bin", "fakeroot"):
        said, image = differences(tmp_path, busybox_rootfs, text.replace("more", "others"))
        assert said == ["4" + NO_OWNERS]  # The steps before were made with owners.
        said, image = differences(tmp_path, busybox_rootfs, text.replace("%u:%g", "%u.%g"))
        assert said == ["3" + NO_OWNERS]
    assert layers_of(image).read("owner") == b"0.0\n"


def test_a_default_that_a_base_image_might_know_better_is_told(small_rootfs: str, tmp_path: Path) -> None:
    text = "ARG OURS\nENV MADE=${OURS:-1} OPEN=${THEIRS-2}\nWORKDIR /${MADE:-x}\nRUN echo ${SHELLS:-own}\n"
    text += "ENV QUOTED='${A:-x}' ESCAPED=\\${B:-x}\n"  # These are not variables.
    said, _ = differences(tmp_path, small_rootfs, text)
    assert said == [f"3: ${name} is treated as unset, even if the base image sets it" for name in ("OURS", "THEIRS")]
