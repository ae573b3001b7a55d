"""What a pool's disk can do, measured with the reactor that will use it: `pykvcache calibrate storage`."""
