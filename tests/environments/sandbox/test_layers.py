"""Sandboxes over images of layers. The topmost layer that has a path decides what a sandbox sees."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.layers.blob import LayerFacts
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.rootfs.rootfs import Rootfs
from megaflow_hpc.environments.sandbox.rootfs.upperdir import restore
from megaflow_hpc.host.files import remove_tree
from tests.support.layers import OPAQUE, Entries, add_image, add_layer, unpacked
from tests.support.sandboxes import Start

CHAIN: list[Entries] = [
    {"app/": "", "app/one": "1\n", "app/gone": "x\n", "new/": "", "new/below": "x\n", "etc/hidden": "x\n"},
    {"app/": "", "app/gone": None, "app/two": "2\n", "new/": OPAQUE, "new/above": "y\n", "usr/share/git-core": None},
    {"etc/": "", "etc/hidden": None, "link": "->app/two", "app/one": "one\n", "srv": None},
]
LOOK = "cat /app/one /link; ls /app /new; ls -d /etc/hidden /usr/share/git-core /srv 2>&1 | grep -c 'No such'"
SEEN = "one\n2\n/app:\none\ntwo\n\n/new:\nabove\n3\n"


@pytest.mark.parametrize("count", [0, 147])
async def test_a_sandbox_sees_what_the_topmost_layers_say(
    start: Start, rootfs: str, tmp_path: Path, count: int
) -> None:
    more: list[Entries] = [{f"more/{number}": "", f"app/{number}/deep/": ""} for number in range(count)]
    layers = unpacked([CHAIN[0], *more, *CHAIN[1:]], tmp_path / "layers")
    sandbox = await start(rootfs=Rootfs(rootfs, lambda: None, layers=layers))
    seen = await sandbox.exec(LOOK if not count else "cat /app/one /link; ls /new; ls /more | wc -l")
    assert seen.stdout == (SEEN if not count else f"one\n2\nabove\n{count}\n"), seen.stderr
    changed = await sandbox.exec("rm -rf /app && mkdir /app && ls -A /app && rm /link && test ! -e /link")
    assert (changed.exit_code, changed.stdout) == (0, ""), changed.stderr
    await start.close()
    remove_tree(tmp_path / "layers")


SETTINGS = 'export GREETING="hello"\nexport PATH="/app/bin:$PATH"\n'


@pytest.fixture(scope="module")
def store() -> Iterator[ImageStore]:
    """In memory, to write hundreds of layers fast."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield ImageStore(Path(place, "store"))


@pytest.mark.parametrize(("base", "way"), [("sif", "overlay"), ("directory", "overlay"), ("directory", "copy")])
async def test_an_image_of_layers_is_the_same_whichever_way_a_node_takes_it(
    base_sif: Path,
    slim_rootfs: str,
    start: Start,
    store: ImageStore,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    base: str,
) -> None:
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay" if way == "copy" else "")
    sandbox = await start(add_image(store, str(base_sif) if base == "sif" else slim_rootfs, CHAIN, SETTINGS))
    seen = await sandbox.exec(f'{LOOK}; echo "$GREETING" "${{PATH%%:*}}"')
    assert seen.stdout == SEEN + "hello /app/bin\n"
    deleted = await sandbox.exec("rm -rf /app /link && mkdir /app && touch /new/more && ls -A /app /new")
    assert (deleted.exit_code, deleted.stdout) == (0, "/app:\n\n/new:\nabove\nmore\n"), deleted.stderr


async def test_an_image_without_a_base_starts(busybox_rootfs: str, start: Start, store: ImageStore) -> None:
    """The lowest layer has a shell, as images of registries do, and no file of the runtime."""
    programs: Entries = {"bin/": "", "bin/busybox": Path(busybox_rootfs, "bin/busybox").read_bytes()}
    programs |= {f"bin/{name}": "->busybox" for name in ("sh", "cat", "ls", "head", "rm", "mkdir", "kill")}
    sandbox = await start(add_image(store, None, [programs, {"app/": "", "app/one": "1\n"}]))
    seen = (await sandbox.exec("cat /app/one; ls /app /bin")).stdout
    assert seen == "1\n/app:\none\n\n/bin:\nbusybox\ncat\nhead\nkill\nls\nmkdir\nrm\nsh\n"


