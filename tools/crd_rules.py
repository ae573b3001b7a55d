"""What the CRDs refuse beyond types and bounds: the rules between fields, and what may not change. Used by gen_crds.

A rule is a CEL expression that must hold and the message that the user reads when it does not; it lies at the object or
field whose path is its key. Defaults are filled in before rules run, so a field with a default is always there, and a
field that has no effect in some type of storage is refused there when it is not at its default.
"""

from typing import NamedTuple

from pykvcache_contract.api.pool import POOL_NAME_LENGTH_MAX


class Rule(NamedTuple):
    """A CEL expression and what to tell the user when it is false."""

    rule: str
    message: str


NODE_LOCAL = "self.storage.type == 'NodeLocal'"


def _unchanged(name: str) -> list[Rule]:
    return [Rule("self == oldSelf", f"{name} cannot be changed: data would be left behind. Make a new pool instead")]


POOL_RULES: dict[str, list[Rule]] = {
    "": [
        Rule(
            f"size(self.metadata.name) <= {POOL_NAME_LENGTH_MAX} && "
            "self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
            "the name of a pool goes into labels, paths and claims: use at most "
            f"{POOL_NAME_LENGTH_MAX} lower-case letters, digits and '-'",
        ),
    ],
    "spec": [
        # Not in `eviction`: rules there would be tried on its default, {}, before the defaults of its fields are in.
        Rule(
            "self.eviction.lowWatermarkPercent < self.eviction.highWatermarkPercent",
            "eviction.lowWatermarkPercent must be below highWatermarkPercent: eviction begins at the high one and "
            "stops at the low one",
        ),
        Rule(
            f"{NODE_LOCAL} || size(self.nodeSelector) == 0",
            "nodeSelector is for storage.type NodeLocal only; remove it",
        ),
        Rule(
            f"{NODE_LOCAL} || !has(self.diskSelector)",
            "diskSelector is for storage.type NodeLocal only; remove it",
        ),
        Rule(
            "!has(self.diskSelector) || self.storage.path == ''",
            "storage.path already says which disk; remove diskSelector, or storage.path",
        ),
        Rule(
            f"{NODE_LOCAL} || self.minReadyNodes == 1",
            "minReadyNodes is for storage.type NodeLocal only; remove it",
        ),
        Rule(
            f"{NODE_LOCAL} || !self.calibration.enabled || "
            "(self.calibration.maxAge == '720h' && self.calibration.maxConcurrentNodes == 1)",
            "calibration measures the nodes' disks, for storage.type NodeLocal only; remove it",
        ),
        Rule(
            f"{NODE_LOCAL} || (self.eviction.policy == 'LRU' && self.eviction.highWatermarkPercent == 90 && "
            "self.eviction.lowWatermarkPercent == 80 && self.eviction.unusedAfter == '720h')",
            "eviction is done by the node agent, for storage.type NodeLocal only; remove it",
        ),
        Rule(
            f"{NODE_LOCAL} || quantity(string(self.integrity.scrubBytesPerSecond)).compareTo(quantity('16Mi')) == 0",
            "integrity is watched by the node agent, for storage.type NodeLocal only; remove it",
        ),
        Rule(
            f"{NODE_LOCAL} || quantity(string(self.writeBudgetPerDay)).compareTo(quantity('0')) == 0",
            "writeBudgetPerDay is kept by the node agent, for storage.type NodeLocal only; remove it",
        ),
        Rule(
            "self.storage.type != 'Ephemeral' || !has(self.allowedNamespaces)",
            "allowedNamespaces has no effect with storage.type Ephemeral: each pod has its own emptyDir; remove it",
        ),
        Rule(
            "self.storage.type != 'Ephemeral' || self.deletionPolicy == 'Delete'",
            "deletionPolicy Retain has no effect with storage.type Ephemeral: data go with their pod; remove it",
        ),
        Rule(
            f"{NODE_LOCAL} || self.sharing == 'Namespace'",
            "sharing Pool is for storage.type NodeLocal only: of a claim, whoever mounts it sees all; remove sharing",
        ),
        Rule(
            "self.sharing != 'Pool' || (has(self.allowedNamespaces) && (size(self.allowedNamespaces.names) > 0 || "
            "size(self.allowedNamespaces.matchLabels) > 0))",
            "sharing Pool lets namespaces see each other's cache: name those that may in allowedNamespaces",
        ),
        Rule(
            "self.storage.storageClassName == '' || (has(self.allowedNamespaces) && "
            "(size(self.allowedNamespaces.names) > 0 || size(self.allowedNamespaces.matchLabels) > 0))",
            "storage.storageClassName makes a claim in each namespace: name those that get one in allowedNamespaces",
        ),
    ],
    "spec.storage": [
        Rule(
            "self.type != 'NodeLocal' || has(self.capacityPerNode)",
            "type NodeLocal needs capacityPerNode: the bytes that the pool may take on each node, for example 800Gi",
        ),
        Rule(
            "self.type == 'NodeLocal' || !has(self.capacityPerNode)",
            "capacityPerNode is for type NodeLocal only; use capacity, or nothing with claimName",
        ),
        Rule(
            "self.type != 'Ephemeral' || has(self.capacity)",
            "type Ephemeral needs capacity: the sizeLimit of each pod's emptyDir, for example 200Gi",
        ),
        Rule(
            "self.storageClassName == '' || has(self.capacity)",
            "storageClassName needs capacity: the size of each claim, for example 2Ti",
        ),
        Rule(
            "self.type == 'Ephemeral' || self.storageClassName != '' || !has(self.capacity)",
            "capacity is for type Ephemeral and for storageClassName only; remove it: an existing claim has its own "
            "size, and NodeLocal has capacityPerNode",
        ),
        Rule(
            "self.storageClassName == '' || !has(self.capacity) || !has(oldSelf.capacity) || "
            "quantity(string(self.capacity)).compareTo(quantity(string(oldSelf.capacity))) >= 0",
            "capacity of claims can only grow; for smaller claims make a new pool",
        ),
        Rule(
            "self.type != 'SharedFilesystem' || (self.claimName == '') != (self.storageClassName == '')",
            "type SharedFilesystem needs either claimName (an existing claim) or storageClassName (claims are made)",
        ),
        Rule(
            "self.type == 'SharedFilesystem' || (self.claimName == '' && self.storageClassName == '')",
            "claimName and storageClassName are for type SharedFilesystem only; remove them",
        ),
        Rule(
            "self.type == 'NodeLocal' || self.path == ''",
            "path is for type NodeLocal only; remove it",
        ),
        Rule(
            "self.type == 'NodeLocal' || self.volume == 'CSI'",
            "volume is for type NodeLocal only; remove it",
        ),
        Rule(
            "self.onUnavailable == 'Degrade' || (self.type == 'NodeLocal' && self.volume == 'CSI')",
            "onUnavailable Block needs type NodeLocal and volume CSI; remove it",
        ),
        Rule(
            "self.type == 'NodeLocal' || quantity(string(self.minFree)).compareTo(quantity('10Gi')) == 0",
            "minFree is for type NodeLocal only; remove it",
        ),
    ],
    "spec.storage.type": _unchanged("storage.type"),
    "spec.storage.path": _unchanged("storage.path"),
    "spec.storage.volume": _unchanged("storage.volume"),
    "spec.storage.storageClassName": _unchanged("storage.storageClassName"),
    "spec.sharing": _unchanged("sharing"),
}
