"""A real Kubernetes for tests, on the machine that runs them; no part of the product imports it."""
