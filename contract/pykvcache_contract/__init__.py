"""What two py-kvcache processes must agree on: errors, units, block keys, block headers, pool paths, names, metrics.

Standard library only and no input or output: everything here may be imported by any part, in any process.
"""
