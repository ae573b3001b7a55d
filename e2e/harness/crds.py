"""The kinds of `pykvcache.io`, made known to a cluster."""

from functools import partial
from pathlib import Path

from harness.kubectl import Kubectl, Object
from harness.waiting import wait_for

FOLDER = Path(__file__).parents[2] / "crds"
NAMES = ("kvcachepools.pykvcache.io", "kvcachenodes.pykvcache.io")


def install_crds(kubectl: Kubectl) -> None:
    """Apply the CustomResourceDefinitions of this repository and wait until objects can be made."""
    for path in sorted(FOLDER.glob("*.yaml")):
        kubectl.apply(path.read_text())
    wait_for_crds(kubectl)


def wait_for_crds(kubectl: Kubectl) -> None:
    """Wait until objects can be made."""
    for name in NAMES:
        # Not `kubectl wait`, which fails where there is no status yet.
        kubectl.wait_for("crd", name, _is_established, "to be established", limit_s=120)
        # Discovery and schemas, which kubectl asks for, come a moment later.
        wait_for(f"kubectl to know {name}", partial(kubectl.run, "explain", name), limit_s=120)


def _is_established(crd: Object) -> bool:
    conditions = {row["type"]: row["status"] for row in crd.get("status", {}).get("conditions") or []}
    return conditions.get("Established") == "True"
