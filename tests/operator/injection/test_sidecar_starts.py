"""The command of the injected sidecar, run for real: the two sides of its options agree."""

import subprocess
import sys

import pytest

READY = {
    "type": "Ready",
    "status": "True",
    "reason": "ClaimBound",
    "message": "",
    "lastTransitionTime": "2026-01-31T12:00:00Z",
}
STORAGES = [{"type": "Ephemeral", "capacity": "1Gi"}, {"type": "SharedFilesystem", "claimName": "kv"}]


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES, ids=["ephemeral", "claim"])
def test_it_starts_with_what_injection_writes(injector, tmp_path, storage):
    pool = injector.pool(storage=storage, status={"conditions": [READY]})
    command = injector(injector.pod(hostNetwork=True), pool).pod["spec"]["initContainers"][-1]["command"]
    assert command[0] == "pykvcache-sidecar"
    options = [option.replace("/pykvcache/pool", str(tmp_path)) for option in command[1:]]
    sidecar = subprocess.Popen(
        [sys.executable, "-m", "pykvcache_sidecar.main", *options], stderr=subprocess.PIPE, text=True
    )
    lines = []
    try:
        for line in sidecar.stderr:
            lines.append(line)
            if "listening on" in line:
                break
    finally:
        sidecar.kill()
        sidecar.wait()
        sidecar.stderr.close()
    assert "listening on" in lines[-1]
