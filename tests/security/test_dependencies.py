"""What is installed is what was tried: bounds in pyproject.toml, and one list of versions and hashes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megaflow_hpc.agents.command import PACKAGES
from tests.support.places import LAUNCHERS, ROOT

LIST = LAUNCHERS / "requirements.txt"
BY_CALENDAR = {"cryptography", "pillow", "pyarrow"}
"""Their major versions follow the calendar, and security fixes come with the newest alone (docs/dependencies.md)."""


def declared() -> dict[str, list[Requirement]]:
    """Requirements by extra; those of all under the empty name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [Requirement(line) for line in lines] for extra, lines in groups.items()}


def listed() -> list[tuple[Requirement, list[str]]]:
    """Requirements of the list with their hashes."""
    lines = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", LIST.read_text(), flags=re.MULTILINE)).splitlines()
    parts = [line.split(" --hash=") for line in lines if line.strip()]
    return [(Requirement(first.strip()), [word.strip() for word in hashes]) for first, *hashes in parts]


def test_every_dependency_is_bounded_below_and_above() -> None:
    loose = [
        str(requirement)
        for lines in declared().values()
        for requirement in lines
        if requirement.name != "megaflow-hpc" and not {">=", "<"} <= {bound.operator for bound in requirement.specifier}
    ]
    assert {re.split(r"[>;]", text)[0] for text in loose} == BY_CALENDAR


def test_the_list_names_one_version_of_everything_with_its_hashes() -> None:
    found = listed()
    assert len(found) > 80
    for requirement, hashes in found:
        assert [bound.operator for bound in requirement.specifier] == ["=="], requirement
        assert hashes, requirement
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", text) for text in hashes), requirement


def test_the_list_has_all_that_is_declared_within_its_bounds() -> None:
    versions: dict[str, list[str]] = {}
    for requirement, _ in listed():
        versions.setdefault(canonicalize_name(requirement.name), []).extend(b.version for b in requirement.specifier)
    wanted = declared()
    for requirement in [*wanted[""], *wanted["run"], *wanted["mpi"], *wanted["test"]]:
        if requirement.name == "megaflow-hpc":  # an extra that has another in it
            continue
        have = versions.get(canonicalize_name(requirement.name), [])
        assert have, f"{requirement.name} is declared and not listed: run launchers/lock"
        assert all(version in requirement.specifier for version in have), f"{requirement}: {have}; run launchers/lock"


def test_a_file_of_another_content_is_not_installed(tmp_path: Path) -> None:
    """As an index that was broken into would give it."""
    requirement, hashes = next(found for found in listed() if found[0].name == "iniconfig")
    (version,) = (bound.version for bound in requirement.specifier)
    wheel = tmp_path / f"iniconfig-{version}-py3-none-any.whl"
    about = f"iniconfig-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("iniconfig.py", "raise SystemExit('run')")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: iniconfig\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    (tmp_path / "list.txt").write_text(f"{requirement} " + " ".join(f"--hash={text}" for text in hashes))
    words = [
        "--no-index",
        "--find-links",
        str(tmp_path),
        "--no-deps",
        "--require-hashes",
        "--target",
        str(tmp_path / "t"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", "install", *words, "-r", str(tmp_path / "list.txt")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "t").exists()


def lib(text: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs shell text with the functions of the launchers."""
    whole = f'source "{LAUNCHERS}/lib.sh"; {text}'
    return subprocess.run(["bash", "-c", whole, "lib", *map(str, words)], capture_output=True, text=True, check=False)


def test_root_installs_only_packages_that_its_own_list_names(tmp_path: Path) -> None:
    """An ordinary account says what is missing, and can say anything: a path, an option, another package."""
    package = tmp_path / "evil"
    (package / "DEBIAN").mkdir(parents=True, mode=0o755)
    (package / "DEBIAN" / "control").write_text(
        "Package: evil\nVersion: 1\nArchitecture: all\nMaintainer: x\nDescription: x\n"
    )
    evil = tmp_path / "evil.deb"
    subprocess.run(["dpkg-deb", "-b", package, evil], check=True, capture_output=True)
    asked = [evil, "./evil.deb", "-oDPkg::Pre-Invoke::=id", "git=1", "git/sid", "git-", "gi.", "bash", "openssh-server"]
    # In the place of "env" or "sudo -n", echo prints what root would run.
    for names in (asked, [*asked, "git", "uidmap"]):
        done = lib('LOGS=$1; install_packages echo "$2"', tmp_path, "\n".join(map(str, names)))
        assert done.returncode == 0, done.stderr
        assert "not installed" in done.stderr
    ran = (tmp_path / "apt-get.log").read_text().split()
    assert ran[ran.index("--") + 1 :] == ["git", "uidmap"]


def test_the_list_has_everything_that_a_machine_could_lack(tmp_path: Path) -> None:
    lacking = lib("MEGAFLOW_SITE=0 MACHINE_PATH=/nowhere PREFIX=/nowhere; have() { false; }; missing_packages root")
    assert lacking.returncode == 0, lacking.stderr
    assert "slurmctld" in lacking.stdout
    assert set(lacking.stdout.split()) <= set(lib("listed_packages").stdout.split())


@pytest.mark.parametrize("name", PACKAGES)
def test_the_programs_of_agents_are_locked_with_hashes_for_any_registry(name: str) -> None:
    folder = LAUNCHERS / "agents" / name
    package, _, version = PACKAGES[name].rpartition("@")
    assert json.loads((folder / "package.json").read_text()) == {"dependencies": {package: version}}
    locked = json.loads((folder / "package-lock.json").read_text())["packages"]
    assert locked.pop("")["dependencies"] == {package: version}
    assert locked[f"node_modules/{package}"]["version"] == version
    assert all(re.match(r"sha512-[A-Za-z0-9+/]{86}==$", found["integrity"]) for found in locked.values())
    assert not any("resolved" in found for found in locked.values())


def test_no_script_of_a_package_is_run_when_agents_are_installed() -> None:
    text = (LAUNCHERS / "agents.sh").read_text()
    calls = re.findall(r"npm-cli\.js.*?(?=\n\S|\n  rm)", text, re.DOTALL)
    assert len(calls) == 1
    assert "--ignore-scripts" in calls[0]
    assert re.findall(r'^ +npm "\$name" (\w+)', text, re.MULTILINE) == ["install", "ci"]  # of them the first only locks
    assert "--package-lock-only" in text