@pytest.fixture(scope="module")
def chain(store: ImageStore) -> list[LayerFacts]:
    return [add_layer(store, {"chain/": "", f"chain/{number}": f"{number}"}) for number in range(600)]


@pytest.mark.parametrize("count", [1, 10, 60, 150, 600])
async def test_a_chain_of_any_length_can_be_used(
    rootfs: str, start: Start, store: ImageStore, chain: list[LayerFacts], count: int
) -> None:
    sandbox = await start(add_image(store, rootfs, chain[:count]))
    assert (await sandbox.exec(f"ls /chain | wc -l; cat /chain/{count - 1}")).stdout == f"{count}\n{count - 1}"


CHEAT = """
for tool in gawk sort grep; do rm -f /usr/bin/$tool; printf '#!/bin/sh\\necho false\\n' >/usr/bin/$tool; done
rm -rf /usr/local/sbin; mkdir -p /usr/local/sbin /usr/sbin; chmod +x /usr/bin/gawk /usr/bin/sort /usr/bin/grep
cp /usr/bin/gawk /usr/local/sbin/cat; rm /usr/bin/tee; chmod 0 /usr/local
"""


@pytest.mark.parametrize("count", [1, 60, 400])
def test_the_names_of_a_chain_fit_into_a_page(tmp_path: Path, count: int) -> None:
    lowers = [str(tmp_path / "images" / f"{number:040}-layer" / "rootfs") for number in range(count)]
    for lower in lowers:
        Path(lower).mkdir(parents=True)
    made = overlay.arguments(lowers, str(tmp_path / "layer"), str(tmp_path / "merged"))
    named = made.options.partition(",")[0].removeprefix("lowerdir=").split(":")
    assert [str(Path(made.directory, name).resolve()) for name in named] == lowers
    assert len(made.options) < 4000


@pytest.mark.parametrize("way", ["overlay", "copy"])
async def test_programs_of_every_layer_are_the_images_again_after_a_hostile_agent(
    slim_rootfs: str, start: Start, store: ImageStore, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """One layer has gawk, another over it grep, and the base tee and sort; no layer has a cat in that directory."""
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay" if way == "copy" else "")
    gawk, grep = "#!/bin/sh\necho gawk of a layer\n", "#!/bin/sh\necho grep of a layer\n"
    layers: list[Entries] = [
        {"usr/bin/": "", "usr/bin/gawk": gawk, "usr/bin/grep": "#!/bin/sh\necho below\n"},
        {"usr/bin/": "", "usr/bin/grep": grep, "usr/bin/xargs": None},
    ]
    sandbox = await start(add_image(store, slim_rootfs, layers))
    cheated = await sandbox.exec(CHEAT)
    assert (cheated.exit_code, cheated.stderr) == (0, "")
    assert (await sandbox.exec("gawk; grep")).stdout == "false\nfalse\n"
    await sandbox.restart(change=lambda paths: restore(paths.upper, paths.image, []))
    programs = "gawk; grep; echo b | sort | tee /dev/null; cat /dev/null; command -v xargs"
    assert (await sandbox.exec(programs)).stdout == "gawk of a layer\ngrep of a layer\nb\n"


async def test_a_snapshot_and_a_reset_sandbox_have_the_layers(
    rootfs: str, start: Start, store: ImageStore, tmp_path: Path
) -> None:
    image = add_image(store, rootfs, CHAIN, SETTINGS)
    first = await start(image)
    await first.exec("rm /app/one; echo mine > /app/mine")
    kept = await first.snapshot(tmp_path / "kept")
    await first.reset()
    assert (await first.exec(LOOK)).stdout == SEEN
    second = await start(image, kept=kept)
    assert (await second.exec("ls /app; cat /link")).stdout == "mine\ntwo\n2\n"
    await second.end_processes()
    assert await second.read("/app/mine") == b"mine\n"
    assert await second.read("/app/one") is None
    assert await second.read("/app/two") == b"2\n"
