"""The Kubernetes API `pykvcache.io/v1alpha1`: typed objects, their texts, defaults and bounds, and who belongs to whom.

The operator and the node agent parse and build objects through it, and the CRDs are generated from it, so the three
cannot disagree. No client, no I/O.
"""
