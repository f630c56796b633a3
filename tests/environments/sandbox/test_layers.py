"""Sandboxes over images of layers: what is seen is the topmost layer's word, whatever is below."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.sandbox.rootfs.access import Access
from megaflow_hpc.host.files import remove_tree
from tests.support.layers import OPAQUE, Entries, unpacked

CHAIN: list[Entries] = [
    {"app/": "", "app/one": "1\n", "app/gone": "x\n", "new/": "", "new/below": "x\n", "etc/hidden": "x\n"},
    {"app/": "", "app/gone": None, "app/two": "2\n", "new/": OPAQUE, "new/above": "y\n", "usr/share/git-core": None},
    {"etc/": "", "etc/hidden": None, "link": "->app/two", "app/one": "one\n", "srv": None},
]
LOOK = "cat /app/one /link; ls /app /new; ls -d /etc/hidden /usr/share/git-core /srv 2>&1 | grep -c 'No such'"
SEEN = "one\n2\n/app:\none\ntwo\n\n/new:\nabove\n3\n"


@pytest.mark.parametrize("count", [0, 147])
def test_a_sandbox_sees_what_the_topmost_layers_say(rootfs: str, scratch: Path, tmp_path: Path, count: int) -> None:
    more: list[Entries] = [{f"more/{number}": "", f"app/{number}/deep/": ""} for number in range(count)]
    layers = unpacked([CHAIN[0], *more, *CHAIN[1:]], tmp_path / "layers")

    async def main() -> None:
        async with ApptainerProvider(scratch) as provider:
            access = Access("tree", rootfs, lambda: None, layers=layers)
            async with await provider.start(SandboxSpec(rootfs), access=access) as sandbox:
                seen = await sandbox.exec(LOOK if not count else "cat /app/one /link; ls /new; ls /more | wc -l")
                assert seen.stdout == (SEEN if not count else f"one\n2\nabove\n{count}\n"), seen.stderr
                changed = await sandbox.exec("rm -rf /app && mkdir /app && ls -A /app && rm /link && test ! -e /link")
                assert (changed.exit_code, changed.stdout) == (0, ""), changed.stderr

    asyncio.run(main())
    remove_tree(tmp_path / "layers")
