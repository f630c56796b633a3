"""What the host undoes in a layer before tests run on it; what a verdict is worth stands in tests/tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.environments.images.layers.view import Tree, View
from megaflow_hpc.environments.sandbox.rootfs.upperdir import false_programs, restore_programs
from megaflow_hpc.host.files import remove_tree
from tests.support.layers import Entries, unpacked
from tests.support.trees import nest


@pytest.mark.parametrize("mode", [0o755, 0o000])
def test_preferred_libraries_go_whatever_the_rights_of_their_directory(tmp_path: Path, mode: int) -> None:
    upper, image = tmp_path / "upper", tmp_path / "image"
    (image / "usr" / "lib").mkdir(parents=True)
    preferred = upper / "usr" / "lib" / "glibc-hwcaps" / "x86-64-v3"
    preferred.mkdir(parents=True)
    (preferred / "libc.so.6").touch()
    (preferred / "libmine.so").touch()
    nest(preferred.parent / "deep", 1500, "dir")
    preferred.chmod(mode)
    assert restore_programs(upper, View([Tree(str(image))])) == ["usr/lib/glibc-hwcaps/x86-64-v3/libc.so.6"]
    assert [path.name for path in preferred.iterdir()] == ["libmine.so"]
    remove_tree(upper)  # which pytest's own cleaning up could not


def test_a_program_is_the_images_own_whichever_layer_it_comes_from(tmp_path: Path) -> None:
    """The lowest has sh; one over it brings grep, bash and a platform's libraries; the topmost takes bash away."""
    chain: list[Entries] = [
        {"usr/": "", "usr/bin/": "", "usr/bin/sh": "0", "usr/bin/awk": "0", "bin": "->usr/bin", "usr/lib/": ""},
        {"usr/bin/": "", "usr/bin/grep": "1", "usr/bin/bash": "1", "usr/lib/a-b-gnu/libc.so.6": "1", "opt/bin/x": "1"},
        {"usr/bin/": "", "usr/bin/bash": None, "usr/bin/sh": "2", "usr/sbin/": "", "usr/lib/c-d-gnu": None},
    ]
    layers = unpacked(chain, tmp_path / "layers")
    upper = tmp_path / "upper"
    theirs = ("bin/sh", "usr/bin/sh", "usr/bin/grep", "usr/bin/awk", "usr/bin/bash", "usr/sbin/grep", "usr/sbin/mine")
    theirs += ("usr/lib/a-b-gnu/libc.so.6", "usr/lib/a-b-gnu/mine", "usr/lib/c-d-gnu/libc.so.6", "usr/local/bin/grep")
    for name in (*theirs, "opt/bin/grep", "opt/bin/bash"):
        (upper / name).parent.mkdir(parents=True, exist_ok=True)
        (upper / name).write_text("false")
    image = View([Tree(layer) for layer in layers])
    assert false_programs(upper, image, "/opt/bin:/usr/bin") == ["opt/bin/grep"]
    restored = ["bin", "usr/bin/awk", "usr/bin/grep", "usr/bin/sh", "usr/local/bin/grep", "usr/lib/a-b-gnu/libc.so.6"]
    assert restore_programs(upper, image) == restored
    left = sorted(str(path.relative_to(upper)) for path in upper.rglob("*") if path.is_file())
    # No layer has these, as the image is seen: they hide nothing of it.
    added = ["opt/bin/bash", "opt/bin/grep", "usr/bin/bash", "usr/lib/a-b-gnu/mine", "usr/lib/c-d-gnu/libc.so.6"]
    assert left == [*added, "usr/sbin/grep", "usr/sbin/mine"]
