"""A folder as an image: one layer, written as an OCI archive that containerd imports. No tool, no registry."""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUSYBOX = "localhost/e2e/busybox:1"  # a shell for test pods; also the pause container of every pod
MEDIA_TYPE = "application/vnd.oci.image"


def write_archive(archive: Path, *, name: str, root: Path, command: Sequence[str]) -> None:
    """Write the folder `root` as image `name`, whose containers run `command`; all is held in memory."""
    layer = _tar({path.name: path for path in sorted(root.iterdir())})
    blobs: dict[str, bytes] = {}

    def add(kind: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"{MEDIA_TYPE}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    layers = [add("layer.v1.tar", layer)]
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA_TYPE}.manifest.v1+json",
        "config": add("config.v1+json", json.dumps(config).encode()),
        "layers": layers,
    }
    reference = add("manifest.v1+json", json.dumps(manifest).encode())
    reference["annotations"] = {"io.containerd.image.name": name}
    index = {"schemaVersion": 2, "manifests": [reference]}
    files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}
    archive.write_bytes(_tar(files))


def write_busybox(archive: Path, *, scratch: Path, busybox: Path) -> None:
    """Write the image BUSYBOX from Debian's static program."""
    folder = scratch / "bin"
    folder.mkdir(parents=True)
    (folder / "busybox").write_bytes(busybox.read_bytes())
    (folder / "busybox").chmod(0o755)
    for applet in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        if applet != "busybox":
            (folder / applet).symlink_to("busybox")
    (scratch / "tmp").mkdir()
    (scratch / "tmp").chmod(0o1777)
    (scratch / "etc").mkdir()
    (scratch / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\nuser:x:65532:65532::/tmp:/bin/sh\n")
    write_archive(archive, name=BUSYBOX, root=scratch, command=["/bin/sleep", "2147483647"])


def _tar(entries: dict[str, Path] | dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in entries.items():
            if isinstance(content, Path):
                tar.add(content, arcname=name, filter=_owned_by_root)
            else:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
