"""One thread, one ring: all reads and writes of block files."""
