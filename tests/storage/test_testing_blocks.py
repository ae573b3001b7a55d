"""Blocks made for tests look to others like those of a connector: there is nothing, and then a good block."""

import os
import random
from pathlib import Path

from pykvcache_contract.paths import block_path
from pykvcache_storage.testing.blocks import publish
from pykvcache_storage.verify import verify_block


def test_a_block_has_its_name_only_when_it_is_complete(tmp_path, block_key, monkeypatch):
    path, seen = tmp_path / block_path(block_key), []

    def then_look(function):
        return lambda *given, **named: (function(*given, **named), seen.append(path.exists()))

    monkeypatch.setattr(Path, "write_bytes", then_look(Path.write_bytes))
    monkeypatch.setattr(os, "utime", then_look(os.utime))
    assert publish(tmp_path, block_key, random.Random(1).randbytes(8192), used_ns=5) == path
    assert seen == [False, False]
    verify_block(str(path), block_key)
    assert path.stat().st_mtime_ns == 5
