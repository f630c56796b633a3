"""Hostile Dockerfiles of tasks: they act only inside a sandbox, or are refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.cli import main
from megaflow_hpc.cli.making.images import images_of_campaign
from megaflow_hpc.environments.builds.builder import Builder
from megaflow_hpc.environments.images.dockerfile import context as archives
from megaflow_hpc.environments.images.dockerfile.context import Context, lay_out
from megaflow_hpc.environments.images.resolve import Images
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.environments.sandbox.scratch import sweep
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity
from megaflow_hpc.tasks.releases.bugs import BugFile
from megaflow_hpc.tasks.releases.image import build_image
from tests.support.builds import build, layers_of, unpacked
from tests.support.namespaces import no_subordinate_ids
from tests.support.waiting import until

Built = Callable[..., Path]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A private directory of the planning user, with a file."""
    place = tmp_path / "home"
    place.mkdir(mode=0o700)
    (place / "key").write_text("the user's own\n")
    (place / "key").chmod(0o600)
    return place


@pytest.fixture(params=["overlay"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sandboxes write to an overlay over the image, or to a copy of it."""
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay" if request.param == "copy" else "")
    return str(request.param)


both_layers = pytest.mark.parametrize("layer", ["overlay", "copy"], indirect=True)


@pytest.fixture
def built(layer: str, busybox_rootfs: str, tmp_path: Path) -> Built:
    """Builds a Dockerfile on busybox and unpacks the image."""

    def make(text: str, **options: object) -> Path:
        image = build(tmp_path / "context", text, {"base": busybox_rootfs}, **options)  # type: ignore[arg-type]
        return unpacked(image, tmp_path / "tree")

    return make


def megaflow(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "megaflow_hpc", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def make_task(task: Path, toml: str) -> None:
    (task / "tests").mkdir(parents=True)
    (task / "tests" / "test.sh").write_text("#!/bin/sh\n")
    (task / "instruction.md").write_text("hi\n")
    (task / "task.toml").write_text(toml)


def untouched(home: Path) -> bool:
    return os.listdir(home) == ["key"] and (home / "key").read_text() == "the user's own\n"


# --- what a RUN can reach ---------------------------------------------------------------------------------------------


def test_a_run_step_reaches_nothing_of_the_host(built: Built, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no root but its own, no process or variable of its user, no network, and root's rights in a sandbox."""
    monkeypatch.setenv("API_KEY", "secret-of-the-user")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tree = built(
            "FROM base\n"
            "RUN for p in /proc/[0-9]*; do "
            f"cat $p/root{home}/key && echo x >> $p/root{home}/planted; done > /loot 2>&1; "
            "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n' > /seen; ls -d /proc/[0-9]* > /pids; "
            f"cat /proc/net/dev > /devices; nc -w 1 127.0.0.1 {port} </dev/null && echo open > /open; "
            "grep ^Cap /proc/self/status > /caps; mount -t tmpfs none /opt; echo $? > /mounted\n"
        )
    assert "the user's own" not in (tree / "loot").read_text()
    assert untouched(home)
    seen = (tree / "seen").read_text()
    assert "secret-of-the-user" not in seen
    assert Path("/proc/self/cmdline").read_text().replace("\0", "\n") not in seen
    assert len((tree / "pids").read_text().split()) < 10
    devices = [line.split(":")[0].strip() for line in (tree / "devices").read_text().splitlines()[2:]]
    assert devices == ["lo"]
    assert not (tree / "open").exists()
    held = {line.split()[0]: int(line.split()[1], 16) for line in (tree / "caps").read_text().splitlines()}
    sys_admin, sys_ptrace, net_admin, mknod = 1 << 21, 1 << 19, 1 << 12, 1 << 27
    for kind in ("CapEff:", "CapPrm:", "CapBnd:"):
        assert held[kind] & (sys_admin | sys_ptrace | net_admin | mknod) == 0, kind
    assert (tree / "mounted").read_text() != "0\n"


# --- text that would matter in a definition file ----------------------------------------------------------------------


def test_sections_in_a_dockerfiles_text_and_values_are_text(built: Built, home: Path) -> None:
    section = f"%setup\n touch {home}/planted\n%post\n touch {home}/planted\n"
    tree = built(
        "ARG A\nFROM base\nARG A\n"
        f"COPY <<EOF /text\n{section}EOF\n"
        f"RUN <<EOF\necho\n{section.replace('%', ': %')}true\nEOF\n"
        "LABEL l=$A\nENV B=$A\nWORKDIR /$A\n"
        'RUN printf %s "$B" > /value\n',
        args={"A": f"x\n{section}"},
    )
    assert (tree / "text").read_text() == section
    assert (tree / "value").read_text() == f"x\n{section}"
    assert untouched(home)


SECTIONS = [
    'RUN ["/bin/sh", "-c", "echo\\n%pre\\ntouch {home}/planted\\n%post\\ntrue"]',
    'RUN echo "a\\\n%setup\\\n  touch {home}/planted"',
    'SHELL ["/bin/sh", "-c", "x\\n%setup\\ntouch {home}/planted\\n"]\nRUN true',
    "USER $A\nRUN true",
    "FROM $A\nRUN true",
    "COPY <<E /$A\n$A\nE\nRUN true",
]


def test_sections_in_other_instructions_touch_nothing_whether_refused_or_built(built: Built, home: Path) -> None:
    section = f"x\n%setup\n touch {home}/planted\n%post\n touch {home}/planted\n"
    for lines in SECTIONS:
        with contextlib.suppress(MegaflowError):
            built(f"ARG A\nFROM base\nARG A\n{lines.replace('{home}', str(home))}\n", args={"A": section})
        remove_tree(home.parent / "tree")
        assert untouched(home), lines


# --- names of images --------------------------------------------------------------------------------------------------


NAMES = ["{home}", "{home}/", "/", "../home", "./../home", "file://{home}", "~", "$HOME", "..", "localimage"]


def test_an_image_is_a_name_and_no_path(built: Built, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    for name in NAMES:
        named = name.replace("{home}", str(home))
        for text in (f"FROM base\nCOPY --from={named} key /loot/\n", f"FROM {named}\nRUN cat /key\n"):
            with pytest.raises(ConfigError, match=r"is not mapped|set neither by ARG nor by ENV"):
                built(text)


def test_what_a_pattern_stands_for_is_no_way_to_other_files(busybox_rootfs: str, tmp_path: Path, home: Path) -> None:
    for pattern, source in (("*", "*"), ("org/*", f"{tmp_path}/images/*"), ("a/*", "*/key")):
        for text in (f"{home}", "../home", "x/../../home", "~", "$HOME"):
            name = pattern.replace("*", text)
            with pytest.raises(ConfigError, match="leads elsewhere"):
                build(tmp_path / "context", f"FROM {name.replace('$', chr(92) + '$')}\nRUN true\n", {pattern: source})


@pytest.mark.parametrize("name", ["/", "{home}", "../home", "../../images/../home/key", "~", ""])
def test_an_image_that_a_task_names_is_a_name_and_no_path(
    tmp_path: Path, home: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = name.replace("{home}", str(home))
    for task in ("one", "two"):
        make_task(tmp_path / "tasks" / task, f"[environment]\ndocker_image = {json.dumps(named)}\n")
    campaign = tmp_path / "campaign.yaml"
    campaign.write_text("name: x\ntasks: tasks/*\nagent: oracle\nenvironment: {images: {base: base.sif, 'o/*': '*'}}\n")
    for words in (["images", "build", str(campaign)], ["tasks", "validate", str(tmp_path / "tasks")]):
        assert main(words) == 2
        assert re.search("is not mapped|leads elsewhere|a text that is not empty|no such", capsys.readouterr().err)


def test_what_is_built_after_a_campaign_does_not_get_its_network(busybox_rootfs: str, tmp_path: Path) -> None:
    make_task(tmp_path / "tasks" / "t1", '[environment]\ndocker_image = "base"\n')
    images, networks = Images(ImageStore(tmp_path / "store")), []
    for network in ("host", "none"):
        campaign = tmp_path / f"{network}.yaml"
        section = f"{{images: {{base: {busybox_rootfs}}}, build_network: {network}}}"
        campaign.write_text(f"name: x\ntasks: tasks/*\nagent: oracle\nenvironment: {section}\n")
        images_of_campaign(images, str(campaign), build=True)
        assert isinstance(images.builder, Builder)
        networks.append(images.builder.network)
    assert networks == ["host", "none"]


def test_a_campaign_whose_task_has_a_hostile_dockerfile_loses_nothing(
    busybox_rootfs: str, tmp_path: Path, home: Path
) -> None:
    task = tmp_path / "tasks" / "t1"
    make_task(task, 'version="1.0"\n[environment]\nbuild_timeout_sec = 1e11\n')
    (task / "environment").mkdir()
    (task / "environment" / "Dockerfile").write_text(
        f"FROM base\nRUN echo planted >> /proc/1/root{home}/planted; cat /proc/1/root{home}/key\n"
    )
    campaign = tmp_path / "campaign.yaml"
    images = f"environment: {{images: {{base: {busybox_rootfs}}}}}"
    campaign.write_text(f"name: x\ntasks: tasks/*\nagent: oracle\n{images}\n")
    done = megaflow("images", "build", str(campaign), "--store", str(tmp_path / "store"))
    assert done.returncode == 3, done.stderr
    assert "Dockerfile:2: exit status 1" in done.stderr
    assert "own" not in done.stdout + done.stderr
    assert untouched(home)


# --- paths of the context ---------------------------------------------------------------------------------------------


@pytest.fixture
def context(tmp_path: Path, home: Path) -> Path:
    """A context with links out of it, in every component."""
    place = tmp_path / "context"
    (place / "inside" / "deep").mkdir(parents=True)
    (place / "inside" / "deep" / "file").write_text("of the context\n")
    (place / "link").symlink_to(home)
    (place / "inside" / "up").symlink_to("../../home")
    (place / "key").symlink_to(home / "key")
    (place / "again").symlink_to("link/key")
    (place / "within").symlink_to("inside/deep")
    return place


SOURCES = ["link/key", "link/", "link", "inside/up/key", "key", "again", "within/../../up/key", "within/../up/key"]
MOUNT = "RUN --mount=type=bind,source={},target=/loot cat /loot"


@pytest.mark.parametrize("line", ["COPY {} /loot/", "ADD {} /loot/", MOUNT])
def test_no_link_leads_out_of_the_context(built: Built, context: Path, line: str) -> None:
    for source in SOURCES:
        with pytest.raises(ConfigError, match=r"(link out|outside) of the build context|no such file"):
            built(f"FROM base\n{line.format(source)}\n")


def test_no_text_of_a_dockerfile_names_a_file_of_the_host(built: Built, home: Path) -> None:
    """The name of a here-document is a file name, and may be quoted."""
    for name in ("../../../home/planted", "..", ".", f"{home}/planted", "a/b", ""):
        for word in (name, f'"{name}"'):
            with pytest.raises(ConfigError):
                built(f"FROM base\nCOPY <<{word} /x/\ntext\n{name}\n")
    assert untouched(home)
    assert not (home.parent / "x").exists()


def test_links_within_the_context_are_followed_and_no_wildcard_leads_through_one_out_of_it(
    built: Built, context: Path, home: Path
) -> None:
    """A pattern without a match is not an error, as in Docker."""
    outside = "COPY li*/key inside/up/k* /loot/\nADD li*/key /loot/\n"
    tree = built(f"FROM base\n{outside}COPY within/file /a\nCOPY within /b/\nCOPY inside /c/\n")
    for path in ("a", "b/file", "c/deep/file"):
        assert (tree / path).read_text() == "of the context\n"
    assert os.readlink(tree / "c/up") == "../../home"
    assert not list(tree.glob("loot/*"))
    assert untouched(home)


def test_no_ignore_file_is_read_through_a_link(built: Built, context: Path, home: Path) -> None:
    (home / "key").write_text("[the user's own\n")
    (context / ".dockerignore").symlink_to(home / "key")
    with pytest.raises(ConfigError, match="link out of the build context") as caught:
        built("FROM base\nCOPY inside /inside/\n")
    assert "the user's own" not in str(caught.value)


def test_a_link_that_changes_while_the_context_is_copied_leads_nowhere(built: Built, context: Path, home: Path) -> None:
    """A directory and a link out of the context alternate under one name as fast as possible."""
    (context / "honest").mkdir()
    (context / "honest" / "key").write_text("of the context\n")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(context / "honest", context / "turning")
            os.rename(context / "turning", context / "honest")
            os.rename(context / "honest", context / "kept")
            os.symlink(home, context / "honest")
            os.unlink(context / "honest")
            os.rename(context / "kept", context / "honest")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(150):
            target = context.parent / f"laid{number}"
            try:
                lay_out(Context(context), ["honest/key"], target)
            except (ConfigError, OSError):
                continue
            assert (target / "0" / "key").read_text() == "of the context\n"
    finally:
        stop.set()
        thread.join()


def test_a_context_is_copied_up_to_a_bound(built: Built, context: Path) -> None:
    (context / "huge").touch()
    os.truncate(context / "huge", 10**12)
    with pytest.raises(ConfigError, match=r"more than .* bytes"):
        built("FROM base\nCOPY huge /x\n")


def test_what_is_neither_file_nor_directory_is_not_waited_for(built: Built, context: Path) -> None:
    os.mkfifo(context / "fifo")
    (context / "zero").symlink_to("/dev/zero")
    for source in ("fifo", "zero"):
        with pytest.raises(ConfigError, match=r"neither a file nor a directory|link out of the build context"):
            built(f"FROM base\nCOPY {source} /x\n")


def archive(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    return found


def test_an_archive_writes_and_reads_nothing_beside_its_place(built: Built, context: Path, home: Path) -> None:
    archive(
        context / "a.tar.gz",
        [
            (entry("good"), b"good\n"),
            (entry("../../../../home/planted"), b"x"),
            (entry(f"{home}/planted"), b"x"),
            (entry("way", tarfile.SYMTYPE, str(home)), b""),
            (entry("way/planted"), b"x"),
            (entry("up", tarfile.SYMTYPE, "../../../../home"), b""),
            (entry("up/planted"), b"x"),
            (entry("hard", tarfile.LNKTYPE, f"{home}/key"), b""),
            (entry("hard2", tarfile.LNKTYPE, "way/key"), b""),
        ],
    )
    try:
        tree = built("FROM base\nADD a.tar.gz /unpacked/\n")
    except MegaflowError:
        tree = None
    assert untouched(home)
    if tree is not None:
        for name in ("hard", "hard2"):
            place = tree / "unpacked" / name
            assert place.is_symlink() or not place.exists() or "own" not in place.read_text()


def test_an_archive_that_swells_is_refused(built: Built, context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 20_000_000)
    archive(context / "bomb.tar.gz", [(entry("zeros"), bytes(30_000_000))])
    monkeypatch.setattr(archives, "MAX_ENTRIES", 1000)
    archive(context / "many.tar.gz", [(entry(f"f{n}"), b"") for n in range(2000)])
    for name, said in (("bomb", "bytes"), ("many", "entries")):
        with pytest.raises(ConfigError, match=f"more than .* {said}"):
            built(f"FROM base\nADD {name}.tar.gz /x/\n")


# --- what a step leaves to the next -----------------------------------------------------------------------------------


@both_layers
def test_links_that_a_step_plants_lead_no_later_step_to_the_host(built: Built, context: Path, home: Path) -> None:
    tree = built(
        "FROM base AS one\n"
        f"RUN mkdir -p /out && ln -s {home} /out/way && ln -s {home}/key /out/key && ln -s ../../../../..{home} /up\n"
        "FROM base\n"
        f"RUN mkdir -p {home} /dir && ln -s {home} /loot && ln -s {home}/planted /dir/file\n"
        "COPY inside/deep/file /loot/planted\n"
        "COPY inside /loot/\n"
        "COPY inside/deep/file /dir/file\n"
        "COPY --from=one /out /from/\n"
        "WORKDIR /loot/work\n"
        "RUN cat /loot/key /from/key /from/way/key > /read 2>&1; true\n"
    )
    assert untouched(home)
    assert "own" not in (tree / "read").read_text()


@both_layers
def test_nothing_of_the_host_is_copied_from_a_stage(built: Built, home: Path) -> None:
    tree = home.parent / "tree"
    above = (f"/../../../..{home}/key", f"/proc/1/root{home}/key")
    for source in ("/out/way/key", "/out/key", "/up/key", "/out/way", *above):
        with contextlib.suppress(MegaflowError):
            built(
                "FROM base AS one\n"
                f"RUN mkdir -p /out && ln -s {home} /out/way && ln -s {home}/key /out/key && ln -s ../../..{home} /up\n"
                f"FROM base\nCOPY --from=one {source} /loot/\n"
            )
        found = [path.read_text() for path in (tree / "loot").rglob("*") if path.is_file() and not path.is_symlink()]
        assert not any("own" in text for text in found), source
        remove_tree(tree)


@both_layers
def test_a_step_that_replaces_the_images_own_settings_writes_nothing_on_the_host(built: Built, home: Path) -> None:
    for attack in (
        f"ln -s {home} /.singularity.d",
        f"mkdir /.singularity.d; ln -s {home} /.singularity.d/env",
        f"mkdir -p /.singularity.d/env; ln -s {home}/planted /.singularity.d/env/92-megaflow.sh",
        f"mkdir -p /.singularity.d; ln -s {home}/key /.singularity.d/labels.json",
        f"ln -s {home} /.megaflow-from; ln -s {home} /.megaflow-build/x",
        f"mkdir /.singularity.d; ln -s {home}/planted /.singularity.d/Singularity",
    ):
        try:
            built(f"FROM base\nENV A=b\nRUN {attack}; true\nCOPY <<E /x\ntext\nE\n")
        except MegaflowError:
            pass
        else:
            remove_tree(home.parent / "tree")
        assert untouched(home), attack


@both_layers
def test_a_file_named_like_a_mark_of_deletion_hides_nothing(built: Built, context: Path, home: Path) -> None:
    (context / ".wh.bin").touch()
    for step in ("RUN mkdir /d && touch /d/.wh..wh..opq /.wh.etc", "COPY .wh.bin /", "COPY . /usr/"):
        said, tree = "", home.parent / "tree"
        try:
            built(f"FROM base\n{step}\n")
        except MegaflowError as error:  # skipped if the step writes to a copy of its image
            said = str(error)
        assert ".wh." in said or ((tree / "etc/passwd").exists() and (tree / "bin/sh").exists())
        remove_tree(tree)


# --- limits of a step -------------------------------------------------------------------------------------------------


def test_a_step_that_runs_for_ever_is_ended(built: Built) -> None:
    with pytest.raises(MegaflowError, match="more than 3 s"):
        built("FROM base\nRUN (while :; do sleep 1; done) & while :; do sleep 1; done\n", timeout_s=3.0)


def test_what_a_step_prints_is_cut_to_its_end_and_moves_nothing_on_the_users_terminal(built: Built) -> None:
    flood = (
        "head -c 5000000 /dev/zero | tr '\\0' 'x'; printf '\\033]0;title\\007\\033[2J\\rgone\\n'; echo the end; exit 3"
    )
    with pytest.raises(MegaflowError, match="the end") as caught:
        built(f"FROM base\nRUN {flood}\n")
    assert "exit status 3" in str(caught.value)
    assert "gone" in str(caught.value)
    assert len(str(caught.value)) < 20_000
    assert not {"\033", "\007", "\r"} & set(str(caught.value))


def test_a_step_that_floods_the_disk_is_ended(built: Built) -> None:
    flood = "i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > /flood$i; done"
    with pytest.raises(MegaflowError, match="disk limit"):
        built(f"FROM base\nRUN {flood}\n", disk_mb=40)
    with pytest.raises(MegaflowError, match="exit status"):
        built("FROM base\nRUN head -c 100000000 /dev/zero > /flood\n", disk_mb=40)


def test_a_step_that_floods_the_memory_is_ended(built: Built) -> None:
    with pytest.raises(MegaflowError, match="memory limit"):
        built("FROM base\nRUN cat /dev/zero | head -c 500000000 | tail -c 400000000 > /x\n", memory_mb=100)


def test_what_a_step_leaves_running_ends_with_it(built: Built) -> None:
    tree = built(
        "FROM base\n"
        "RUN (while :; do echo x >> /ticks; sleep 0.1; done) >/dev/null 2>&1 &\n"
        "RUN cp /ticks /before 2>/dev/null || : > /before; sleep 1; cp /ticks /after 2>/dev/null || : > /after\n"
    )
    assert (tree / "before").read_text() == (tree / "after").read_text()


@pytest.mark.parametrize(
    ("layer", "end"),
    [("overlay", signal.SIGKILL), ("overlay", signal.SIGINT), ("copy", signal.SIGKILL)],
    indirect=["layer"],
)
def test_a_build_that_is_killed_leaves_nothing(
    layer: str, busybox_rootfs: str, tmp_path: Path, end: signal.Signals
) -> None:
    scratch = tmp_path / "scratch"
    program = (
        "import sys; from pathlib import Path; from tests.support.builds import build\n"
        "where, base = sys.argv[1:]\n"
        "text = 'FROM base\\nRUN mkdir -m 700 /d && touch /d/f && chown -R 33:33 /d && touch /started && sleep 99\\n'\n"
        "build(Path(where, 'context'), text, {'base': base}, scratch=Path(where, 'scratch'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path), busybox_rootfs]) as building:
        until(lambda: any(scratch.glob("owners/*/*/layer/*/started")), "the step")
        sandbox = next(path for path in scratch.glob("owners/*/*") if (path / "owner").exists())
        identity = Identity.parse((sandbox / "owner").read_text().strip())
        building.send_signal(end)
    assert building.returncode == -end
    assert identity is not None
    until(lambda: not identity.alive(), "the end of the container")
    assert end == signal.SIGKILL or list((scratch / "owners").iterdir()) == []
    assert sweep(scratch)["left"] == 0
    assert list((scratch / "owners").iterdir()) == []
    store = ImageStore(tmp_path / "store")
    assert list(store.images()) == []
    for left in store.leftovers():
        remove_tree(left)
    assert list((tmp_path / "store" / "work").glob("*/")) == []


# --- what still works -------------------------------------------------------------------------------------------------


def test_a_step_has_the_hosts_network_where_the_user_says_so(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.site:3128")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        tree = built(
            f"FROM base\nRUN nc -w 9 127.0.0.1 {port} </dev/null && echo open > /open; "
            "echo $https_proxy > /proxy; cat /etc/resolv.conf > /names\n",
            network="host",
        )
    assert (tree / "open").exists()
    assert (tree / "proxy").read_text() == "http://proxy.site:3128\n"
    assert (tree / "names").read_bytes() == Path("/etc/resolv.conf").read_bytes()
    assert "proxy.site" not in "".join(path.read_text() for path in (tree / ".singularity.d").rglob("*.sh"))


@both_layers
def test_files_keep_their_owners_and_stages_their_links(built: Built, context: Path) -> None:
    tree = built(
        "FROM base AS one\n"
        "RUN echo agent:x:1234:1234::/:/bin/sh >> /etc/passwd\n"
        "RUN mkdir -p /out/real && echo in > /out/real/file && ln -s /out/real /abs\n"
        "FROM base\n"
        "ENV WHO=me\n"
        "COPY --from=one /abs/file /abs /from/\n"
        "COPY --chown=33:44 inside/deep/file /owned\n"
        "COPY --from=one /etc/passwd /etc/passwd\n"
        "USER agent\n"
        "WORKDIR /tmp/work\n"
        "RUN id -u > /tmp/id && echo $WHO > /tmp/who\n"
        "USER root\n"
        "RUN stat -c '%u:%g' /owned /tmp/id > /owners; rm -rf /opt\n"
    )
    assert (tree / "owners").read_text() == "33:44\n1234:1234\n"
    assert (tree / "tmp/who").read_text() == "me\n"
    assert (tree / "from/file").read_text() == "in\n"
    assert not (tree / "opt").exists()
    assert not list(tree.glob(".megaflow*"))
    assert "export WHO=me" in (tree / ".singularity.d/env/92-megaflow.sh").read_text()


@pytest.mark.slow
def test_where_no_other_ids_are_given_owners_are_pretended(rootfs: str, tmp_path: Path) -> None:
    """Without ``newuidmap`` a namespace has only uid 0. The host's ``fakeroot`` then lets packages install."""
    with no_subordinate_ids(tmp_path / "bin"):
        image = build(
            tmp_path / "context",
            "FROM base\nRUN touch /a && chown www-data:www-data /a && stat -c %U /a > /who\n",
            {"base": rootfs},
        )
        assert layers_of(image).read("who") == b"www-data\n"


def test_an_image_without_a_shell_can_be_copied_from(busybox_rootfs: str, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "tool").write_text("a tool\n")
    text = "FROM base\nCOPY --from=org/tools:1 /tool /usr/bin/\n"
    image = build(tmp_path / "context", text, {"base": busybox_rootfs, "org/tools:1": str(tools)})
    assert layers_of(image).read("usr/bin/tool") == b"a tool\n"


@pytest.mark.slow
def test_a_requirement_of_a_bug_is_no_text_of_a_program(
    rootfs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared image of tasks made of bugs is built in the same way. Markers may contain quotes."""
    evil = f"; touch {tmp_path}/planted /planted /proc/1/root{tmp_path}/planted; "
    need = f"iniconfig; python_version > '3' or platform_version == '{evil}'"
    content = BugFile.model_construct(image="bugs", requires=(need,), bugs=())
    checked: list[Path] = []

    def check(builder: Builder, built: Path, target: Path) -> None:
        """Takes the place of the export to a SIF, which takes long."""
        view = layers_of(built)
        (python,) = (name for name in view.names("usr/local/lib") if name.startswith("python3"))
        assert "iniconfig" in view.names(f"usr/local/lib/{python}/dist-packages")
        assert "planted" not in view.names("")
        target.touch()
        checked.append(built)

    monkeypatch.setattr(Builder, "export", check)
    assert build_image(content, Path(rootfs), tmp_path / "bugs.sif", print)
    assert len(checked) == 1
    assert not (tmp_path / "planted").exists()
