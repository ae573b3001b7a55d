"""Proves by reading source text that the names we use of vLLM exist in a release, also in one that cannot run here."""
