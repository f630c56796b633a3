"""What an image says of itself: of a SIF that Apptainer made of an OCI image, and of one with a label."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from megaflow_hpc.environments.images.image_file import LABEL, working_directory
from megaflow_hpc.host.apptainer import clean_environment, find_apptainer
from tests.support.oci import oci_archive


def test_the_work_directory_of_an_image_that_was_pulled(small_rootfs: str, base_sif: Path, tmp_path: Path) -> None:
    oci_archive(Path(small_rootfs, "etc"), tmp_path / "x.tar", "/app/src")
    command = [find_apptainer(), "build", str(tmp_path / "x.sif"), f"oci-archive:{tmp_path / 'x.tar'}"]
    subprocess.run(command, env=clean_environment(tmp_path), check=True, capture_output=True)
    assert working_directory(tmp_path / "x.sif") == "/app/src"
    assert working_directory(base_sif) is None


def test_the_label_of_an_unpacked_image_and_what_is_no_image(tmp_path: Path) -> None:
    assert working_directory(tmp_path) is None
    labels = tmp_path / ".singularity.d" / "labels.json"
    labels.parent.mkdir()
    for text, found in ((json.dumps({LABEL: "/srv"}), "/srv"), (json.dumps({LABEL: "srv"}), None), ("[]", None)):
        labels.write_text(text)
        assert working_directory(tmp_path) == found
    (tmp_path / "x").write_bytes(b"not a SIF")
    assert working_directory(tmp_path / "x") is None
    assert working_directory(tmp_path / "gone") is None
