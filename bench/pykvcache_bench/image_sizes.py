"""What each image adds to its Python base image, compressed as registries keep it, and which packages it comes from.

    python -m pykvcache_bench.image_sizes --base FILE --archive operator=FILE [--archive sidecar=FILE …] [--packages 12]

Files are archives as `docker save` and `buildah push … docker-archive:` write them; e2e makes them:

    cd e2e; python -m harness images; python -m harness base

Every layer that the base image lacks is compressed alone, by gzip at its usual level 6. A package is what lies below
one name in site-packages. Each is compressed by itself and without the headers of its files, which only the image has.
Exits 1 where an image is over its limit.
"""

import argparse
import json
import sys
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

MB = 1_000_000
LIMITS_MB = {"operator": 60, "sidecar": 60, "connector": 20}
GZIP_LEVEL = 6  # what docker, buildah and containerd use unless told otherwise
CHUNK_BYTES = 1 << 20
ROOTS = ("site-packages/", "dist-packages/", "library/")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an archive: its digest uncompressed, and the name of its tar file inside."""

    digest: str
    member: str


@dataclass(slots=True)
class Size:
    """Bytes of something before and after compression."""

    plain: int = 0
    compressed: int = 0


@dataclass(slots=True)
class Package:
    """What one package weighs; `add` takes its files one after another."""

    size: Size = field(default_factory=Size)
    _gzip: "zlib._Compress" = field(default_factory=lambda: zlib.compressobj(GZIP_LEVEL))

    def add(self, file: IO[bytes]) -> None:
        """Count a file."""
        for chunk in chunks(file):
            self.size.plain += len(chunk)
            self.size.compressed += len(self._gzip.compress(chunk))

    def finish(self) -> Size:
        """Return the size of all files."""
        self.size.compressed += len(self._gzip.flush())
        return self.size


def main(arguments: list[str] | None = None) -> int:
    """Print one line an image, then its packages, and return the exit status."""
    options = _parser().parse_args(arguments)
    base = {layer.digest for layer in layers(options.base)}
    too_large = []
    print("| image | MB unpacked | MB compressed | limit |\n|---|---|---|---|")
    details = {}
    for target, path in options.archive:
        added = [layer for layer in layers(path) if layer.digest not in base]
        size = total([measure_layer(path, layer) for layer in added])
        details[target] = packages(path, added)
        limit = LIMITS_MB.get(target)
        print(f"| {target} | {size.plain / MB:.1f} | {size.compressed / MB:.1f} | {limit or '-'} |", flush=True)
        if limit and size.compressed > limit * MB:
            too_large.append(target)
    for target, found in details.items():
        print(f"\n{target}, MB compressed (unpacked): {describe(found, options.packages)}")
    if too_large:
        print(f"\nover the limit: {', '.join(too_large)}", file=sys.stderr)
    return 1 if too_large else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="archive of the base image")
    parser.add_argument("--archive", type=_pair, action="append", required=True, metavar="TARGET=FILE")
    parser.add_argument("--packages", type=int, default=12, help="how many of the largest to name")
    return parser


def _pair(text: str) -> tuple[str, Path]:
    target, equals, path = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text}: write TARGET=FILE, such as operator=image.tar")
    return target, Path(path)


def layers(archive: Path) -> list[Layer]:
    """Return the layers of the one image in an archive, the lowest first."""
    with tarfile.open(archive) as tar:
        (image,) = json.load(_open(tar, "manifest.json"))
        config = json.load(_open(tar, image["Config"]))
    return [Layer(*pair) for pair in zip(config["rootfs"]["diff_ids"], image["Layers"], strict=True)]


def measure_layer(archive: Path, layer: Layer) -> Size:
    """Return the size of a layer as a whole."""
    package = Package()
    with tarfile.open(archive) as tar:
        package.add(_open(tar, layer.member))
    return package.finish()


def total(sizes: list[Size]) -> Size:
    """Return the sum."""
    return Size(sum(size.plain for size in sizes), sum(size.compressed for size in sizes))


def packages(archive: Path, added: list[Layer]) -> dict[str, Size]:
    """Return the size of every package in some layers; what is in none is called `other`."""
    found: dict[str, Package] = {}
    with tarfile.open(archive) as tar:
        for layer in added:
            with tarfile.open(fileobj=_open(tar, layer.member), mode="r|") as files:
                for member in files:
                    content = files.extractfile(member) if member.isfile() else None
                    if content is not None:
                        found.setdefault(package_of(member.name), Package()).add(content)
    return {name: package.finish() for name, package in found.items()}


def package_of(path: str) -> str:
    """Return the name of the package that a file belongs to.

    >>> package_of("opt/x/lib/python3.11/site-packages/numpy/core/a.so"), package_of("opt/x/bin/python3")
    ('numpy', 'other')
    >>> package_of("library/numpy.libs/b.so"), package_of("library/numpy-2.4.1.dist-info/RECORD")
    ('numpy', 'numpy')
    """
    for root in ROOTS:
        _, found, rest = path.partition(root)
        if found and "/" in rest:
            name = rest.split("/")[0]
            return name.removesuffix(".libs").partition("-")[0] if name.endswith((".dist-info", ".libs")) else name
    return "other"


def describe(found: dict[str, Size], count: int) -> str:
    """Return the largest packages as text."""
    largest = sorted(found.items(), key=lambda item: item[1].compressed, reverse=True)[:count]
    return ", ".join(f"{name} {size.compressed / MB:.1f} ({size.plain / MB:.1f})" for name, size in largest)


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file piece by piece."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _open(tar: tarfile.TarFile, member: str) -> IO[bytes]:
    content = tar.extractfile(member)
    if content is None:
        raise SystemExit(f"Error: {member} in the archive is no file; write it by docker save or buildah push")
    return content


if __name__ == "__main__":
    sys.exit(main())
