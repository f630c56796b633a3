"""Images of one layer as OCI archives, which Apptainer reads."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path


def oci_archive(root: Path, target: Path, workdir: str, **settings: object) -> None:
    """Write an image of one layer in the form that a registry would store, with settings such as ``Cmd``."""
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
    config = {"architecture": "amd64", "os": "linux", "rootfs": rootfs}
    config["config"] = {"WorkingDir": workdir, **settings}
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
