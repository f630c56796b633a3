"""Changes of a layer that tests can see. tests/tasks tests the verdicts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.layers.view import LayerView, Tree
from megaflow_hpc.environments.sandbox.rootfs.upperdir import PROGRAM_DIRS, KeepRules, keep_only, mend, restore, sift
from megaflow_hpc.host.files import remove_tree
from tests.support.layers import Entries, unpacked
from tests.support.trees import nest

CHAIN: list[Entries] = [
    {
        "usr/": "",
        "usr/bin/": "",
        "usr/bin/sh": "0",
        "usr/bin/awk": "0",
        "bin": "->usr/bin",
        "usr/lib/": "",
        "srv/d": "0",
    },
    {"usr/bin/": "", "usr/bin/grep": "1", "usr/bin/bash": "1", "usr/lib/libc.so.6": "1", "opt/bin/x": "1", "root/": ""},
    {"usr/bin/": "", "usr/bin/bash": None, "usr/bin/sh": "2", "usr/lib/x": None, "var/run": "->/run", "run/": ""},
]
"""The lowest layer has sh, the middle one adds grep and bash, and the topmost removes bash."""


def fill(upper: Path, *names: str) -> None:
    for name in names:
        (upper / name).parent.mkdir(parents=True, exist_ok=True)
        (upper / name).write_text("theirs")


def image(tmp_path: Path) -> LayerView:
    return LayerView([Tree(layer) for layer in unpacked(CHAIN, tmp_path / "layers")])


def files(upper: Path) -> list[str]:
    return sorted(str(path.relative_to(upper)) for path in upper.rglob("*") if not path.is_dir() or path.is_symlink())


SYSTEM = (
    *("usr/bin/sh", "usr/bin/awk", "usr/local/bin/grep", "usr/lib/libc.so.6", "usr/lib/libnew.so", "etc/ld.so.preload"),
    *("usr/lib/hwcaps/v3/libc.so.6", "lib64/ld.so", "opt/new/lib", "root/.profile", "environment", "bin/sh", "bin/new"),
)
NEW = ("usr/bin/bash", "usr/local/bin/mine", "data/x", "root/answer", "srv/new", "usr/bin/link")
CHANGED = ("srv/d", "var/run", "app/keep/x", "usr/src/app/y")


def kept_of(tmp_path: Path, upper: Path, rules: KeepRules, seen: LayerView | None = None) -> list[str]:
    """The files that are left of a layer by these rules."""
    seen = seen or image(tmp_path)
    keep_only(upper, tmp_path / "aside", sift(upper, seen, rules).kept, seen)
    return files(upper)


def test_additions_outside_the_system_and_programs_of_new_names_are_kept(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    fill(upper, *SYSTEM, *NEW, *CHANGED)
    (upper / "usr/bin/link").unlink()
    (upper / "usr/bin/link").symlink_to("/data/x")
    seen = image(tmp_path)
    sifted = sift(upper, seen, KeepRules(["usr/src/app"], additions=False))
    assert sifted.kept == ["usr/src/app"], "only what is named is kept where additions are not"
    assert {"usr/bin/sh", "data", "srv/d", "app", "root/answer"} <= set(sifted.dropped)
    kept = kept_of(tmp_path, upper, KeepRules(["app/keep", "usr/src/app"]), seen)
    assert kept == sorted([*NEW, "app/keep/x", "usr/src/app/y"])


def test_without_a_work_directory_all_but_the_system_is_kept(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    fill(upper, *SYSTEM, *NEW, *CHANGED)
    assert kept_of(tmp_path, upper, KeepRules(everywhere=True)) == sorted({*NEW, *CHANGED} - {"usr/src/app/y"})


def test_directories_on_the_images_own_path_are_the_images(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    fill(upper, "data/env/bin/grep", "data/env/bin/mine", "data/env/lib/site.py", "data/other", "more/lib.py")
    rules = KeepRules(programs=(*PROGRAM_DIRS, "data/env/bin"), loaded=["more"])
    assert kept_of(tmp_path, upper, rules) == ["data/env/bin/mine", "data/other"]


def test_no_link_that_the_agent_made_leads_to_what_is_kept(tmp_path: Path) -> None:
    upper, outside = tmp_path / "upper", tmp_path / "outside"
    outside.mkdir()
    upper.mkdir()
    for name in ("app", "usr", "data"):
        (upper / name).symlink_to(outside)
    kept_of(tmp_path, upper, KeepRules(["app", "data/app"]))
    assert os.listdir(upper) == []


def test_directories_on_the_way_have_the_images_mode(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    fill(upper, "usr/src/app/y")
    (upper / "usr").chmod(0)
    kept_of(tmp_path, upper, KeepRules(["usr/src/app"]))
    assert (upper / "usr").stat().st_mode & 0o777 == 0o755


def test_programs_of_every_layer_are_the_images_again_and_additions_stay(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    fill(upper, *SYSTEM, *NEW, *CHANGED)
    restore(upper, image(tmp_path), ["app"])
    gone = {"usr/bin/sh", "usr/bin/awk", "usr/local/bin/grep", "usr/lib/libc.so.6", "bin/sh", "bin/new"}
    assert files(upper) == sorted({*SYSTEM, *NEW, *CHANGED} - gone)


@pytest.mark.parametrize("mode", [0o755, 0o000])
def test_a_container_starts_again_whatever_the_rights_of_its_directories(tmp_path: Path, mode: int) -> None:
    upper = tmp_path / "upper"
    fill(upper, "usr/lib/glibc-hwcaps/x86-64-v3/libc.so.6", "data/x")
    nest(upper / "usr" / "lib" / "glibc-hwcaps" / "deep", 1500, "dir")
    (upper / "usr" / "lib" / "glibc-hwcaps").chmod(mode)
    (upper / "app").write_text("no directory")
    mend(upper, image(tmp_path), "/app")
    assert files(upper) == ["data/x"]
    remove_tree(upper)  # because pytest could not remove it
