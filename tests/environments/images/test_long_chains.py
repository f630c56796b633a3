"""Images of more layers than an overlay takes: built on, used, and written to a SIF."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.layered import read_layered
from megaflow_hpc.environments.images.store import ImageStore
from megaflow_hpc.environments.sandbox.rootfs import overlay
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from tests.support.builds import build, unpacked
from tests.support.layers import Entries, add_image
from tests.support.sandboxes import runs

STEPS = """\
FROM base
RUN rm /d/f0 && echo one >/d/one
RUN rm /d/f1 && rm -r /opt && test "$(cat /d/one)" = one && echo two >/d/two
RUN test ! -e /d/f0 && test ! -e /opt && mkdir /opt && ls -A /d | wc -l >/opt/count
COPY --from=base /d/f2 /d/f3 /copied/
"""


def test_steps_run_over_as_many_layers_as_an_overlay_takes_and_over_more(
    busybox_rootfs: str, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step is the first that is beyond. What one deletes stays deleted, what it writes the next one sees.

    With ``LAYERS=400``, what an overlay really takes, it takes a minute.
    """
    most = int(os.environ.get("LAYERS", "20"))
    monkeypatch.setattr(overlay, "MAX_LOWERS", most)
    count = most - 3
    layers: list[Entries] = [{"d/": "", f"d/f{number}": f"{number}\n"} for number in range(count - 1)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:  # where hundreds of layers are soon written
        store = ImageStore(Path(place, "store"))
        long = add_image(store, busybox_rootfs, [{"opt/": "", "opt/below/": ""}, *layers])
        image = build(Path(place, "context"), STEPS, {"base": long})
        assert len(read_layered(image).layers) == count + 4 > most

        async def look(sandbox: ApptainerSandbox) -> str:
            return (await sandbox.exec("ls /d | wc -l; cat /opt/count /d/one /d/two; ls /opt; cat /copied/*")).stdout

        assert runs(str(image), scratch)(look) == f"{count - 1}\n{count - 1}\none\ntwo\ncount\n2\n3\n"
        tree = unpacked(image, tmp_path / "tree")
    assert [path.name for path in (tree / "opt").iterdir()] == ["count"]
    assert {path.name for path in (tree / "d").iterdir()} == {f"f{n}" for n in range(2, count - 1)} | {"one", "two"}
