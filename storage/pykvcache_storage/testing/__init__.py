"""What tests need of the storage, and product code never imports: a simulated disk with seeded faults, block files."""
