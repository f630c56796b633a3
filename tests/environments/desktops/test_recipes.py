"""The three recipes of the image of desktops, and those of the base image, give the same content."""

from __future__ import annotations

import re

import pytest

from tests.support.places import ROOT

BASE, DESKTOP = (ROOT / "launchers" / f"{name}-image.sh" for name in ("base", "desktop"))
RECIPES = ("desktop.def", "desktop.Dockerfile", "task-base.def")


def packages(script: str) -> list[str]:
    """Return the packages of a launcher's list, or those that ``apt-get install`` names."""
    found = re.search(r"^PACKAGES=\((.+)\)$", script, re.M)
    found = found or re.search(r"apt-get install --yes --no-install-recommends((?:[ \\]+\n? *[a-z][\w.-]*)+)", script)
    assert found
    return found[1].replace("\\", "").split()


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_recipe_installs_the_packages_of_the_launchers(recipe: str) -> None:
    expected = packages(BASE.read_text()) + packages(DESKTOP.read_text()) * recipe.startswith("desktop")
    assert packages((ROOT / "containers" / recipe).read_text()) == expected


def test_the_recipes_of_desktops_copy_the_same_files_and_pages() -> None:
    recipes = [DESKTOP.read_text(), *((ROOT / "containers" / name).read_text() for name in RECIPES[:2])]
    for pattern, count in ((r"miniwob==([\d.]+)", 1), (r"([\w.-]+\.(?:py|json)) (/(?:usr|etc)/\S+)", 3)):
        copied = [set(re.findall(pattern, recipe)) for recipe in recipes]
        assert copied == [copied[0]] * 3
        assert len(copied[0]) == count
    (version,) = re.findall(r"^PAGES=miniwob==(.+)$", recipes[0], re.M)
    assert all(f"echo {version} >/opt/miniwob/VERSION" in recipe for recipe in recipes[1:])
    assert all("LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1" in recipe for recipe in recipes)
