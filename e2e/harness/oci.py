"""A folder as an image: one layer, written as an OCI archive that containerd imports. No tool, no registry."""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

BUSYBOX = "localhost/e2e/busybox:1"  # a shell for test pods; also the pause container of every pod
MEDIA_TYPE = "application/vnd.oci.image"

Filter = Callable[[tarfile.TarInfo], tarfile.TarInfo | None]


class HashingWriter(io.RawIOBase):
    """Writes through to a file, and keeps the size and the SHA-256 of what it wrote."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0

    def writable(self) -> bool:
        """Whether it takes bytes: always."""
        return True

    def write(self, data: Any) -> int:
        """Write all of it."""
        self._digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def hexdigest(self) -> str:
        """Return the hash of everything so far."""
        return self._digest.hexdigest()


def write_archive(archive: Path, *, name: str, root: Path, command: Sequence[str]) -> None:
    """Write the folder `root` as image `name`, whose containers run `command`."""
    entries = [(path.name, path) for path in sorted(root.iterdir())]
    write_image(archive, name=name, entries=entries, config={"Cmd": list(command), "Env": ["PATH=/usr/bin:/bin"]})


def write_image(
    archive: Path,
    *,
    name: str,
    entries: Iterable[tuple[str, Path]],
    config: Mapping[str, Any],
    accept: Filter = lambda entry: entry,
) -> None:
    """Write files and whole folders as image `name`: one layer, owned by root, in one pass and little memory.

    Args:
        archive: written anew.
        entries: where each comes to lie in the image, without a leading slash, and where it lies here.
        config: the image's `config`: Entrypoint, Cmd, Env, User, …
        accept: may change what the layer's tar says of a file, or leave the file out by returning None.
    """
    with archive.open("wb") as output:
        # The layer's name is its hash, known only at its end: leave room for its header and go back.
        output.write(bytes(tarfile.BLOCKSIZE))
        layer = HashingWriter(output)
        with tarfile.open(fileobj=layer, mode="w|") as tar:
            for path, source in entries:
                tar.add(source, arcname=path, filter=lambda entry: accept(_owned_by_root(entry)))
        output.write(bytes(-layer.size % tarfile.BLOCKSIZE))
        output.write(_tar(_descriptions(name, layer=layer, config=config)))
        output.seek(0)
        output.write(_header(_blob(layer.hexdigest()), layer.size))


def _descriptions(name: str, *, layer: HashingWriter, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of an OCI archive beside its layer."""
    blobs: dict[str, bytes] = {}

    def add(kind: str, document: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(document).encode()
        digest = hashlib.sha256(data).hexdigest()
        blobs[_blob(digest)] = data
        return {"mediaType": f"{MEDIA_TYPE}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    digest = f"sha256:{layer.hexdigest()}"
    image = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{MEDIA_TYPE}.manifest.v1+json",
        "config": add("config.v1+json", image),
        "layers": [{"mediaType": f"{MEDIA_TYPE}.layer.v1.tar", "digest": digest, "size": layer.size}],
    }
    reference = add("manifest.v1+json", manifest)
    reference["annotations"] = {"io.containerd.image.name": name}
    index = {"schemaVersion": 2, "manifests": [reference]}
    return {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": json.dumps(index).encode(), **blobs}


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest}"


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


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(format=tarfile.GNU_FORMAT)


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
