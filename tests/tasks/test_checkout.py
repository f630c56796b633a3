"""The patch of a rollout: the agent's changes in a checkout, whatever it did to git itself."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.harbor.format import step_name, steps_of
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.steps import prepare, verify
from megaflow_hpc.types import Verdict
from tests.support.harbor_tasks import write_task

FILES = {
    "a.txt": "one\ntwo\n",
    "b.txt": "b\n",
    "c/d.txt": "d\n",
    ".gitignore": "*.tmp\n",
    ".gitattributes": "*.txt text\n",
}
EDIT = (
    "cd /repo; echo three >> a.txt; rm b.txt; echo n > c/new.txt; echo t > x.tmp; echo h > hidden; chmod +x c/d.txt; "
)
WANTED = {"a.txt": "one\ntwo\nthree\n", "c/d.txt": "d\n", "c/new.txt": "n\n"}
COMMIT = "git add -A; git -c user.name=a -c user.email=a@b commit -qm done; "
DRIVERS = """
printf '#!/bin/sh\\ntouch /ran\\necho false\\n' > /evil; chmod 755 /evil; mkdir -p /hooks
for hook in pre-commit post-index-change post-checkout reference-transaction; do cp /evil /hooks/$hook; done
for scope in --local --global; do
  git config $scope filter.evil.clean /evil; git config $scope filter.evil.required true
  git config $scope diff.evil.textconv /evil; git config $scope diff.evil.command /evil
  git config $scope diff.external /evil; git config $scope core.fsmonitor /evil; git config $scope core.hooksPath /hooks
  git config $scope core.worktree /tmp; git config $scope core.pager /evil; git config $scope diff.noprefix true
  git config $scope color.ui always; git config $scope core.excludesFile /all
done
echo '*' | tee /all .git/info/exclude; printf '* filter=evil diff=evil\\n' | tee .git/info/attributes >> .gitattributes
"""

AGENTS = {
    "nothing more": "",
    "a commit, and more after it": COMMIT + "echo four >> a.txt; git stash -q; git stash pop -q; sed -i /four/d a.txt",
    "a branch without the history": "git checkout -q --orphan mine; " + COMMIT + "git branch -qD main; "
    "git reflog expire --expire=now --all; git gc -q --prune=now",
    "a checkout of what was before": COMMIT + "git checkout -q HEAD~1; git checkout -q main -- .; rm b.txt",
    "an index that is none": "echo broken > .git/index; rm .git/HEAD",
    "a repository that is gone": "rm -rf .git",
    "another repository in its place": "rm -rf .git; git init -q; " + COMMIT,
    "objects that are gone": "rm -rf .git/objects; mkdir .git/objects",
    "hooks, filters and drivers": DRIVERS,
    "a repository without commits inside": "mkdir sub; cd sub; git init -q; echo s > s",
}


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout with one commit on ``main`` and one untracked file."""
    root = tmp_path_factory.mktemp("checkout") / "repo"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(root)]
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run([*git, *words], check=True)
    (root / ".git" / "info" / "exclude").write_text("# what only this checkout knows\nhidden\n")
    return root


@pytest.fixture(scope="module")
def image(rootfs: str, scratch: Path, repo: Path) -> str:
    """Return the base image with the checkout in it."""
    place = scratch / "with-checkout"
    subprocess.run(["cp", "-al", rootfs, str(place)], check=True)
    subprocess.run(["cp", "-a", str(repo), str(place / "repo")], check=True)
    return str(place)


