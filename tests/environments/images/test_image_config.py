"""What an image says of itself: of a SIF that Apptainer made of an OCI image, and of one with a label."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path

from megaflow_hpc.environments.images.image_config import LABEL, working_directory
from megaflow_hpc.host.apptainer import clean_environment, find_apptainer


def oci_archive(root: Path, target: Path, workdir: str) -> None:
    """An image of one layer, as a registry would hold it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(root, arcname=".")

    def described(kind: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "size": len(data), "digest": f"sha256:{digest}"}

    blobs: dict[str, bytes] = {}
    content = described("layer.v1.tar", layer.getvalue())
    rootfs = {"type": "layers", "diff_ids": [content["digest"]]}
    config = {"architecture": "amd64", "os": "linux", "config": {"WorkingDir": workdir}, "rootfs": rootfs}
    shown = described("config.v1+json", json.dumps(config).encode())
    manifest = {"schemaVersion": 2, "config": shown, "layers": [content]}
    entry = described("manifest.v1+json", json.dumps(manifest).encode())
    files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    files |= {f"blobs/sha256/{digest}": data for digest, data in blobs.items()}
    with tarfile.open(target, "w") as tar:
        for name in ("blobs", "blobs/sha256"):
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


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
