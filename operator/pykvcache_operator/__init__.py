"""The operator: one KVCachePool object becomes volumes, calibration and status on every node."""
