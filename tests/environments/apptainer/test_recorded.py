"""How the package reads Apptainer's answers and which command lines it builds, asserted on recordings in milliseconds.

=================================================== ============================================
code                                                scenes
=================================================== ============================================
``host/apptainer.py``                               version, and the last lines of all others
``environments/images/apptainer_client.py``         build, no-space, no-registry
``environments/images/sif.py``, ``layers/view.py``  files
``environments/sandbox/probe.py``                   node, no-network-namespaces, no-user-namespaces,
                                                    no-overlay, fuse-overlayfs
``cli/doctor.py``                                   the same
``environments/sandbox/launcher.py``, ``rootfs/``   sandbox
``model/engines/launch.py``, ``process.py``         engine
``tasks/releases/image.py``                         engine
=================================================== ============================================

A replayed call fails if its command line differs from the recorded one, which worked. :mod:`.recorder` records, and
:mod:`.scenes` makes the calls.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from megaflow_hpc.environments.images import sif
from megaflow_hpc.host import apptainer
from megaflow_hpc.host.apptainer import explained, last_line
from tests.environments.apptainer.recorder import record, replay
from tests.environments.apptainer.scenes import FUSE, RECORDED, REGISTRY, SCENES, Results, image
from tests.support.calls import Call, read_calls
from tests.support.namespaces import fuse_overlay

BUILD, STARTED = "apptainer build failed: While performing build:", "its image cannot be started: FATAL:  "
UNREACHABLE = (
    'Get "https://registry.example.org/v2/": dial tcp: lookup registry.example.org on [::1]:53: '
    "read udp [::1]:50000->[::1]:53: read: connection refused"
)
PULL = (
    f"oras://{REGISTRY}: apptainer pull failed: While pulling image from oci registry: error fetching image to cache: "
    f"failed to get checksum for oras://{REGISTRY}: {UNREACHABLE}"
)
NO_NETWORK, NO_USERS = (
    f"Failed to create {kind} namespace: maximum number of {kind} namespaces exceeded, check "
    f"/proc/sys/user/max_{short}_namespaces"
    for kind, short in (("network", "net"), ("user", "user"))
)
NO_FUSE = (
    "container creation failed: image driver mount failure: image driver {0} instance exited with error: {0} exited: "
    "fuse: failed to open /dev/fuse: Permission denied"
)
NO_PYTHON = '"python3": executable file not found in $PATH'
SOUND = {
    "setuid": "False",
    "doctor: containers": "ok a container starts; ",
    "doctor: network none": "ok sandboxes without a network; ",
    "doctor: gateway": "ok sandboxes reach only the model (by entering their network); ",
    "left": "[]",
}
"""Results of a probe of a node on which all works but the overlay."""
EXPECTED: dict[str, Results] = {
    "version": {"version": "1.4.5", "setuid": "False", "unknown option": "unknown flag: --no-such-option"},
    "build": {
        "success": "None",
        "failing post": f"/work/failing-post.def: {BUILD} while running engine: while running %post section: "
        "exit status 7",
        "missing base": f"/work/missing-base.def: {BUILD} conveyor failed to get: failed to retrieve path for "
        "/nonexistent.sif: lstat /nonexistent.sif: no such file or directory",
        "unknown bootstrap": "/work/unknown-bootstrap.def: apptainer build failed: Unable to create build: unable to "
        "get conveyorpacker: invalid build source nothing-of-that-name",
        "missing file": f"/work/missing-file.def: {BUILD} unable to copy files from host to container fs: while "
        "copying [absent] to {0}: [-fLr absent {0}]: /usr/bin/cp: cannot stat 'absent': No such file or "
        "directory".replace("{0}", "/work/tmp/megaflow-build.X/tmp/build-temp-X/rootfs/absent"),
        "no header": "/work/no-header.def: apptainer build failed: Unable to create build: multiple stages detected, "
        "all must have headers",
        "unpacked": "None",
        "unknown option": "/work/success.sif: apptainer build failed: unknown flag: --no-such-option",
        "older image": "an older image",
        "left": "",
    },
    "no-space": {
        "no space": f"/work/tree: {BUILD} while creating SIF: while creating container: write "
        "/work/full/megaflow-build.X/x.sif: no space left on device"
    },
    "no-registry": {
        "docker": f"docker://{REGISTRY}: {BUILD} conveyor failed to get: {UNREACHABLE}",
        "oras": PULL,
        "oras over HTTP": f"{PULL}; {UNREACHABLE.replace('https', 'http')}",
        "library": "library://lab/x:1: apptainer pull failed: Unable to get library client configuration: no default "
        "remote with library client in use (see https://apptainer.org/docs/user/latest/endpoint.html#no-default-remote)",
        "left": "",
    },
    "files": {
        "inode count": "38",
        "bytes": "118784",
        "names": ".exec .run .shell .singularity.d .test dev environment etc home marker proc root singularity sys tmp "
        "var",
        "workdir": "/srv",
        "truncated": "/work/cut.sif: 38960 bytes, but its header requires 40960: it was cut short; build or pull it "
        "again",
        "damaged": "/work/damaged.sif: its files cannot be listed: Failed to read compressor options",
        "damaged unpacked": "False",
        "damaged base": "/work/damaged.sif: Failed to read compressor options",
    },
    "node": SOUND | {"overlay_by": "kernel", "doctor: overlay": "ok writable layers by the kernel; "},
    "no-network-namespaces": {
        **SOUND,
        "overlay_by": "kernel",
        **dict.fromkeys(("private_network", "gateway", "refuses none", "refuses gateway"), NO_NETWORK),
        "doctor: overlay": "ok writable layers by the kernel; ",
        "doctor: network none": f"warn {NO_NETWORK}; use environment.network: host, or ask the site",
        "doctor: gateway": f"warn {NO_NETWORK}; use environment.network: host",
    },
    "no-user-namespaces": {
        "setuid": "False",
        **dict.fromkeys(("container", "overlay", "copy", "private_network", "gateway"), NO_USERS),
        "user_namespaces": "unshare: unshare failed: No space left on device",
        **{f"refuses {name}": f"containers do not start: {NO_USERS}" for name in ("none", "gateway", "host")},
        "doctor: containers": f"FAIL {NO_USERS}; no sandbox can run here; ask the site",
        "left": "[]",
    },
    "no-overlay": {
        **SOUND,
        "overlay": NO_FUSE.format("fuse-overlayfs"),
        "refuses without copies": f"no writable layer: {NO_FUSE.format('fuse-overlayfs')}; and no copy of an image: "
        "scratch is read-only",
        "doctor: overlay": "warn every sandbox is a copy of its image, which takes time and space on scratch: "
        f"{NO_FUSE.format('fuse-overlayfs')}; set MEGAFLOW_SCRATCH to a local disk, or ask for fuse-overlayfs and an "
        "open /dev/fuse",
    },
    "fuse-overlayfs": {
        **SOUND,
        "overlay_by": "fuse-overlayfs",
        "doctor: overlay": "ok writable layers by fuse-overlayfs; ",
    },
    "sandbox": {
        **dict.fromkeys(("root", "user", "gateway", "host", "nested", "fakeroot", "copy"), "started"),
        "without a shell": "the image has no /bin/sh, which every command needs "
        "(stat /bin/sh: no such file or directory)",
        "of another architecture": "image targets 'arm64', cannot run on 'amd64'; a campaign's images are for one "
        f"architecture, and this node is {os.uname().machine}; use partitions of the images' architecture for pods, or "
        "plan on a node like this one, with a separate image store",
        "missing bind": "container creation failed: mount hook function failure: mount /nonexistent->/data error: "
        "while mounting /nonexistent: mount source /nonexistent doesn't exist",
        "no image": "While checking container encryption: could not open image {0}: failed to retrieve path for {0}: "
        "lstat {0}: no such file or directory".replace("{0}", "/work/no-image/layer/root"),
    },
    "engine": {
        "directory": "started",
        "gpus": "started",
        "no python": f"{STARTED} {NO_PYTHON}",
        "no program in a SIF": f"{STARTED} {NO_PYTHON}",
        "no SIF": f"{STARTED} While checking container encryption: could not open image /work/broken.sif: image format "
        "not recognized",
        "truncated": "its image cannot be started: FATAL ERROR: File system corruption detected",
        "another architecture": f"{STARTED} While checking container encryption: could not open image "
        "/work/foreign.sif: the image's architecture (s390x) could not run on the host's (amd64)",
        "no FUSE": f"{STARTED} {NO_FUSE.format('squashfuse_ll')}",
        "python of an image": f"/work/tree: its python3 cannot be run: {NO_PYTHON}",
        "python of a SIF": f"/work/image.sif: its python3 cannot be run: {NO_PYTHON}",
    },
}
"""Scene → case → first line of its result."""


@pytest.fixture
def no_apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names a program that would fail if a call were not replayed, and no program for images."""
    monkeypatch.setenv("MEGAFLOW_TEST_BASE_SIF", "/nowhere")
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.symlink_to("/bin/false")
    monkeypatch.setenv("MEGAFLOW_APPTAINER", str(program))


