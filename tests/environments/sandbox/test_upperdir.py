"""What the host undoes in a layer before tests run on it; what a verdict is worth stands in tests/tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.environments.sandbox.rootfs.upperdir import restore_programs
from megaflow_hpc.host.files import remove_tree
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
    assert restore_programs(upper, image) == ["usr/lib/glibc-hwcaps/x86-64-v3/libc.so.6"]
    assert [path.name for path in preferred.iterdir()] == ["libmine.so"]
    remove_tree(upper)  # which pytest's own cleaning up could not
