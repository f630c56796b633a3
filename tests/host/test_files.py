"""Removal of trees that a hostile task may leave."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megaflow_hpc.host.files import remove_tree
from tests.support.trees import nest


@pytest.mark.parametrize(("depth", "name"), [(3000, "d"), (100, "n" * 200)], ids=["deep", "long"])
def test_a_tree_of_any_depth_is_removed(tmp_path: Path, depth: int, name: str) -> None:
    nest(tmp_path / "tree", depth, name)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_directories_without_any_right_are_removed(tmp_path: Path) -> None:
    for mode in (0o000, 0o500, 0o200, 0o100, 0o600):
        inner = tmp_path / "tree" / f"{mode:o}" / "inner"
        inner.mkdir(parents=True)
        (inner / "file").touch(mode=0o000)
        inner.chmod(mode)
        inner.parent.chmod(mode)
    (tmp_path / "tree").chmod(0o000)
    remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    (tmp_path / "kept").write_text("kept")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "directory").symlink_to(outside)
    (tree / "file").symlink_to(tmp_path / "kept")
    (tree / "loop").symlink_to(".")
    (tree / "nowhere").symlink_to("missing")
    remove_tree(tree)
    assert sorted(os.listdir(tmp_path)) == ["kept", "outside"]
    assert outside.stat().st_mode & 0o777 == 0o500
    (tmp_path / "link").symlink_to(outside)
    remove_tree(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["kept", "outside"]


def test_names_of_any_bytes_are_removed(tmp_path: Path) -> None:
    tree = os.fsencode(tmp_path / "tree")
    for name in (b"-rf", b"\xff\xfe", b"new\nline", b"...", b" ", b"n" * 255):
        os.makedirs(os.path.join(tree, name, name))
        os.mkfifo(os.path.join(tree, name, b"fifo"))
    remove_tree(tmp_path / "tree")
    assert os.listdir(tmp_path) == []


def test_a_file_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    remove_tree(tmp_path / "file")
    remove_tree(tmp_path / "file")
    remove_tree(tmp_path / "no" / "such")
    assert os.listdir(tmp_path) == []


def test_several_may_remove_one_tree_at_once(tmp_path: Path) -> None:
    for trial in range(5):
        tree = tmp_path / f"tree-{trial}"
        for number in range(200):
            (tree / str(number % 7) / str(number) / "deep").mkdir(parents=True)
            (tree / str(number % 7) / str(number) / "file").touch()
        failed: list[BaseException] = []

        def remove(tree: Path = tree, failed: list[BaseException] = failed) -> None:
            try:
                remove_tree(tree)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=remove) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert not tree.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove anything")
def test_what_cannot_be_removed_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "closed" / "tree").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o500)
    with pytest.raises(PermissionError, match="tree"):
        remove_tree(tmp_path / "closed" / "tree")
    remove_tree(tmp_path / "closed" / "tree", ignore_errors=True)
    (tmp_path / "closed").chmod(0o700)