@pytest.mark.usefixtures("no_apptainer")
@pytest.mark.parametrize("scene", SCENES)
def test_results(scene: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    results = replay(scene, folder)
    inspected = results.pop("inspect", "")
    assert {name: text.partition("\n")[0] for name, text in results.items()} == EXPECTED[scene]
    if scene == "files":
        labels = sif.documents(image(folder))["inspect-metadata.json"]["data"]["attributes"]["labels"]
        assert labels == json.loads(inspected)["data"]["attributes"]["labels"], "as Apptainer reads them"
    if scene == "build":
        assert results["failing post"].endswith("  + exit 7\n  FATAL:   While performing build: while running engine: "
                                                "while running %post section: exit status 7")  # fmt: skip


def test_each_scene_is_recorded() -> None:
    assert {path.stem for path in RECORDED.glob("*.txt")} == set(SCENES) == set(EXPECTED)


@pytest.mark.parametrize(
    ("setting", "value", "cause"),
    [
        ("user/max_user_namespaces", "0", "the kernel forbids unprivileged user namespaces (user.max_user_namespaces"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor restricts unprivileged user namespaces ("),
        ("user/max_user_namespaces", "9", ""),
    ],
)
def test_a_refused_namespace_has_its_cause_and_remedy(setting: str, value: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / setting).parent.mkdir()
    (tmp_path / setting).write_text(value)
    failed = [call for call in read_calls(RECORDED / "no-user-namespaces.txt") if call.status]
    assert len(failed) == 4, "two by unshare, two by Apptainer"
    for call in failed:
        message = explained(call.err, str(tmp_path))
        assert message.startswith(f"{last_line(call.err)}; {cause}" if cause else last_line(call.err))
        assert message.endswith("or for a setuid Apptainer" if cause else last_line(call.err))


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("apptainer version 1.3.0-1.el8", "1.3.0-1.el8"),
        ("singularity version 3.8.7", "3.8.7"),
        ("singularity-ce version 4.1.1", "4.1.1"),  # as its documentation shows it; not recorded
        ("another program 7", "another program 7"),
    ],
)
def test_versions_of_other_programs(line: str, version: str, tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    program.write_text(f"#!/bin/sh\necho {line}\n")
    program.chmod(0o755)
    assert apptainer.version(str(program)) == version


def shape(call: Call) -> tuple[str, int, str, str]:
    """Returns the parts of a call that every node and every run have in common."""
    return call.words, call.status, re.sub(r"\d+", "N", call.out), re.sub(r"\d+", "N", last_line(call.err))


HERE = [scene for scene in SCENES if scene != "fuse-overlayfs" or fuse_overlay(FUSE)]
"""Scenes that this node can record."""


@pytest.mark.slow
@pytest.mark.parametrize("scene", HERE)
def test_the_real_programs_still_answer_so(scene: str, tmp_path: Path) -> None:
    """A failure after an upgrade of Apptainer shows what it answers differently. Record again, and read the diff."""
    recorded = record(scene)
    file = tmp_path / "now"
    file.write_text(recorded.text)
    assert list(map(shape, read_calls(file))) == list(map(shape, read_calls(RECORDED / f"{scene}.txt")))
    recorded.results.pop("inspect", None)
    assert set(recorded.results) == set(EXPECTED[scene])
    for name, text in EXPECTED[scene].items():
        cause = text.partition("; no sandbox")[0]  # the node's settings explain why it has no namespaces
        assert recorded.results[name].startswith(cause), name