def work(image: str, scratch: Path, use: Callable[[ApptainerSandbox], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(SandboxSpec(image, workdir="/repo")) as sandbox:
                return await use(sandbox)

    return asyncio.run(main())


def applied(repo: Path, patch: bytes, place: Path) -> dict[str, str]:
    """Return the files of a clean checkout after applying the patch, without git's own."""
    subprocess.run(["git", "clone", "-q", str(repo), str(place)], check=True)
    subprocess.run(["git", "apply", "--binary", "-"], cwd=place, input=patch, check=True)
    files = (path for path in place.rglob("*") if path.is_file() and ".git" not in str(path.relative_to(place)))
    return {str(path.relative_to(place)): path.read_text() for path in files}


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS.keys())
def test_a_patch_makes_of_a_clean_checkout_what_the_agent_left(
    image: str, scratch: Path, repo: Path, tmp_path: Path, agent: str
) -> None:
    async def use(sandbox: ApptainerSandbox) -> checkout.Patch | None:
        assert await checkout.remember(sandbox, "/repo")
        await sandbox.exec(EDIT + agent, timeout_s=120)
        await sandbox.kill_processes()
        look = "find .git -type f | sort | xargs -r sha256sum; ls -A . /; cat /ran"
        before = (await sandbox.exec(look)).stdout
        patch = await checkout.difference(sandbox, "/repo")
        assert (await sandbox.exec(look)).stdout == before  # as the agent left it, and no driver ran
        if agent == DRIVERS:  # they do run if git is called with the agent's configuration
            assert (await sandbox.exec("unset GIT_DIR; git --work-tree=/repo add -A; cat /ran")).exit_code == 0
        return patch

    patch = work(image, scratch, use)
    assert patch is not None
    assert patch.error == "" or "sub" in agent, patch
    assert applied(repo, patch.data, tmp_path / "clean") == WANTED
    assert (tmp_path / "clean" / "c/d.txt").stat().st_mode & 0o111


LATIN = "# -*- coding: latin-1 -*-\nNAME = 'café'\n".encode("latin-1")
UNUSUAL = """cd /repo
printf '%s' 'no newline at the end' > a.txt
printf 'one\\r\\ntwo\\rthree\\r\\n' > crlf.py
printf 'caf\\351\\n' >> latin.py
printf 'new \\377\\376\\n' > 'new file.py'
printf 'nul\\000byte\\n' > forced.text
printf '\\357\\277\\275 grüße\\n' > utf.py
git mv moved.py renamed.py; printf 'more \\344\\n' >> renamed.py
rm gone.py
printf 'x\\n' > "$(printf 'b\\303 "q\\t*.py')"
printf 'y\\351\\n' > "$(printf 'c\\303 "q\\t[*]?.py')"
printf 'y\\351\\n' > ':!odd'
ln -s nowhere/ü link; ln -s "$(printf 'caf\\351')" odd-link; ln -sf a.txt pointer
chmod +x c/d.txt
"""
HANDED = "printf 'caf\\351 1\\n' | tee latin.py moved.py gone.py; seq 50 >> moved.py; ln -s b.txt pointer; "
HANDED += "printf '*.text diff\\n*.py text=auto\\n' > .gitattributes; "


def files_below(place: Path) -> dict[bytes, tuple[bytes, int]]:
    """Return path → content or target, and mode, of all files except git's own."""
    found = {}
    for folder, folders, names in os.walk(os.fsencode(place)):
        folders[:] = [name for name in folders if name != b".git"]
        for name in names:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            link = stat.S_ISLNK(mode)
            content = os.readlink(path) if link else Path(os.fsdecode(path)).read_bytes()
            found[os.path.relpath(path, os.fsencode(place))] = content, 0 if link else mode & 0o111
    return found


def test_a_patch_is_utf8_and_gives_every_byte_whatever_is_in_the_files(
    image: str, scratch: Path, tmp_path: Path
) -> None:
    async def use(sandbox: ApptainerSandbox) -> tuple[checkout.Patch | None, bytes, bytes]:
        assert (await sandbox.exec(f"cd /repo; {HANDED} {COMMIT}")).exit_code == 0
        before = (await sandbox.exec("cd /repo; tar c .")).stdout_bytes
        assert await checkout.remember(sandbox, "/repo")
        assert (await sandbox.exec(UNUSUAL)).exit_code == 0
        patch = await checkout.difference(sandbox, "/repo")
        return patch, before, (await sandbox.exec("cd /repo; tar c .")).stdout_bytes

    patch, before, after = work(image, scratch, use)
    assert patch is not None
    assert patch.error == ""
    told = json.loads(json.dumps({"model_patch": patch.data.decode()}))["model_patch"]
    (tmp_path / "p.diff").write_text(told, encoding="utf-8", newline="")
    for name, archive in (("clean", before), ("left", after)):
        (tmp_path / name).mkdir()
        subprocess.run(["tar", "x", "-C", tmp_path / name], input=archive, check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", tmp_path / "p.diff"], cwd=tmp_path / "clean", check=True)
    wanted = files_below(tmp_path / "left")
    assert files_below(tmp_path / "clean") == wanted
    assert len(wanted) > 12


def test_the_files_of_a_repository_within_the_checkout_are_not_in_the_patch_and_it_says_so(
    image: str, scratch: Path
) -> None:
    async def use(sandbox: ApptainerSandbox) -> checkout.Patch | None:
        assert await checkout.remember(sandbox, "/repo")
        await sandbox.exec(f"mkdir sub; cd sub; git init -q; echo s > s; {COMMIT}")
        return await checkout.difference(sandbox, "/repo")

    patch = work(image, scratch, use)
    assert patch.error == "'sub': a separate repository; the patch names its commit and contains none of its files"
    assert b"+Subproject commit" in patch.data


def test_a_patch_makes_the_agents_sandbox_again_of_a_fresh_one(image: str, scratch: Path) -> None:
    async def use(sandbox: ApptainerSandbox) -> None:
        await checkout.remember(sandbox, "/repo")
        await sandbox.exec(EDIT, timeout_s=120)
        patch = await checkout.difference(sandbox, "/repo")
        assert patch is not None
        await sandbox.reset()
        await checkout.remember(sandbox, "/repo/c")
        assert await checkout.apply(sandbox, patch.data) == ""
        assert await checkout.difference(sandbox, "/repo") == patch
        assert "error: " in await checkout.apply(sandbox, patch.data), "there is no applying it twice"
        await checkout.remember(sandbox, "/tmp")
        assert await checkout.apply(sandbox, patch.data) == "the sandbox has no checkout"

    work(image, scratch, use)


def test_what_cannot_be_said_is_an_error_and_half_a_patch_is_none(
    image: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "MAX_PATCH_BYTES", 1 << 20)

    async def use(sandbox: ApptainerSandbox) -> list[checkout.Patch | None]:
        assert await checkout.remember(sandbox, "/repo")
        await sandbox.exec("head -c 2000000 /dev/urandom > large")
        found = [await checkout.difference(sandbox, "/repo")]
        await sandbox.exec("cd /; rm -rf /repo; git init -q /repo")
        found.append(await checkout.difference(sandbox, "/repo"))
        assert await checkout.remember(sandbox, "/tmp") is None
        return [*found, await checkout.difference(sandbox, "/tmp")]

    large, gone, none = work(image, scratch, use)
    assert (large.data, large.error) == (b"", "the patch of /repo is larger than 1 MiB")
    assert gone.data == b""
    assert "is missing" in gone.error
    assert none is None


STEPS = """\
[environment]
docker_image = "base"
workdir = "/repo"
[[steps]]
name = "first"
[[steps]]
name = "second"
"""


def test_every_step_of_a_task_keeps_the_patch_up_to_it(image: str, scratch: Path, tmp_path: Path) -> None:
    path = write_task(tmp_path, toml=STEPS)
    for name in ("first", "second"):
        (path / "steps" / name / "tests").mkdir(parents=True)
        (path / "steps" / name / "instruction.md").write_text("Write.")
        (path / "steps" / name / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    task = read_harbor_task(path)

    async def use(sandbox: ApptainerSandbox) -> list[Verdict]:
        await prepare(task, sandbox)
        verdicts = []
        for step in steps_of(task):
            await sandbox.exec(f"echo {step_name(step)} > {step_name(step)}; {COMMIT}")
            verdicts.append(await verify(step, sandbox, stay=True))
        return verdicts

    kept = [artifact for verdict in work(image, scratch, use) for artifact in verdict.artifacts]
    patches = {artifact.name: artifact.data for artifact in kept if artifact.name.endswith("patch")}
    assert list(patches) == ["steps/first/patch", "steps/second/patch"]
    assert b"+second" not in patches["steps/first/patch"]
    assert b"+first\n" in patches["steps/second/patch"]
    assert b"+second\n" in patches["steps/second/patch"]
