"""Sizes of images, on archives made here."""

import gzip
import hashlib
import io
import json
import os
import re
import tarfile

import pytest

from pykvcache_bench.image_sizes import LIMITS_MB, main

SITE = "opt/pykvcache/lib/python3.11/site-packages"


def tar_of(files):
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()


@pytest.fixture
def archive(tmp_path):
    """A function that writes an image of some layers and returns its path."""

    def write(name, *layers):
        digests = [hashlib.sha256(layer).hexdigest() for layer in layers]
        config = {"rootfs": {"diff_ids": [f"sha256:{digest}" for digest in digests]}}
        manifest = [{"Config": "c.json", "Layers": [f"{digest}.tar" for digest in digests]}]
        files = {"c.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
        files |= {f"{digest}.tar": layer for digest, layer in zip(digests, layers, strict=True)}
        (path := tmp_path / f"{name}.tar").write_bytes(tar_of(files))
        return path

    return write


def test_only_layers_that_the_base_lacks_are_counted_as_a_registry_keeps_them(archive, capsys):
    noise = os.urandom(3_000_000)
    base = tar_of({"usr/bin/python3": os.urandom(1_000_000)})
    added = tar_of({f"{SITE}/numpy/core.so": noise, f"{SITE}/numpy-2.4.1.dist-info/RECORD": noise[:1_000_000]})
    arguments = ["--base", str(archive("base", base)), "--archive", f"operator={archive('operator', base, added)}"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    unpacked, compressed = re.findall(r"operator \| ([\d.]+) \| ([\d.]+) \| 60 \|", output)[0]
    assert float(unpacked) == round(len(added) / 1e6, 1)
    assert float(compressed) == pytest.approx(len(gzip.compress(added, 6)) / 1e6, abs=0.1)
    assert "numpy 4.0 (4.0)" in output


def test_an_image_over_its_limit_is_an_error(archive, capsys, monkeypatch):
    monkeypatch.setitem(LIMITS_MB, "connector", 1)
    base, added = tar_of({"a": b"a"}), tar_of({"library/x.so": os.urandom(1_100_000)})
    arguments = ["--base", str(archive("base", base)), "--archive", f"connector={archive('connector', base, added)}"]
    assert main(arguments) == 1
    assert "over the limit: connector" in capsys.readouterr().err


def test_an_archive_without_its_target_is_refused(archive, capsys):
    with pytest.raises(SystemExit):
        main(["--base", "b", "--archive", "image.tar"])
    assert "write TARGET=FILE" in capsys.readouterr().err
