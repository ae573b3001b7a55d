"""A simulated disk with seeded faults, for tests; product code never imports it."""
